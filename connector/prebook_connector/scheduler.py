"""The scheduler side of the connector: turns vLLM's hooks into :class:`PrebookMetadata` for the worker side.

It runs in the EngineCore process, on the engine's loop, and does no I/O. Hook order in one step (vLLM 0.32,
v1/core/sched/scheduler.py): ``on_new_request`` when a request arrives; ``get_num_new_matched_tokens`` and
``update_state_after_alloc`` at admission; ``build_connector_meta`` once a step; ``request_finished`` at the end. The
last one is also called for aborts.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.v1.request import RequestStatus

from prebook_connector.book_side import BookingRequest
from prebook_connector.listener import HandshakeListener
from prebook_connector.metadata import Abandon, Admission, Announcement, Finish, PrebookMetadata, PrefillStep
from prebook_connector.params import BadParamsError, DecodeIntent, PrefillIntent, digest, parse
from prebook_connector.recorder import MemoryRecorder
from prebook_connector.upstream import GET_META_MSG, NixlPushConnectorScheduler, get_base_request_id

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_ENDED_WELL = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


@dataclass
class _Prefill:
    """Prefill's bookkeeping of one request."""

    intent: PrefillIntent
    request: Request
    admitted: bool = False
    fresh: bool = False  # admitted since the last step: its prefix hits have not been reported
    blocks_sent: int = 0


class PrebookScheduler(NixlPushConnectorScheduler):  # type: ignore[misc]
    """See the module's text. ``_TRANSFER_MODE`` stays upstream's "push": vllm-router goes concurrent for that word."""

    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig, *, recorder: MemoryRecorder
    ) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._recorder = recorder
        self._async = bool(vllm_config.scheduler_config.async_scheduling)
        self._single_group = len(kv_cache_config.kv_cache_groups) == 1 and not self._is_hma_required
        self._prefills: dict[str, _Prefill] = {}
        self._decodes: dict[str, DecodeIntent] = {}
        self._booked: dict[str, DecodeIntent] = {}
        self._meta = PrebookMetadata()
        self._listener: HandshakeListener | None = None

    # -- requests ------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Validates the parameters; what cannot be used is computed locally and counted."""
        try:
            intent = parse(request.kv_transfer_params, base_request_id=get_base_request_id(request.request_id))
            self._check_role(intent)
        except BadParamsError as error:
            self._recorder.count("bad_params", (error.reason,))
            logger.warning("request %s is computed locally: kv_transfer_params %s", request.request_id, error)
            return
        if isinstance(intent, PrefillIntent):
            self._truncate_request_for_prefill(request)
            self._prefills[request.request_id] = _Prefill(intent, request)
            self._meta.announcements.append(Announcement(request.request_id, intent.transfer_id))
        elif isinstance(intent, DecodeIntent):
            self._decodes[request.request_id] = intent

    def _check_role(self, intent: PrefillIntent | DecodeIntent | None) -> None:
        role = self.vllm_config.kv_transfer_config.kv_role
        if isinstance(intent, PrefillIntent) and role == "kv_consumer":
            raise BadParamsError("wrong_role", "do_remote_decode on a decode engine")
        if isinstance(intent, DecodeIntent) and role == "kv_producer":
            raise BadParamsError("wrong_role", "do_remote_prefill on a prefill engine")

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Decode: the tokens beyond its own prefix hit come from prefill, asynchronously."""
        if request.request_id not in self._decodes:
            return 0, False
        expected = self._get_remote_prefill_token_count(request.num_prompt_tokens)
        missing = expected - num_computed_tokens
        if missing <= 0 or request.skip_reading_prefix_cache:
            return 0, False
        return missing, True

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Blocks are known: decode books them, prefill's ledger starts. Called at every admission."""
        request_id = request.request_id
        if (prefill := self._prefills.get(request_id)) is not None:
            prefill.admitted = prefill.fresh = True
            prefill.blocks_sent = 0
            self._meta.admissions.append(
                Admission(request_id, request.num_prompt_tokens, digest(request.prompt_token_ids or ()))
            )
        intent = self._decodes.pop(request_id, None)
        if intent is None:
            return
        if num_external_tokens <= 0:
            self._meta.abandoned.append(Abandon(intent.transfer_id, intent.prefill))
            return
        expected = self._get_remote_prefill_token_count(request.num_prompt_tokens)
        if self._single_group:
            # The hit is block-aligned (vLLM presents it so), hence the booked range starts at a block.
            first = (expected - num_external_tokens) // self.block_size
            booked = [list(blocks.get_block_ids()[0][first : -(-expected // self.block_size)])]
        else:
            first = 0
            booked = [list(ids) for ids in self.get_exchange_clipped_blocks(blocks.get_unhashed_block_ids_all_groups())]
        self._booked[request_id] = intent
        self._meta.bookings.append(
            BookingRequest(
                request_id,
                intent.transfer_id,
                intent.prefill,
                booked,
                first,
                expected,
                digest((request.prompt_token_ids or [])[:expected]),
            )
        )

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks must stay until the worker releases them, and what upstream-style routers expect back."""
        request_id = request.request_id
        if (prefill := self._prefills.pop(request_id, None)) is not None:
            return self._prefill_finished(prefill, block_ids)
        if (intent := self._decodes.pop(request_id, None)) is not None:
            # Aborted while queued: prefill may stop.
            self._meta.abandoned.append(Abandon(intent.transfer_id, intent.prefill))
        elif self._booked.pop(request_id, None) is not None:
            # Aborted while booked: vLLM keeps the blocks of a request in WAITING_FOR_REMOTE_KVS until we report it.
            self._meta.cancelled.append(request_id)
        return False, None

    def _prefill_finished(
        self, prefill: _Prefill, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        request = prefill.request
        if request.status not in _ENDED_WELL or not prefill.admitted:
            held = prefill.admitted and any(block_ids)
            self._meta.aborted.append((request.request_id, held))
            return held, None
        groups = self.get_exchange_clipped_blocks(block_ids)
        if not any(groups):
            self._meta.aborted.append((request.request_id, False))
            return False, None
        self._meta.finished.append(Finish(request.request_id, tuple(list(group) for group in groups)))
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": prefill.intent.transfer_id,
            "first_token_id": next(iter(request.output_token_ids), None),
            "remote_engine_id": self.engine_id,
            "remote_request_id": request.request_id,
            "remote_host": self.side_channel_host,
            "remote_port": self.side_channel_port,
            "tp_size": self.vllm_config.parallel_config.tensor_parallel_size,
            "pp_size": self.vllm_config.parallel_config.pipeline_parallel_size,
            "transfer_mode": self._TRANSFER_MODE,
        }

    # -- steps ---------------------------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PrebookMetadata:
        """Everything that happened since the last step, and what this step settles."""
        meta, self._meta = self._meta, PrebookMetadata()
        meta.computes = scheduler_output.total_num_scheduled_tokens > 0
        meta.preempted = [rid for rid in scheduler_output.preempted_req_ids or () if rid in self._prefills]
        state = scheduler_output.kv_connector_block_state
        if not self._prefills or state is None:
            return meta
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            prefill = self._prefills.get(request_id)
            if prefill is None:
                continue
            computed = prefill.request.num_computed_tokens
            blocks: list[int] = (state.get_block_ids(request_id) or ([],))[0] if self._single_group else []
            before = 0
            if prefill.fresh:
                prefill.fresh = False
                before = self._hit_tokens(computed, blocks, scheduler_output)
            after = computed + tokens
            last = after >= prefill.request.num_prompt_tokens
            meta.steps.append(PrefillStep(request_id, list(blocks[prefill.blocks_sent :]), before, after, last))
            prefill.blocks_sent = len(blocks)
        return meta

    def _hit_tokens(self, computed: int, blocks: list[int], scheduler_output: SchedulerOutput) -> int:
        """Tokens of a prefix hit whose KV is final before this step runs.

        vLLM hashes blocks when it schedules them, so a hit may point at blocks that another request computes in this
        very step, or, with asynchronous scheduling, in one that is still in flight: then the hit settles with the step.
        """
        hits = set(blocks[: computed // self.block_size])
        if not hits or self._async:
            return 0
        state = scheduler_output.kv_connector_block_state
        assert state is not None
        starts = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        cached = scheduler_output.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            table: list[int] = (state.get_block_ids(request_id) or ([],))[0]
            start = starts.get(request_id, 0)
            writing = table[start // self.block_size : -(-(start + tokens) // self.block_size)]
            if not hits.isdisjoint(writing):
                return 0
        return computed

    def update_connector_output(self, connector_output: Any) -> None:
        """Forgets bookings that have ended."""
        for request_id in connector_output.finished_recving or ():
            self._booked.pop(request_id, None)

    def has_pending_push_work(self) -> bool:
        """Whether a step is needed to hand something to the workers."""
        return not self._meta.is_empty()

    # -- side channel --------------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Starts the side channel once the workers' payloads are known."""
        if self._listener is not None or not metadata:
            return
        payloads = {ranks: msgspec.msgpack.encode(payload) for ranks, payload in metadata.items()}
        self._listener = HandshakeListener(
            host=self.side_channel_host, port=self.side_channel_port, payloads=payloads, greeting=GET_META_MSG
        )
        self._listener.start()

    def shutdown(self) -> None:
        """Stops the side channel."""
        if self._listener is not None:
            self._listener.stop()
            self._listener = None
