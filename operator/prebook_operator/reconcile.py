"""One reconciliation: observe → plan → render → apply → report. Level-triggered: it asks what is, not what happened.

Only observe, apply and report touch the network; `decide`, `agenda` and `status.report` are pure. Killed between any
two calls, the next run starts from what it then observes and ends in the same state."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from prebook_operator.actions import agenda
from prebook_operator.api import FieldError, Reason
from prebook_operator.cache import Cache
from prebook_operator.decide import Decision, RenderSettings, decide, parse
from prebook_operator.execute import Executor, Outcome
from prebook_operator.kube.resources import SECRET
from prebook_operator.observe import Observer, SecretState, Snapshot
from prebook_operator.pairs import PodPairs
from prebook_operator.plan import revision_of
from prebook_operator.publish import Publisher
from prebook_operator.records import Key, ModelRecord
from prebook_operator.refusals import Refusal
from prebook_operator.view import Trouble, View

logger = logging.getLogger(__name__)


def utc_now() -> str:
    """Now, as conditions carry it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True, kw_only=True)
class Pace:
    """When to look again, in seconds: after writes, while pairs are made, while they last, while pods are missing, and
    with nothing to do.

    After a write the report waits until the controllers have answered it, at most `patience`, so that a creation is
    reported once and not at every step."""

    settle: float = 0.5
    patience: float = 10.0
    pairing: float = 3.0
    paired: float = 60.0
    lacking: float = 30.0
    resync: float = 300.0


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of one reconciliation.

    `after`: seconds until the next look; None when the model is gone. `hold`: and not before, for what happens
    meanwhile is the echo of our own writes. `error`: not all could be done; back off."""

    after: float | None
    hold: bool = False
    error: str = ""


class Reconciler:
    """Reconciles one model per call; calls for different models may overlap."""

    def __init__(
        self,
        cache: Cache,
        observer: Observer,
        executor: Executor,
        publisher: Publisher,
        *,
        settings: RenderSettings,
        pace: Pace,
        now: Callable[[], str] = utc_now,
        clock: Callable[[], float] = time.monotonic,
        new_token: Callable[[], str] = lambda: secrets.token_urlsafe(32),
    ) -> None:
        self._cache = cache
        self._observer = observer
        self._executor = executor
        self._publisher = publisher
        self._settings = settings
        self._pace = pace
        self._now = now
        self._new_token = new_token
        self._clock = clock
        self._generations: dict[Key, tuple[str, int]] = {}
        self._written: dict[Key, float] = {}

    def pod_monitors(self, served: bool) -> None:
        """The kind PodMonitor has come or gone."""
        self._settings = replace(self._settings, has_pod_monitor=served)

    async def reconcile(self, key: Key) -> Result:
        """Brings the model one step nearer to its spec. Raises RetryLater and NotLeader."""
        snapshot = await self._observer.observe(key)
        if snapshot is None:
            self._forget(key)
            return Result(after=None)
        self._notice(key, snapshot.model)
        parsed = parse(key, snapshot, allow=self._settings.allow)
        if isinstance(parsed, tuple):
            view = self._view(snapshot, decision=None, faults=parsed)
            await self._publisher.publish(snapshot, view)
            return Result(after=self._pace.resync)
        target = revision_of(parsed).rev8
        target_pairs = await self._observer.pairs(snapshot, target)
        decision = decide(
            parsed,
            snapshot,
            settings=self._settings,
            target_pairs=sum(answer.ready for answer in target_pairs.values()),
            token=self._new_token() if snapshot.secret is SecretState.ABSENT else None,
        )
        if not snapshot.model.reported:
            # Ready must not stay True, of an older generation, for one moment longer than this takes.
            pairs = await self._serving_pairs(snapshot, decision, target_pairs)
            await self._publisher.publish(snapshot, self._view(snapshot, decision=decision, pairs=pairs))
        outcome = await self._apply(snapshot, decision)
        if outcome.gone:
            return Result(after=self._pace.resync)
        if outcome.again:
            return Result(after=self._pace.settle, error="the cluster had changed meanwhile")
        if outcome.writes:
            self._written[key] = self._clock()
        if outcome.trouble is None and (outcome.writes or self._unsettled(key, decision)):
            return Result(after=self._pace.settle, hold=True)
        return await self._report(snapshot.model, decision, outcome, target_pairs)

    async def _apply(self, snapshot: Snapshot, decision: Decision) -> Outcome:
        children = [intent for intent in decision.intents if intent["kind"] != SECRET.kind]
        plan = agenda(
            children,
            snapshot.children,
            owner=snapshot.model.uid,
            keep_revisions=decision.keep,
            equivalent=self._executor.equivalent(snapshot.model.uid),
        )
        made = Outcome()
        for manifest in decision.intents:
            if manifest["kind"] == SECRET.kind:
                await self._executor.make_secret(snapshot.model, manifest, made)
        if made.gone:
            return made
        outcome = await self._executor.run(snapshot.model, plan.actions)
        outcome.writes += made.writes
        outcome.trouble = made.trouble or outcome.trouble
        foreign = sorted({*plan.foreign, *outcome.foreign, *made.foreign})
        if snapshot.secret is SecretState.FOREIGN:
            foreign.append(f"Secret {snapshot.model.key.name}-peer-token")
        if foreign:
            outcome.trouble = Trouble(
                reason=Reason.FOREIGN_OBJECT,
                message=f"{', '.join(foreign)} exists already and does not belong to this model; it is left alone: "
                "delete or rename it, or rename the model",
                users=True,
            )
        return outcome

    async def _report(
        self, model: ModelRecord, decision: Decision, outcome: Outcome, target_pairs: dict[str, PodPairs]
    ) -> Result:
        key = model.key
        snapshot = await self._observer.observe(key)
        if snapshot is None:
            self._forget(key)
            return Result(after=None)
        if (snapshot.model.uid, snapshot.model.generation) != (model.uid, model.generation):
            # What was decided is of another spec: reported under the new generation, it would call that one served.
            return Result(after=self._pace.settle)
        pairs = await self._serving_pairs(snapshot, decision, target_pairs)
        refusals = await self._observer.refusals(snapshot, decision.target) if decision.step.start else ()
        view = self._view(
            snapshot, decision=decision, pairs=pairs, refusals=refusals, trouble=outcome.trouble, applied=True
        )
        await self._publisher.publish(snapshot, view)
        if outcome.trouble is not None and not outcome.trouble.users:
            return Result(after=self._pace.resync, error=outcome.trouble.message)
        unpaired = any(answer.error or answer.ready < answer.possible for answer in pairs.values())
        waiting = unpaired or (decision.step.reason is not Reason.UP_TO_DATE and bool(target_pairs))
        if waiting:
            return Result(after=self._pace.pairing)
        if self._lacks_pods(key, decision):
            # What is missing sends no events, and neither does the Event that says why.
            return Result(after=self._pace.lacking)
        return Result(after=self._pace.paired if pairs else self._pace.resync)

    def _unsettled(self, key: Key, decision: Decision) -> bool:
        """Have we written a moment ago, and are there not as many pods yet as that asks for?"""
        written = self._written.get(key)
        if written is None:
            return False
        if self._clock() - written < self._pace.patience and self._lacks_pods(key, decision):
            return True
        del self._written[key]
        return False

    def _lacks_pods(self, key: Key, decision: Decision) -> bool:
        """Are there fewer pods of the target revision than wanted, whatever their state?"""
        if not decision.step.start:
            return False
        pods = [pod for pod in self._cache.pods(key).values() if pod.revision == decision.target]
        return any(sum(pod.role == role.value for pod in pods) < count for role, count in decision.replicas.items())

    async def _serving_pairs(
        self, snapshot: Snapshot, decision: Decision, target_pairs: dict[str, PodPairs]
    ) -> dict[str, PodPairs]:
        serving = decision.step.serving
        return target_pairs if serving == decision.target else await self._observer.pairs(snapshot, serving)

    def _view(
        self,
        snapshot: Snapshot,
        *,
        decision: Decision | None,
        pairs: dict[str, PodPairs] | None = None,
        refusals: tuple[Refusal, ...] = (),
        faults: tuple[FieldError, ...] = (),
        trouble: Trouble | None = None,
        applied: bool = False,
    ) -> View:
        key = snapshot.model.key
        return View(
            name=key.name,
            namespace=key.namespace,
            generation=snapshot.model.generation,
            now=self._now(),
            previous=snapshot.model.parsed_status(),
            spec=decision.model.spec if decision else None,
            target=decision.target if decision else None,
            step=decision.step if decision else None,
            desired=decision.replicas if decision else {},
            scaling=decision.scaling if decision else None,
            sets=snapshot.sets,
            pods=snapshot.pods,
            pairs=pairs or {},
            refusals=refusals,
            fabric=decision.fabric if decision else None,
            faults=faults,
            trouble=trouble,
            applied=applied,
        )

    def _notice(self, key: Key, model: ModelRecord) -> None:
        current = (model.uid, model.generation)
        before = self._generations.get(key)
        if before is not None and before != current:
            self._executor.forget(before[0])
        self._generations[key] = current

    def _forget(self, key: Key) -> None:
        self._written.pop(key, None)
        known = self._generations.pop(key, None)
        if known is not None:
            self._executor.forget(known[0])
            self._observer.forget(known[0])
