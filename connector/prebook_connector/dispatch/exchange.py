"""One client request on a decode pod, from the first plan to the last byte.

::

    plan ── Local ──► the app, with the client's own body
      │
      ├── Remote ──► prefill leg (HTTP) ┐ at the same moment; in pull mode one after the other
      │              decode leg (app)   ┘
      │                 ├ first content ──► committed: nothing is decided any more, messages pass through
      │                 └ failure before it ──► policy.after_failure ──► a new plan, or wait in place
      └── Refuse ──► OpenAI error
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from prebook_connector.dispatch import metrics, params, policy, tracing
from prebook_connector.dispatch.bodies import Body, Facts, decode_body, dump, prefill_body
from prebook_connector.dispatch.client import LegAnswer, LegFailed, PrefillClient
from prebook_connector.dispatch.discovery import Discovery
from prebook_connector.dispatch.errors import ErrorAnswer
from prebook_connector.dispatch.identity import Identity
from prebook_connector.dispatch.lead import Lead
from prebook_connector.dispatch.legs import ClientChannel, DecodeLeg, settle
from prebook_connector.dispatch.peertable import Peer
from prebook_connector.dispatch.reasons import Failure, LocalReason, Refusal, explain
from prebook_connector.dispatch.security import TOKEN_HEADER, PeerToken
from prebook_connector.dispatch.settings import Mode, Settings
from prebook_connector.dispatch.supervision import AttemptFailed, Connector, Legs, Supervision, Terms
from prebook_connector.dispatch.types import App, Scope, header, replaced

logger = logging.getLogger(__name__)

_AVOID_SECONDS = 5.0
_FORWARDED = (b"authorization", b"traceparent", b"tracestate", b"x-vllm-priority", b"x-session-id")
_LINGER = 1.0


@dataclass
class Services:
    """Everything that exchanges share. ``connector`` is None in the stock modes."""

    app: App
    settings: Settings
    discovery: Discovery
    client: PrefillClient
    token: PeerToken
    connector: Connector | None
    totals: metrics.Totals
    keep: Callable[[Coroutine[Any, Any, None]], None]
    """Runs a coroutine in the background, owned by the middleware."""
    answered: Callable[[Attempt, LegAnswer | None, bool], None]
    """Called once for every request that was answered from a remote attempt, with prefill's answer and whether decode
    is known to have computed the prompt after all."""
    clock: Callable[[], float] = time.monotonic

    @property
    def rules(self) -> policy.Rules:
        """The settings that decisions depend on."""
        settings = self.settings
        return policy.Rules(
            settings.mode,
            settings.recompute,
            settings.local_prefill_max_tokens,
            settings.max_retries,
            settings.prefill_opens,
        )


@dataclass(frozen=True)
class Attempt:
    """One try to have a prompt prefilled elsewhere; its transfer id is never used twice."""

    peer: Peer
    identity: Identity
    rank: int
    number: int
    transfer_id: str = field(default_factory=lambda: uuid.uuid4().hex)


class Exchange:
    """One request. ``run`` returns when the client has its answer, or has left."""

    def __init__(
        self, services: Services, scope: Scope, channel: ClientChannel, *, path: str, body: Body, facts: Facts
    ) -> None:
        self._services = services
        self._scope = scope
        self._channel = channel
        self._path = path
        self._body = body
        self._facts = facts
        self._began = services.clock()
        self._tried: list[str] = []
        self._last: Failure | None = None
        self._lead: Lead | None = None
        if facts.opens and services.settings.prefill_opens and services.connector is not None:
            self._lead = Lead(path, channel, services.connector)

    async def run(self, plan: policy.Plan) -> None:
        """Follows plans until one ends the request."""
        watcher = asyncio.create_task(self._channel.watch(), name="prebook-client-watch")
        try:
            following: policy.Plan | None = plan
            while following is not None:
                following = await self._follow(following)
        finally:
            watcher.cancel()

    async def _follow(self, plan: policy.Plan) -> policy.Plan | None:
        if isinstance(plan, policy.Remote):
            return await self._remote(plan)
        if isinstance(plan, policy.Relay):
            return await self._relay(plan)
        if isinstance(plan, policy.Local):
            await self._local(plan.reason)
        else:
            self._services.totals.count_refused(plan.refusal)
            detail = explain(self._last) if self._last is not None else ""
            await self._channel.refuse(ErrorAnswer.of(plan.refusal, detail=detail))
        return None

    # -- local

    async def _local(self, reason: LocalReason) -> None:
        self._services.totals.count_local(reason)
        tracing.note(path="local", reason=reason.value)
        body, request_id = self._body, None
        if self._lead is not None and (given := self._lead.given) is not None:
            # The client has read the beginning, which decode has to repeat under the same name.
            body, request_id = decode_body(body, params.begun_params(given.token)), self._lead.request_id
        leg = self._leg(
            dump(body), mark=(b"x-prebook-local", reason.value.encode()), hold_errors=False, request_id=request_id
        )
        task = leg.start()
        try:
            await asyncio.shield(task)
        finally:
            self._dispose(leg, task)

    # -- relayed

    async def _relay(self, plan: policy.Relay) -> policy.Plan | None:
        """One token is all that is wanted, so prefill's whole answer is the client's: nothing is transferred."""
        services, peer = self._services, plan.peer
        self._tried.append(peer.address)
        tracing.note(path="relayed", peer=peer.address)
        services.discovery.table.began(peer.address, self._facts.tokens)
        task = asyncio.create_task(
            services.client.relay(
                peer.address, self._path, dump(self._body), self._forwarded(peer, plan.rank), self._channel.send
            )
        )
        gone = asyncio.create_task(self._channel.gone.wait())
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            if self._channel.started:  # a client may hang up on the last event, before the leg has seen its end
                services.totals.count_relayed()
        except LegFailed as failed:
            self._last = failed.failure
            metrics.LEG_FAILURES.labels(failed.failure.value).inc()
            services.discovery.table.avoid(peer.address, until=services.clock() + _AVOID_SECONDS)
            if self._channel.started or not services.settings.recompute:
                return policy.Refuse(Refusal.PREFILL_FAILED)
            services.totals.count_failover(failed.failure, "fresh")
            return policy.Local(LocalReason.FAILED_OVER)
        finally:
            task.cancel()
            gone.cancel()
            if peer.identity is not None:
                services.discovery.table.ended(peer.address, peer.identity.engine_id)
        return None

    # -- remote

    async def _remote(self, plan: policy.Remote) -> policy.Plan | None:
        peer = plan.peer
        if peer.identity is None:
            return policy.Local(LocalReason.NO_READY_PEER)
        self._tried.append(peer.address)
        attempt = Attempt(peer, peer.identity, plan.rank, len(self._tried))
        table = self._services.discovery.table
        table.began(peer.address, self._facts.tokens)
        tracing.note(path="remote", transfer_id=attempt.transfer_id, peer=peer.address, attempt=attempt.number)
        try:
            await self._attempt(attempt)
        except AttemptFailed as failed:
            return self._after(attempt, failed)
        finally:
            table.ended(peer.address, attempt.identity.engine_id)
        return None

    def _after(self, attempt: Attempt, failed: AttemptFailed) -> policy.Plan:
        services, failure = self._services, failed.failure
        now = services.clock()
        self._last = failure
        metrics.LEG_FAILURES.labels(failure.value).inc()
        if failure.is_the_peers:
            services.discovery.table.avoid(attempt.peer.address, until=now + _AVOID_SECONDS)
        plan = self._next(failure, told=False)
        if isinstance(plan, policy.Wait):
            raise RuntimeError("an ended attempt cannot be waited for")
        if isinstance(plan, policy.Remote):
            services.totals.count_retry(failure)
        elif isinstance(plan, policy.Local) and failure is not Failure.CLIENT_ERROR:
            services.totals.count_failover(failure, "fresh")
        logger.info(
            "transfer %s via %s: %s; next: %s",
            attempt.transfer_id,
            attempt.peer.address,
            failure,
            type(plan).__name__.lower(),
        )
        return plan

    def _next(self, failure: Failure, *, told: bool) -> policy.Plan | policy.Wait:
        services = self._services
        ready = services.discovery.table.ready(now=services.clock(), without=self._tried)
        if self._lead is not None and self._lead.given is not None:
            ready = []  # another prefill would sample another first token
        return policy.after_failure(
            failure, rules=services.rules, ready=ready, attempts=len(self._tried), told=told, counter=len(self._tried)
        )

    async def _attempt(self, attempt: Attempt) -> None:
        def over(task: asyncio.Task[LegAnswer]) -> None:
            table = self._services.discovery.table
            table.computed(attempt.peer.address, attempt.identity.engine_id, self._facts.tokens)
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.info("transfer %s: prefill leg to %s: %s", attempt.transfer_id, attempt.peer.address, error)

        prefill = asyncio.create_task(self._prefill(attempt), name="prebook-prefill-leg")
        prefill.add_done_callback(over)
        try:
            with self._services.discovery.watch(attempt.identity.engine_id) as lost:
                kv_params = await self._decode_params(attempt, prefill, lost)
                if kv_params is not None:
                    await self._decode(attempt, kv_params, prefill, lost)
        finally:
            prefill.cancel()

    async def _decode(
        self,
        attempt: Attempt,
        kv_params: params.Params,
        prefill: asyncio.Task[LegAnswer],
        lost: asyncio.Future[Failure],
    ) -> None:
        services = self._services
        leg = self._leg(
            dump(decode_body(self._body, kv_params)),
            mark=(b"x-prebook-transfer", attempt.transfer_id.encode()),
            hold_errors=services.settings.recompute,
            request_id=self._request_id(attempt) if self._shares_id else None,
        )
        task = leg.start()
        try:
            supervision = Supervision(Legs(self._channel, leg, task, prefill, lost), self._terms(attempt, leg))
            await supervision.run()
            if not leg.committed.is_set():
                return
            services.totals.count_remote()
            if leg.status == 200 and not self._channel.left:
                # The prefill leg may be about to end by itself; its connection is worth a moment.
                await asyncio.wait({prefill}, timeout=_LINGER)
            services.answered(attempt, _result(prefill), supervision.in_place)
        finally:
            self._dispose(leg, task)

    @property
    def _shares_id(self) -> bool:
        """Whether decode's answer is named like prefill's: for stock push, and where prefill may begin the stream."""
        return self._services.settings.mode is Mode.NIXL_PUSH or self._lead is not None

    def _terms(self, attempt: Attempt, leg: DecodeLeg) -> Terms:
        services = self._services

        async def prefilled(answer: LegAnswer) -> None:
            if self._lead is not None:
                await self._lead.take(attempt.transfer_id, self._request_id(attempt), leg, answer)

        return Terms(
            transfer_id=attempt.transfer_id,
            began=self._began,
            settings=services.settings,
            connector=services.connector,
            totals=services.totals,
            next_plan=lambda failure, told: self._next(failure, told=told),
            clock=services.clock,
            prefilled=prefilled,
        )

    def _dispose(self, leg: DecodeLeg, task: asyncio.Task[None]) -> None:
        leg.abandon()
        if not task.done():
            self._services.keep(settle(task, seconds=self._services.settings.timing.abandoned))

    def _leg(
        self, raw: bytes, *, mark: tuple[bytes, bytes], hold_errors: bool, request_id: str | None = None
    ) -> DecodeLeg:
        headers = replaced(
            list(self._scope["headers"]), content_length=str(len(raw)), transfer_encoding=None, x_prebook_token=None
        )
        if request_id is not None:
            headers = replaced(headers, x_request_id=request_id)
        return DecodeLeg(
            self._services.app,
            {**self._scope, "headers": headers},
            self._channel,
            body=raw,
            mark=mark,
            hold_errors=hold_errors,
        )

    def _request_id(self, attempt: Attempt) -> str:
        """An X-Request-Id that no other request shares, recognizable for whoever sent one."""
        own = header(self._scope, b"x-request-id")
        return f"{own}-{attempt.transfer_id}" if own else attempt.transfer_id

    async def _decode_params(
        self, attempt: Attempt, prefill: asyncio.Task[LegAnswer], lost: asyncio.Future[Failure]
    ) -> params.Params | None:
        """The decode leg's kv_transfer_params. Pull mode waits for the prefill leg here; None when the client left."""
        mode = self._services.settings.mode
        if mode is Mode.NIXL_PUSH:
            return params.push_params(self._path, self._request_id(attempt), attempt.identity, attempt.rank)
        if mode is Mode.PREBOOK:
            return params.prebook_params(
                attempt.transfer_id, attempt.identity, attempt.rank, opens=self._lead is not None
            )
        answer = await self._await_prefill(prefill, lost)
        if answer is None:
            return None
        pulled = params.pull_params(answer.params, attempt.identity, attempt.rank, cached_tokens=answer.cached_tokens)
        if pulled is None:
            raise AttemptFailed(Failure.PREFILL_GARBAGE)
        return pulled

    async def _prefill(self, attempt: Attempt) -> LegAnswer:
        services = self._services
        body = prefill_body(self._path, self._body, params.prefill_params(attempt.transfer_id))
        headers = self._forwarded(attempt.peer, attempt.rank)
        headers |= {TOKEN_HEADER: services.token.current(), "x-request-id": self._request_id(attempt)}
        return await services.client.send(attempt.peer.address, self._path, dump(body), headers)

    def _forwarded(self, peer: Peer, rank: int) -> dict[str, str]:
        """What of the client's headers a prefill pod gets; ``rank`` is one of its data-parallel ranks."""
        headers = {
            key.decode("latin-1"): value.decode("latin-1") for key, value in self._scope["headers"] if key in _FORWARDED
        }
        headers["content-type"] = "application/json"
        if peer.identity is not None and peer.identity.dp_size > 1:
            headers["x-data-parallel-rank"] = str(rank)
        return headers

    async def _await_prefill(self, prefill: asyncio.Task[LegAnswer], lost: asyncio.Future[Failure]) -> LegAnswer | None:
        """Pull mode's first half. None when the client left."""
        gone = asyncio.create_task(self._channel.gone.wait())
        try:
            left = self._services.settings.timing.first_byte - (self._services.clock() - self._began)
            waiting: set[asyncio.Future[Any]] = {prefill, lost, gone}
            done, _ = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
        if prefill in done:
            return _answer_of(prefill)
        if gone in done:
            return None
        raise AttemptFailed(lost.result() if lost in done else Failure.FIRST_BYTE_DEADLINE)


def _answer_of(prefill: asyncio.Task[LegAnswer]) -> LegAnswer:
    try:
        return prefill.result()
    except LegFailed as error:
        raise AttemptFailed(error.failure) from error


def _result(prefill: asyncio.Task[LegAnswer]) -> LegAnswer | None:
    if prefill.done() and not prefill.cancelled() and prefill.exception() is None:
        return prefill.result()
    return None
