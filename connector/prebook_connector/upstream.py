"""Everything of vLLM's that is not public API, in one place, with what we rely on.

No other module imports from ``vllm...kv_connector.v1.nixl``. tests/unit/test_upstream_contract.py pins each name and
signature that is used here and says what changed when a new vLLM differs. What vLLM's push classes do is kept for the
*data path* (memory registration, descriptor lists, TP mapping, handshake payload, compatibility hash); their threads,
notifications, leases and matching are replaced.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    GET_META_MSG,
    NixlAgentMetadata,
    NixlHandshakePayload,
    RemoteMeta,
    ReqMeta,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import NixlPushConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import ReadSpec
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import get_base_request_id
from vllm.platforms import current_platform

from prebook_connector import PROTOCOL_VERSION
from prebook_connector.ports import Groups, LinkError, PeerSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = [
    "GET_META_MSG",
    "SUPPORTED_VLLM",
    "DataPath",
    "NixlBaseConnector",
    "NixlPushConnectorScheduler",
    "UnsupportedVersionError",
    "check_version",
    "get_base_request_id",
]

SUPPORTED_VLLM = ("0.32.0",)
"""vLLM versions that this connector was tested with."""


class UnsupportedVersionError(RuntimeError):
    """The installed vLLM is not one that the connector knows."""


def check_version(installed: str | None = None) -> None:
    """Raises :class:`UnsupportedVersionError` unless vLLM is one of :data:`SUPPORTED_VLLM`.

    Local parts (``+cpu``) do not matter. The connector builds on private classes, so that a version that nobody tried
    could corrupt KV silently; stopping at start is the cheaper surprise.
    """
    version = (installed or vllm.__version__).split("+")[0]
    if version not in SUPPORTED_VLLM:
        raise UnsupportedVersionError(
            f"vLLM {version} is installed, this Prebook connector supports {', '.join(SUPPORTED_VLLM)}; "
            "use an engine image with a supported vLLM, or a Prebook release that supports yours, "
            "or set transfer.connector to NixlPush or NixlPull"
        )


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """Has the base worker create its NIXL agent without threads of its own, and undoes its CPU pinning.

    The base class builds ``nixl_agent_config(...)`` itself, with the progress thread on (it polls without a pause: a
    core per engine even when idle) and four backend threads. On the CPU platform it also pins the calling thread to
    one core of each NUMA node, which every thread started later inherits: two engines on one small machine would
    share a core.
    """
    original = base_worker.nixl_agent_config
    affinity = os.sched_getaffinity(0)
    if original is not None:

        @functools.wraps(original)
        def without_threads(*args: Any, **kwargs: Any) -> Any:
            kwargs.update(enable_prog_thread=False, num_threads=0, capture_telemetry=False)
            return original(*args, **kwargs)

        base_worker.nixl_agent_config = without_threads
    try:
        yield
    finally:
        base_worker.nixl_agent_config = original
        os.sched_setaffinity(0, affinity)


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


@dataclass(frozen=True)
class Write:
    """Handles of one posted WRITE and the bytes that they move."""

    handles: list[Any]
    bytes: int
    descriptors: int


class DataPath(NixlPushConnectorWorker):  # type: ignore[misc]
    """vLLM's push worker without its thread: registered memory, descriptors and WRITEs.

    After construction and :meth:`register`, everything is called on the transfer thread only.
    """

    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig, *, model_revision: str
    ) -> None:
        with _quiet_agent():
            super().__init__(vllm_config, engine_id, kv_cache_config)
        # Part of the compatibility hash: peers of another protocol or model revision are refused at the handshake.
        self._TRANSFER_MODE = f"prebook-{PROTOCOL_VERSION}:{model_revision}"
        if self.use_host_buffer:
            raise ValueError(
                "PrebookConnector moves device memory; remove kv_buffer_device=cpu (it is for CPU engines)"
            )
        self._write_payload = b""
        self._write_regions: tuple[int, int] | None = None
        self._write_bytes = self._write_descriptors = 0

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Registers the KV caches with NIXL and builds the handshake payload; starts no thread."""
        NixlBaseConnectorWorker.register_kv_caches(self, kv_caches)
        if self._mixed_mem_types:
            raise ValueError("PrebookConnector does not support KV caches in mixed memory types")

    # -- peers ---------------------------------------------------------------------------------------------------

    def handshake_ranks(self, spec: PeerSpec) -> list[tuple[int, int]]:
        """(pp, tp) ranks of ``spec`` whose payload this rank needs."""
        assert self.transfer_topo is not None
        targets = self.transfer_topo.handshake_target_ranks(spec.tp_size)
        return [(pp, tp) for pp in range(spec.pp_size) for tp in targets]

    def attach_engine(
        self, spec: PeerSpec, payloads: dict[tuple[int, int], bytes], *, notify_only: bool
    ) -> dict[str, tuple[int, int]]:
        """Adds the agents of an engine; ``notify_only`` on decode, which never touches prefill's memory.

        Raises :class:`LinkError` when the peer is incompatible, with the reason.
        """
        names: dict[str, tuple[int, int]] = {}
        try:
            for ranks, payload in payloads.items():
                metadata = self._decode_payload(spec, payload)
                if notify_only:
                    name = self._add_notif_only_remote_agent(metadata, spec.tp_size, metadata.dcp_size)
                else:
                    name = self.add_remote_agent(metadata, ranks[1], spec.tp_size, metadata.dcp_size)
                # NIXL returns the name as bytes here and as str with notifications.
                names[_text(name)] = ranks
                self._remote_agents[spec.engine_id][ranks] = name
        except LinkError:
            self.detach_engine(spec.engine_id)
            raise
        except Exception as error:  # upstream asserts and raises many kinds; each means: this pair cannot work
            self.detach_engine(spec.engine_id)
            raise LinkError(f"{type(error).__name__}: {error}") from error
        return names

    def _decode_payload(self, spec: PeerSpec, payload: bytes) -> NixlAgentMetadata:
        try:
            outer = msgspec.msgpack.decode(payload, type=NixlHandshakePayload)
            if outer.compatibility_hash != self.compat_hash:
                raise LinkError(
                    f"incompatible: hash {outer.compatibility_hash[:12]} of {spec.address or spec.host} differs from "
                    f"ours {(self.compat_hash or '')[:12]}; both sides need the same vLLM, model and revision, dtype, "
                    "KV cache layout, attention backend and Prebook protocol"
                )
            metadata = msgspec.msgpack.decode(outer.agent_metadata_bytes, type=NixlAgentMetadata)
        except msgspec.MsgspecError as error:
            raise LinkError(f"bad handshake payload: {error}") from error
        if metadata.engine_id != spec.engine_id:
            raise LinkError(f"engine {metadata.engine_id} answers where {spec.engine_id} was expected (it restarted)")
        self._validate_remote_parallel_config(metadata)
        return metadata

    def detach_engine(self, engine_id: str) -> None:
        """Releases descriptors and agents of an engine."""
        if engine_id in self._remote_agents:
            self._cleanup_remote_engine(engine_id, log_eviction=False)
        elif self.transfer_topo is not None:
            self.transfer_topo.unregister_remote_engine(engine_id)

    def write_targets(self, engine_id: str) -> frozenset[str]:
        """Names of the decode agents that this rank writes to."""
        return frozenset(
            _text(name)
            for (_, tp), name in self._remote_agents.get(engine_id, {}).items()
            if tp in self.dst_xfer_side_handles[engine_id]
        )

    def producers_per_consumer(self, decode_tp_size: int) -> int:
        """How many prefill ranks write to one decode rank (see ``_get_new_notifs`` upstream)."""
        return int(self.pp_size * max(1, self.world_size // decode_tp_size))

    # -- WRITEs --------------------------------------------------------------------------------------------------

    def write(
        self, engine_id: str, *, local: Groups, remote: Groups, payload: bytes, regions: tuple[int, int] | None
    ) -> Write:
        """Posts a WRITE of logical blocks ``local`` into ``remote``; see ``ports.Link.post``.

        Raises :class:`LinkError`; what was already posted is then released, or named in the error when it cannot be.
        """
        logical = tuple(list(group) for group in local)
        meta = ReqMeta(
            local_block_ids=logical,
            local_physical_block_ids=self._logical_to_kernel_block_ids(
                logical, self._physical_blocks_per_logical_kv_block
            ),
            tp_size=self.world_size,
            remote=RemoteMeta(
                block_ids=tuple(list(group) for group in remote), host="", port=0, engine_id=engine_id, request_id=""
            ),
        )
        self._write_payload, self._write_bytes, self._write_descriptors = payload, 0, 0
        self._write_regions = regions
        key = "write"
        try:
            self._xfer_blocks_for_req(key, meta)
        except LinkError:
            raise
        except Exception as error:
            raise LinkError(f"{type(error).__name__}: {error}") from error
        return Write(self._sending_transfers.pop(key, []), self._write_bytes, self._write_descriptors)

    def _xfer_blocks(
        self,
        read_spec: ReadSpec,
        dst_engine_id: str,
        request_id: str,
        remote_request_id: str,
        local_xfer_side_handle: int,
        remote_xfer_side_handle: int,
    ) -> Any:
        """One rank's WRITE; called by upstream's ``_xfer_blocks_for_req`` after it has chosen ranks and handles.

        Replaces upstream's: the notification is ours, mismatches are errors instead of asserts, and block ids that a
        peer sent are checked against its registered range before they become addresses.
        """
        assert self.transfer_topo is not None
        info = self.transfer_topo.get_engine_info(dst_engine_id)
        ratio = self.transfer_topo.block_size_ratio(info.remote_block_size)
        local, remote = list(read_spec.local_block_ids), list(read_spec.remote_block_ids)
        if ratio > 1:
            local, remote = map(list, self._map_block_ids_for_block_size_ratio(local, remote, ratio))
        remote, local = map(
            list,
            self._apply_prefix_caching(
                decode_block_ids=remote,
                prefill_block_ids=local,
                decode_physical_per_logical=info.remote_physical_blocks_per_logical,
                prefill_physical_per_logical=self._physical_blocks_per_logical_kv_block,
            ),
        )
        if [len(group) for group in local] != [len(group) for group in remote]:
            raise LinkError(f"block counts differ: {list(map(len, local))} here, {list(map(len, remote))} there")
        limit = self.dst_num_blocks[dst_engine_id]
        if any(not 0 <= block < limit for group in remote for block in group):
            raise LinkError(f"a registered block id is outside 0..{limit - 1}")
        local_ids = self._descriptor_ids(self.engine_id, local, ratio=ratio)
        remote_ids = self._descriptor_ids(dst_engine_id, remote, ratio=None, info=info)
        if self._write_regions is not None:
            local_ids, remote_ids = map(self._slice_of_regions, (local_ids, remote_ids))
        handle = self.nixl_wrapper.make_prepped_xfer(
            "WRITE",
            local_xfer_side_handle,
            local_ids,
            remote_xfer_side_handle,
            remote_ids,
            notif_msg=self._write_payload,
        )
        if self.nixl_wrapper.transfer(handle) == "ERR":
            self.nixl_wrapper.release_xfer_handle(handle)
            raise LinkError("the transport refused the WRITE")
        split = max(1, -self.transfer_topo.tp_ratio(info.remote_tp_size)) if not self.use_mla else 1
        data = self.src_blocks_data_by_block_size.get(info.remote_block_size, self.src_blocks_data)
        self._write_descriptors += len(local_ids)
        self._write_bytes += int(np.asarray(data)[local_ids, 1].sum()) // split
        return handle

    def _slice_of_regions(self, ids: Any) -> Any:
        """Of descriptor ids that are ordered by region, then by block, those of the regions of this WRITE."""
        assert self._write_regions is not None
        each, uneven = divmod(len(ids), self.num_regions)
        if uneven:
            raise LinkError(f"{len(ids)} descriptors cannot be told apart by {self.num_regions} regions")
        first, last = self._write_regions
        return ids[first * each : last * each]

    def _descriptor_ids(self, engine_id: str, blocks: list[list[int]], *, ratio: int | None, info: Any = None) -> Any:
        own = engine_id == self.engine_id
        return self._compute_desc_ids(
            block_ids=blocks,
            dst_num_blocks=self.dst_num_blocks[engine_id],
            block_size_ratio=ratio,
            physical_blocks_per_logical=(
                self._physical_blocks_per_logical_kv_block if own else info.remote_physical_blocks_per_logical
            ),
            region_num_blocks=self.dst_region_num_blocks[engine_id],
            region_group_ids=self.region_group_ids if own else self.dst_region_group_ids[engine_id],
            uses_region_group_mapping=(
                self._uses_region_group_mapping if own else self.dst_uses_region_group_mapping[engine_id]
            ),
        )

    # -- what is registered --------------------------------------------------------------------------------------

    def block_bytes(self) -> int:
        """Bytes of one logical block on this rank, over all layers."""
        return int(sum(self.block_len_per_layer)) * int(self._physical_blocks_per_logical_kv_block)

    def layer_regions(self) -> list[str]:
        """The layer of each region, in order, when each layer has one region to itself; else nothing.

        Only then is a part of a WRITE final when its layer has run. Layers that share memory, run more than once in a
        step (microbatches, draft models) or lie on another pipeline stage are left to WRITEs of whole blocks.
        """
        parallel = self.vllm_config.parallel_config
        names = [name for name in self.device_kv_caches if name in self._layer_specs]
        plain = (
            sorted(names) == sorted(self.region_names)
            and not self._has_mamba
            and not self._transfer_layer_group_ids
            and not self._uses_region_group_mapping
            and parallel.pipeline_parallel_size == 1
            and not parallel.use_ubatching
            and self.vllm_config.speculative_config is None
        )
        return list(self.region_names) if plain else []

    def read_blocks(self, blocks: Sequence[int]) -> Iterator[memoryview]:
        """The bytes of logical ``blocks``, region by region (for checksums; copies from the device)."""
        ratio = self._physical_blocks_per_logical_kv_block
        bases = self.kv_caches_base_addr[self.engine_id][self.tp_rank]
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in self.device_kv_caches.values()}
        for base, stride, length in zip(bases, self.block_stride_per_layer, self.block_len_per_layer, strict=True):
            start, tensor = next(
                (start, tensor)
                for start, tensor in storages.items()
                if start <= base < start + tensor.untyped_storage().nbytes()
            )
            raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            for block in blocks:
                for kernel_block in range(block * ratio, (block + 1) * ratio):
                    offset = base - start + kernel_block * stride
                    yield memoryview(raw[offset : offset + length].cpu().numpy())

    def shutdown(self) -> None:
        """Releases NIXL's resources; the transfer thread has ended."""
        NixlBaseConnectorWorker.shutdown(self)

    def use_device(self) -> None:
        """Gives the calling thread a device context (UCX needs one to see device memory)."""
        if current_platform.device_type != "cpu":
            current_platform.set_device(self.device_id)
