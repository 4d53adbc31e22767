"""The worker side of the connector: hands each step to the transfer thread and brings its results back.

Runs on the engine's main thread and never waits for the network, with two bounded exceptions: the preemption fence
(before blocks are overwritten) and, in a step that computes nothing, a few milliseconds' wait for results.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from prebook_connector.book_side import BookSide
from prebook_connector.control import ControlError, ControlServer
from prebook_connector.gauges import Gauges
from prebook_connector.layers import LayerWatch
from prebook_connector.metadata import PrebookMetadata
from prebook_connector.nixl_link import NixlLink, fetch_payloads
from prebook_connector.peers import Peer, PeerTable
from prebook_connector.ports import PeerSpec
from prebook_connector.push import PushSettings
from prebook_connector.push_side import PushSide
from prebook_connector.recorder import MemoryRecorder
from prebook_connector.results import Results
from prebook_connector.settings import ConnectorSettings
from prebook_connector.timeline import Timeline
from prebook_connector.token_store import TOKENS
from prebook_connector.transfer_thread import Core, Fence, TransferThread
from prebook_connector.upstream import DataPath

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

FENCE_SECONDS = 2.0
FETCH_THREADS = 8
SAMPLE_EVERY = 16
"""With ``verify: sample``, one transfer in this many is checked (chosen by its id)."""


class PrebookWorker:
    """See the module's text."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        engine_id: str,
        kv_cache_config: KVCacheConfig,
        *,
        settings: ConnectorSettings,
        recorder: MemoryRecorder,
    ) -> None:
        self._settings = settings
        self._recorder = recorder
        self._engine_id = engine_id
        self._is_prefill = vllm_config.kv_transfer_config.kv_role == "kv_producer"
        self._place = _side_channel(vllm_config)
        parallel = vllm_config.parallel_config
        self._data = DataPath(vllm_config, engine_id, kv_cache_config, model_revision=settings.model_revision)
        self._pp_rank = parallel.rank // parallel.tensor_parallel_size % parallel.pipeline_parallel_size
        self._rank = self._pp_rank * self._data.world_size + self._data.tp_rank
        self._socket_name = f"worker-{parallel.data_parallel_index}-{self._pp_rank}-{self._data.tp_rank}.sock"
        self._block_size = vllm_config.cache_config.block_size
        self._pool = ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="prebook-fetch")
        self._results = Results()
        self._invalid: set[int] = set()
        self._layers = LayerWatch([])
        role = "prefill" if self._is_prefill else "decode"
        self._timeline = Timeline(folder=settings.timeline_dir, engine_id=engine_id, role=role, rank=self._rank)
        self._thread: TransferThread | None = None
        self._control: ControlServer | None = None
        self._core: Core | None = None
        self._gauges: Gauges | None = None

    # -- life ----------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Registers memory and starts the transfer thread."""
        self._data.register(kv_caches)
        if self._is_prefill and self._settings.progressive and self._settings.by_layer:
            self._layers = LayerWatch(self._data.layer_regions())
        link = NixlLink(self._data, notify_only=not self._is_prefill)
        peers = PeerTable(
            link=link,
            fetch=self._fetch,
            engine_id=self._engine_id,
            lease_seconds=self._settings.lease_seconds,
            recorder=self._recorder,
        )
        core = Core(
            link=link,
            peers=peers,
            push=self._push_side(link, peers) if self._is_prefill else None,
            book=None if self._is_prefill else self._book_side(peers),
            recorder=self._recorder,
        )
        self._core = core
        self._thread = TransferThread(
            core,
            active_poll_seconds=self._settings.active_poll_seconds,
            waiting_poll_seconds=self._settings.waiting_poll_seconds,
            idle_poll_seconds=self._settings.idle_poll_seconds,
            prepare=self._data.use_device,
            on_error=self._thread_error,
            name=f"prebook-transfer-{self._rank}",
        )
        self._thread.start()
        self._gauges = Gauges(self._thread, self._recorder)
        if self._settings.control_dir is not None:
            handlers = {"peers": self._op_peers, "status": self._op_status, "fail": self._op_fail,
                        "drain": self._op_drain, "transfer": self._op_transfer,
                        "first_token": _op_first_token}  # fmt: skip
            self._control = ControlServer(folder=self._settings.control_dir, name=self._socket_name, handlers=handlers)
            self._control.start()

    def _push_side(self, link: NixlLink, peers: PeerTable) -> PushSide:
        settings = self._settings
        return PushSide(
            link=link,
            peers=peers,
            settings=PushSettings(
                rank=self._rank,
                block_size=self._block_size,
                block_bytes=self._data.block_bytes(),
                lease_seconds=settings.lease_seconds,
                progressive=settings.progressive,
                min_bytes=settings.min_bytes,
                max_in_flight=settings.max_in_flight,
                regions=self._layers.regions,
                check_every=SAMPLE_EVERY if settings.verify == "sample" else 1,
            ),
            recorder=self._recorder,
            timeline=self._timeline,
            release=self._results.sent,
            checksum=self._checksum(),
        )

    def _book_side(self, peers: PeerTable) -> BookSide:
        return BookSide(
            peers=peers,
            engine_id=self._engine_id,
            place=self._place,
            rank=self._rank,
            tp_size=self._data.world_size,
            block_size=self._block_size,
            lease_seconds=self._settings.lease_seconds,
            flight_seconds=self._settings.flight_seconds,
            recorder=self._recorder,
            timeline=self._timeline,
            finish=self._results.received,
            checksum=self._checksum(),
        )

    def _checksum(self) -> Callable[[Sequence[int]], int] | None:
        if self._settings.verify == "off":
            return None

        def crc(blocks: Sequence[int]) -> int:
            value = 0
            for piece in self._data.read_blocks(blocks):
                value = zlib.crc32(piece, value)
            return value

        return crc

    def _fetch(self, spec: PeerSpec) -> Future[dict[tuple[int, int], bytes]]:
        return self._pool.submit(fetch_payloads, self._data, spec)

    def _thread_error(self, error: BaseException, call: str) -> None:
        self._recorder.count("thread_errors", (call,))
        logger.error("unexpected error on the transfer thread in %s", call, exc_info=error)

    def shutdown(self) -> None:
        """Stops the thread and releases NIXL's resources."""
        if self._control is not None:
            self._control.stop()
            self._control = None
        if self._thread is not None:
            self._thread.stop(timeout=5)
            self._thread = None
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._timeline.close()
        self._data.shutdown()

    @property
    def handshake_metadata(self) -> Any:
        """This rank's handshake payload."""
        return self._data.xfer_handshake_metadata

    # -- steps ---------------------------------------------------------------------------------------------------

    def before_forward(self, meta: PrebookMetadata) -> None:
        """Called before this step may overwrite blocks: fences preempted requests, then hands over what is known."""
        self._results.begin_step(computes=meta.computes)
        self._layers.begin([step.request_id for step in meta.steps if step.last])
        if meta.is_empty():
            return
        thread, core = self._running()
        if core.push is not None:
            core.push.regions_of_use = 0
            self._hand_prefill(thread, core, core.push, meta)
        if core.book is not None:
            self._hand_decode(thread, core.book, meta)
        if meta.preempted and core.push is not None:
            self._fence(meta.preempted)

    def _hand_prefill(self, thread: TransferThread, core: Core, push: PushSide, meta: PrebookMetadata) -> None:
        now = time.monotonic()
        for announcement in meta.announcements:
            thread.submit(push.announce, announcement.request_id, announcement.transfer_id, now)
        for request_id in meta.preempted:
            thread.submit(core.preempt, request_id)
        for admission in meta.admissions:
            thread.submit(
                push.admit,
                admission.request_id,
                prompt_tokens=admission.prompt_tokens,
                digest=admission.prompt_digest,
                now=now,
            )
        for step in meta.steps:
            thread.leave(push.grow, step.request_id, step.new_blocks)
            if step.settled_before:
                thread.submit(push.settle, step.request_id, step.settled_before, now)
        for finish in meta.finished:
            self._results.expect_sending(finish.request_id)
            thread.submit(push.finish, finish.request_id, finish.groups, now)
        for request_id, held in meta.aborted:
            if held:
                self._results.expect_sending(request_id)
            thread.submit(push.abort, request_id, held=held, now=now)

    def _hand_decode(self, thread: TransferThread, book: BookSide, meta: PrebookMetadata) -> None:
        now = time.monotonic()
        for booking in meta.bookings:
            self._results.expect_recving(booking.request_id)
            thread.submit(book.book, booking, now)
        for request_id in meta.cancelled:
            thread.submit(book.cancel, request_id, now)
        for abandoned in meta.abandoned:
            thread.submit(book.abandon, abandoned.transfer_id, abandoned.prefill, now)

    def _fence(self, request_ids: Sequence[str]) -> None:
        """Waits until no WRITE reads the preempted requests' blocks, which this step may overwrite.

        Bounded, because it stands on the engine's loop: a decode engine that does not take its data in time has its
        connection cut, so that what was read too late cannot land and be mistaken for KV.
        """
        thread, core = self._running()
        deadline = time.monotonic() + FENCE_SECONDS
        while time.monotonic() < deadline:
            if thread.ask(core.drained, request_ids):
                return
            time.sleep(0.0005)
        thread.ask(core.sever, request_ids, time.monotonic())

    @property
    def watches_layers(self) -> bool:
        """Whether this step computes the last chunk of a prompt, whose layers are pushed one by one."""
        return bool(self._layers.watched)

    def layer_done(self, layer_name: str) -> None:
        """A layer of this step has been launched (on CPU: has run)."""
        regions = self._layers.done(layer_name)
        if not regions:
            return
        thread, core = self._running()
        assert core.push is not None
        if regions >= core.push.regions_of_use:
            thread.submit(
                core.settle_layers, _device_fence(), [(request_id, regions) for request_id in self._layers.watched]
            )

    def after_forward(self, meta: PrebookMetadata) -> None:
        """Called when this step's forward pass has been launched (on CPU: has finished)."""
        settled = [(step.request_id, step.settled_after) for step in meta.steps]
        if settled:
            thread, core = self._running()
            thread.submit(core.settle, _device_fence(), settled)

    def take_results(self) -> KVConnectorTransferResults:
        """What ended since the last step."""
        results, invalid = self._results.take()
        self._invalid |= invalid
        return results

    def take_invalid_blocks(self) -> set[int]:
        """Blocks whose KV did not arrive, of requests reported by the last :meth:`take_results`."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def measure(self) -> None:
        """Sets the gauges, once a step."""
        if self._gauges is not None:
            self._gauges.measure(time.monotonic())

    def _running(self) -> tuple[TransferThread, Core]:
        if self._thread is None or self._core is None:
            raise RuntimeError("the connector was used before register_kv_caches")
        if not self._thread.alive():
            raise RuntimeError("the transfer thread has died; the engine must restart")
        return self._thread, self._core

    # -- control socket ------------------------------------------------------------------------------------------

    def _op_peers(self, request: dict[str, Any]) -> dict[str, Any]:
        thread, core = self._running()
        items = request.get("peers")
        if not isinstance(items, list):
            raise ControlError("peers must be a list")
        try:
            specs = [
                PeerSpec(
                    str(item["engine_id"]), str(item["host"]), int(item["port"]), int(item.get("tp_size", 1)),
                    int(item.get("pp_size", 1)), int(item.get("dp_rank", 0)), str(item.get("address", "")),
                )
                for item in items
            ]  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ControlError(f"bad peer: {error!r}") from error
        thread.submit(core.set_peers, specs, time.monotonic())
        return {}

    def _op_status(self, request: dict[str, Any]) -> dict[str, Any]:
        thread, core = self._running()
        now = time.monotonic()
        book, push = core.book, core.push
        return {
            "kind": "worker",
            "engine_id": self._engine_id,
            "role": "prefill" if self._is_prefill else "decode",
            "rank": self._rank,
            "compat_hash": self._data.compat_hash,
            "pairs": {peer.spec.engine_id: _pair(peer, now) for peer in list(core.peers.peers.values())},
            "transfers": {
                "booked": book.booked if book is not None else 0,
                "pushing": push.open if push is not None else 0,
                "quarantined_blocks": book.quarantined(now) if book is not None else 0,
            },
            "queue_depth": thread.depth(),
            "block_bytes": self._data.block_bytes(),
            "counters": self._recorder.totals(),
            "draining": core.draining,
        }

    def _op_fail(self, request: dict[str, Any]) -> dict[str, Any]:
        thread, core = self._running()
        transfer_id, reason = request.get("transfer_id"), request.get("reason", "prefill_leg_failed")
        if not isinstance(transfer_id, str) or not isinstance(reason, str):
            raise ControlError("transfer_id and reason must be strings")
        if core.book is None:
            raise ControlError("only decode fails transfers")
        thread.submit(core.book.fail, transfer_id, reason[:100], time.monotonic())
        return {}

    def _op_drain(self, request: dict[str, Any]) -> dict[str, Any]:
        thread, core = self._running()
        thread.submit(core.drain)
        return {}

    def _op_transfer(self, request: dict[str, Any]) -> dict[str, Any]:
        _, core = self._running()
        account = core.book.accounts.get(str(request.get("transfer_id"))) if core.book is not None else None
        return {"known": account is not None, **(account.as_json() if account is not None else {})}


def _op_first_token(request: dict[str, Any]) -> dict[str, Any]:
    """Takes prefill's first token for the sampler; ``held`` is false when decode has sampled one of its own."""
    transfer_id, token = request.get("transfer_id"), request.get("token")
    if not isinstance(transfer_id, str) or type(token) is not int or token < 0:
        raise ControlError("transfer_id must be a string and token a token id")
    return {"held": TOKENS.offer(transfer_id, token)}


def _pair(peer: Peer, now: float) -> dict[str, Any]:
    state, error = peer.state(now)
    return {"state": state, "error": error, "draining": peer.draining}


def _side_channel(vllm_config: VllmConfig) -> tuple[str, int]:
    from vllm import envs

    port = envs.VLLM_NIXL_SIDE_CHANNEL_PORT + vllm_config.parallel_config.data_parallel_index
    return envs.VLLM_NIXL_SIDE_CHANNEL_HOST, port


def _device_fence() -> Fence | None:
    """An event behind the KV writes that were just launched; None where the forward pass has already finished."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    event = torch.cuda.Event()
    event.record()
    fence: Fence = event
    return fence
