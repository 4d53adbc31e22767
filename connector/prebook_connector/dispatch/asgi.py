"""``DispatchMiddleware``: the outermost ASGI layer of vLLM's API server, and the owner of every background task here.

vLLM adds classes named by ``--middleware`` outside of its own authentication and CORS layers
(``vllm/entrypoints/serve/middleware/register.py``), so a request is seen before its API key is checked: nothing here
answers a prompt by itself, and a prefill leg carries the client's own ``Authorization`` along.

Scopes other than HTTP, and HTTP requests that carry no body, pass through untouched.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import replace
from typing import Any

from prebook_connector.dispatch import bodies, metrics, policy, tracing
from prebook_connector.dispatch.client import LegAnswer, PrefillClient
from prebook_connector.dispatch.control import Control
from prebook_connector.dispatch.discovery import Discovery
from prebook_connector.dispatch.endpoints import PREFIX, Account, Endpoints, View, Work
from prebook_connector.dispatch.errors import ErrorAnswer
from prebook_connector.dispatch.exchange import Attempt, Exchange, Services
from prebook_connector.dispatch.identity import Identity, Load, mismatch
from prebook_connector.dispatch.legs import BodyRefused, ClientChannel, ClientGone
from prebook_connector.dispatch.peertable import Pair, PeerTable
from prebook_connector.dispatch.probe import Engine
from prebook_connector.dispatch.reasons import Failure, LocalReason, Refusal
from prebook_connector.dispatch.security import TOKEN_HEADER, PeerToken
from prebook_connector.dispatch.settings import Mode, Role, Settings
from prebook_connector.dispatch.sources import open_source
from prebook_connector.dispatch.types import App, Message, Receive, Scope, Send, header, replaced

WANTED_HEADER = "x-prefiller-host-port"
_ACCOUNTS = 16

logger = logging.getLogger(__name__)


class DispatchMiddleware:
    """Front door of one engine pod. ``settings`` come from the environment unless given (tests)."""

    def __init__(self, app: App, *, settings: Settings | None = None) -> None:
        self._app = app
        self._settings = settings or Settings.from_environment()
        self._token = PeerToken(self._settings.token_file)
        self._engine = Engine(app, self._settings)
        self._totals = metrics.Totals()
        self._work = Work()
        self._accounts: deque[Account] = deque(maxlen=_ACCOUNTS)
        self._counter = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._loops: list[asyncio.Task[None]] = []
        self._client: PrefillClient | None = None
        self._compat_hash: str | None = None
        timing = self._settings.timing
        table = PeerTable(
            needs_pair=self._settings.mode is Mode.PREBOOK, lost_after=timing.lost_after, fits=self._mismatch
        )
        self._control = (
            Control(self._settings, table, on_pairs=self._on_pairs) if self._settings.mode is Mode.PREBOOK else None
        )
        source = open_source(self._settings.peers, resolve_interval=timing.resolve)
        self._discovery = Discovery(table, source, timing=timing, on_change=self._on_peers)
        self._endpoints = Endpoints(
            View(
                settings=self._settings,
                engine=self._engine,
                discovery=self._discovery,
                control=self._control,
                token=self._token,
                totals=self._totals,
                work=self._work,
                accounts=self._accounts,
                own=self._own,
            )
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry point."""
        self._engine.attach(scope)
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
        elif scope["type"] == "http":
            self._start()
            await self._http(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    # -- life

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def started(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                self._start()
            await send(message)

        try:
            await self._app(scope, receive, started)
        finally:
            await self._stop()

    def _start(self) -> None:
        """Starts the background loops once; also without a lifespan, on the first request."""
        if self._client is not None:
            return
        self._client = PrefillClient(self._settings.timing)
        self._loops = [asyncio.create_task(_forever("discovery", self._discovery.run), name="prebook-discovery")]
        if self._control is not None:
            self._loops.append(asyncio.create_task(_forever("control", self._control.run), name="prebook-control"))

    async def _stop(self) -> None:
        tasks = [*self._loops, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._control is not None:
            self._control.close()
        if self._client is not None:
            await self._client.close()

    def _keep(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- what the parts tell each other

    def _own(self) -> Identity | None:
        load = Load(legs=self._work.legs, tokens=self._work.leg_tokens)
        return self._engine.identity(compat_hash=self._compat_hash, draining=self._draining, load=load)

    @property
    def _draining(self) -> bool:
        return self._work.draining or (self._control is not None and self._control.draining)

    def _mismatch(self, identity: Identity, address: str) -> str | None:
        own = self._own()
        if own is None:
            return "this pod's own engine is not up"
        return mismatch(identity, own=own, address=address, mla=self._engine.mla)

    def _on_pairs(self, pairs: Mapping[str, Pair]) -> None:
        if self._control is not None and self._control.compat_hash not in (None, self._compat_hash):
            self._compat_hash = self._control.compat_hash
            self._discovery.refit()
        self._discovery.pairs_said(pairs)

    def _on_peers(self) -> None:
        if self._control is not None:
            self._control.wake()

    # -- requests

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path.startswith(PREFIX):
            await self._endpoints.serve(scope, path.removeprefix(PREFIX), send)
        elif scope["method"] != "POST" or _is_form(scope):
            await self._app(scope, receive, send)
        else:
            self._work.requests += 1
            try:
                await self._post(scope, ClientChannel(receive, send), path)
            finally:
                self._work.requests -= 1

    async def _post(self, scope: Scope, channel: ClientChannel, path: str) -> None:
        settings = self._settings
        try:
            raw = await channel.read_body(limit=settings.max_body_bytes, seconds=settings.timing.body)
            parsed = bodies.parse(raw) if path in bodies.DISPATCHED or bodies.may_hold_params(raw) else None
        except ClientGone:
            return
        except BodyRefused as error:
            await self._refuse(channel, error.refusal)
            return
        except bodies.TooDeep:
            await self._refuse(channel, Refusal.TOO_DEEP)
            return
        if settings.role is Role.PREFILL:
            await self._prefill_side(scope, channel, path, raw, parsed)
        else:
            await self._decode_side(scope, channel, path, raw, parsed)

    async def _prefill_side(
        self, scope: Scope, channel: ClientChannel, path: str, raw: bytes, parsed: bodies.Parsed | None
    ) -> None:
        """Legs need the token; requests without transfer parameters are served as by any vLLM: those that decode pods
        relay because one token is all that is wanted, and whoever asks this pod directly."""
        presented = header(scope, TOKEN_HEADER.encode())
        body = parsed.body if parsed is not None else None
        found = body is not None and bodies.strip(body)[1] > 0
        if presented is None and not found:
            with self._counted(path, body):
                await self._pass(scope, channel, raw)
            return
        refusal = self._token.check(presented)
        if refusal is None and body is not None and not bodies.is_prefill_params(body.get(bodies.KV_PARAMS)):
            refusal = Refusal.BAD_PARAMETERS
        if refusal is None and body is None:
            refusal = Refusal.BAD_PARAMETERS
        if refusal is None and self._draining:
            refusal = Refusal.DRAINING
        if refusal is not None or body is None:
            await self._refuse(channel, refusal or Refusal.BAD_PARAMETERS)
            return
        metrics.LEGS.inc()
        with self._counted(path, body):
            await self._pass(scope, channel, raw)

    @contextlib.contextmanager
    def _counted(self, path: str, body: bodies.Body | None) -> Iterator[None]:
        """Counts a prompt into the load that this pod reports, as long as it is served: every decode pod reads there
        what the others have sent."""
        if body is None or path not in bodies.DISPATCHED:
            yield
            return
        tokens = bodies.estimate_tokens(path, body)
        self._work.legs += 1
        self._work.leg_tokens += tokens
        try:
            yield
        finally:
            self._work.legs -= 1
            self._work.leg_tokens -= tokens

    async def _decode_side(
        self, scope: Scope, channel: ClientChannel, path: str, raw: bytes, parsed: bodies.Parsed | None
    ) -> None:
        if parsed is None:
            # Not an object, or nothing in it for us: the engine gives its own answer, or its own error.
            reason = LocalReason.UNREADABLE if path in bodies.DISPATCHED else None
            await self._pass(scope, channel, raw, local=reason)
            return
        if self._token.check(header(scope, TOKEN_HEADER.encode())) is None:
            await self._pass(scope, channel, raw, local=LocalReason.EXTERNAL)
            return
        body, removed = bodies.strip(parsed.body)
        if removed:
            metrics.STRIPPED.inc(removed)
            raw = (bodies.dump_odd if parsed.odd else bodies.dump)(body)
        if path not in bodies.DISPATCHED or parsed.odd:
            await self._pass(scope, channel, raw, local=LocalReason.UNREADABLE if path in bodies.DISPATCHED else None)
            return
        facts = bodies.inspect(path, body)
        if path == bodies.CHAT and self._engine.parses_chat:
            facts = replace(facts, opens=False)
        plan = self._plan(scope, facts)
        if isinstance(plan, policy.Local):
            await self._pass(scope, channel, raw, local=plan.reason)
        elif isinstance(plan, policy.Refuse):
            await self._refuse(channel, plan.refusal)
        else:
            with tracing.request(scope) as traced:
                await Exchange(self._services(), traced, channel, path=path, body=body, facts=facts).run(plan)

    def _plan(self, scope: Scope, facts: bodies.Facts) -> policy.Plan:
        self._counter += 1
        table = self._discovery.table
        services = self._services()
        ready = table.ready(now=services.clock())
        wanted = header(scope, WANTED_HEADER.encode())
        if wanted is not None and all(peer.address != wanted for peer in ready):
            metrics.UNKNOWN_WANTED.inc()
        return policy.decide(
            facts, rules=services.rules, ready=ready, draining=self._draining, wanted=wanted, counter=self._counter
        )

    def _services(self) -> Services:
        if self._client is None:
            raise RuntimeError("the dispatcher is not started")
        return Services(
            app=self._app,
            settings=self._settings,
            discovery=self._discovery,
            client=self._client,
            token=self._token,
            connector=self._control,
            totals=self._totals,
            keep=self._keep,
            answered=lambda attempt, answer, in_place: self._keep(self._account(attempt, answer, in_place)),
        )

    async def _pass(
        self, scope: Scope, channel: ClientChannel, raw: bytes, *, local: LocalReason | None = None
    ) -> None:
        """Hands a request to the engine with ``raw`` as its body, in this very task."""
        headers = replaced(
            list(scope["headers"]), content_length=str(len(raw)), transfer_encoding=None, x_prebook_token=None
        )
        send = channel.direct
        if local is not None:
            self._totals.count_local(local)
            send = _marking(send, local)
        await self._app({**scope, "headers": headers}, channel.replay(raw), send)

    async def _refuse(self, channel: ClientChannel, refusal: Refusal) -> None:
        self._totals.count_refused(refusal)
        await channel.refuse(ErrorAnswer.of(refusal))

    async def _account(self, attempt: Attempt, answer: LegAnswer | None, in_place: bool) -> None:
        """Keeps the account of a transfer that served a request, for status and for whoever asks by its id."""
        known = await self._control.transfer(attempt.transfer_id) if self._control is not None else None
        tracing.transfer(known or {})
        if known is not None and known.get("state") == "failed" and not in_place:
            self._totals.count_failover(Failure.TRANSFER_FAILED, "in_place")
        self._accounts.append(
            {
                "transfer_id": attempt.transfer_id,
                "peer": attempt.peer.address,
                "prefill_engine_id": attempt.identity.rank_engine_id(attempt.rank),
                "attempt": attempt.number,
                "prefill_leg_s": round(answer.seconds, 6) if answer is not None else None,
                **(known or {}),
            }
        )


def _marking(send: Send, local: LocalReason) -> Send:
    async def marked(message: Message) -> None:
        if message["type"] == "http.response.start":
            mark = (b"x-prebook-local", local.value.encode())
            message = {**message, "headers": [*message.get("headers", ()), mark]}
        await send(message)

    return marked


def _is_form(scope: Scope) -> bool:
    kind = (header(scope, b"content-type") or "").lower()
    return kind.startswith(("multipart/", "application/x-www-form-urlencoded"))


async def _forever(name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs a background loop; one that breaks is logged with its traceback and starts again."""
    while True:
        try:
            await run()
        except Exception:
            logger.exception("the %s loop failed and starts again", name)
        await asyncio.sleep(1.0)
