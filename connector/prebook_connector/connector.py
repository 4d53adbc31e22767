"""``PrebookConnector``: what vLLM loads with ``kv_connector_module_path=prebook_connector.connector``.

A thin facade: the scheduler side is :class:`prebook_connector.scheduler.PrebookScheduler`, the worker side
:class:`prebook_connector.worker.PrebookWorker`. Upstream's ``NixlPushConnector.__init__`` would build its own two, so
its base class is the parent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorTransferResults

from prebook_connector.control import ControlServer
from prebook_connector.metadata import PrebookMetadata
from prebook_connector.metrics import PrebookPromMetrics, PrebookStats
from prebook_connector.recorder import MemoryRecorder
from prebook_connector.scheduler import PrebookScheduler
from prebook_connector.settings import ConnectorSettings, parse
from prebook_connector.upstream import NixlBaseConnector, check_version
from prebook_connector.worker import PrebookWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig

ROLES = ("kv_producer", "kv_consumer")


class PrebookConnector(NixlBaseConnector):  # type: ignore[misc]
    """Push-mode KV transfer with booked blocks; see the package's text and docs/guide/connector.md."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        check_version()
        transfer = vllm_config.kv_transfer_config
        settings = parse(transfer.kv_connector_extra_config)
        if transfer.kv_role not in ROLES:
            raise ValueError(f"kv_role is {transfer.kv_role!r}; use kv_producer on prefill and kv_consumer on decode")
        if vllm_config.parallel_config.decode_context_parallel_size > 1:
            raise ValueError("PrebookConnector does not support decode_context_parallel_size > 1; set it to 1")
        super().__init__(vllm_config, role, kv_cache_config)
        self._recorder = MemoryRecorder()
        self._scheduler: PrebookScheduler | None = None
        self._worker: PrebookWorker | None = None
        self._control: ControlServer | None = None
        self._blocks: KVCacheManager | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = PrebookScheduler(vllm_config, self.engine_id, kv_cache_config, recorder=self._recorder)
            self.connector_scheduler = self._scheduler
            self._serve_scheduler(settings, vllm_config)
        else:
            self._worker = PrebookWorker(
                vllm_config, self.engine_id, kv_cache_config, settings=settings, recorder=self._recorder
            )

    def _serve_scheduler(self, settings: ConnectorSettings, vllm_config: VllmConfig) -> None:
        if settings.control_dir is None:
            return
        name = f"scheduler-{vllm_config.parallel_config.data_parallel_index}.sock"
        self._control = ControlServer(
            folder=settings.control_dir, name=name, handlers={"status": lambda request: self._status()}
        )
        self._control.start()

    def _status(self) -> dict[str, Any]:
        from prebook_connector import PROTOCOL_VERSION

        return {
            "kind": "scheduler",
            "engine_id": self.engine_id,
            "role": "prefill" if self.kv_transfer_config.kv_role == "kv_producer" else "decode",
            "protocol": PROTOCOL_VERSION,
            "block_size": self._vllm_config.cache_config.block_size,
            "kv_usage": self._blocks.usage if self._blocks is not None else None,
            "counters": self._recorder.totals(),
        }

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Lets the status tell the KV cache usage."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._blocks = kv_cache_manager

    # -- worker side ---------------------------------------------------------------------------------------------

    def _working(self) -> tuple[PrebookWorker, PrebookMetadata | None]:
        if self._worker is None:
            raise RuntimeError("a worker hook was called on the scheduler side")
        metadata = self._connector_metadata
        return self._worker, metadata if isinstance(metadata, PrebookMetadata) else None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._working()[0].register_kv_caches(kv_caches)

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        """Nothing: device memory is moved directly."""

    def get_handshake_metadata(self) -> Any:
        return self._working()[0].handshake_metadata

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        worker, _ = self._working()
        if isinstance(kv_connector_metadata, PrebookMetadata):
            worker.before_forward(kv_connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Nothing: what is to load was handed over before the forward pass."""

    def has_connector_metadata(self) -> bool:
        """Whether vLLM calls the hooks around each layer: only in a step in which one is waited for."""
        return self._worker is not None and self._worker.watches_layers

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """A layer of this step has run (not called where a whole CUDA graph is replayed)."""
        self._working()[0].layer_done(layer_name)

    def wait_for_save(self) -> None:
        worker, metadata = self._working()
        if metadata is not None:
            worker.after_forward(metadata)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._working()[0].take_results()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._working()[0].take_invalid_blocks()

    # -- both ----------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> PrebookStats | None:
        if self._worker is not None:
            self._worker.measure()
        taken = self._recorder.take()
        return PrebookStats(data=taken) if taken else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PrebookStats:
        return PrebookStats(data=data if data is not None else {"counts": {}, "samples": {}, "gauges": {}})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> PrebookPromMetrics:
        return PrebookPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._control is not None:
            self._control.stop()
            self._control = None
        if self._worker is not None:
            self._worker.shutdown()
        if self._scheduler is not None:
            self._scheduler.shutdown()
