"""Apply: carries out an agenda. The only place that writes children.

Whatever a write meets, the outcome is one of: done; the picture was old and is now corrected, so look again; the
object is somebody else's; only the user can help; try later. It may be interrupted after any call: everything is
derived again from what is observed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from prebook_operator.actions import Action, Verb, describe, digests_of
from prebook_operator.api import Reason
from prebook_operator.cache import Cache
from prebook_operator.kube.client import KubeClient
from prebook_operator.kube.errors import Conflict, Invalid, NamespaceGone, NotFound, Refused
from prebook_operator.kube.fields import MANAGER, live_body
from prebook_operator.kube.resources import OPTIONAL, SECRET, STATEFUL_SET, Resource
from prebook_operator.kube.transport import JsonObject
from prebook_operator.observe import Observer, SecretState, secret_name
from prebook_operator.records import ChildRecord, ModelRecord, child_record
from prebook_operator.refusals import judge
from prebook_operator.view import Trouble

logger = logging.getLogger(__name__)


class Found(Enum):
    """What a look at one name has found."""

    ABSENT = auto()
    OURS = auto()
    FOREIGN = auto()


@dataclass
class Outcome:
    """What came of an agenda. `again`: the picture was old; `gone`: the namespace is going and nothing more can be
    done."""

    writes: int = 0
    again: bool = False
    gone: bool = False
    foreign: list[str] = field(default_factory=list)
    trouble: Trouble | None = None

    def note(self, trouble: Trouble) -> None:
        """Keeps the first trouble."""
        self.trouble = self.trouble or trouble


class Executor:
    """Writes for one model at a time."""

    def __init__(
        self,
        client: KubeClient,
        cache: Cache,
        observer: Observer,
        *,
        foreign_recheck: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._foreign_recheck = foreign_recheck
        self._clock = clock
        self._client = client
        self._cache = cache
        self._observer = observer
        self._equivalent: dict[str, set[tuple[bytes | None, bytes | None]]] = {}
        self._refused: dict[str, dict[tuple[str, str], tuple[bytes, str]]] = {}
        self._foreign: dict[str, dict[tuple[str, str], float]] = {}

    def equivalent(self, uid: str) -> set[tuple[bytes | None, bytes | None]]:
        """Pairs of digests (live, intended) of a model's children that need no write."""
        return self._equivalent.get(uid, set())

    def forget(self, uid: str) -> None:
        """The model is gone, or its spec has changed and earlier verdicts do not count."""
        self._equivalent.pop(uid, None)
        self._refused.pop(uid, None)
        self._foreign.pop(uid, None)

    async def run(self, model: ModelRecord, actions: tuple[Action, ...]) -> Outcome:
        """Carries out `actions`. Raises RetryLater and NotLeader; everything else is in the outcome."""
        outcome = Outcome()
        for action in actions:
            if outcome.gone or (action.verb is Verb.DELETE and outcome.trouble is not None):
                break
            current = self._cache.models.get(model.key)
            if current is None or current.uid != model.uid or current.deleting:
                outcome.gone = True
                break
            await self._one(model, action, outcome)
        return outcome

    async def _one(self, model: ModelRecord, action: Action, outcome: Outcome) -> None:
        refusal = self._known_refusal(model, action)
        if refusal is not None:
            outcome.note(Trouble(reason=Reason.FORBIDDEN_FIELD, message=refusal, users=True))
            return
        try:
            if action.verb is Verb.CREATE and await self._still_foreign(model, action, outcome):
                return
            await self._send(model, action, outcome)
        except NamespaceGone:
            outcome.gone = True
        except Conflict:
            await self._after_conflict(model, action, outcome)
        except NotFound:
            self._vanished(model, action, outcome)
        except Invalid as error:
            message = f"the API server refuses {describe(action.resource, action.name)}: {error.message}"
            self._remember_refusal(model, action, message)
            outcome.note(Trouble(reason=Reason.FORBIDDEN_FIELD, message=message, users=True))
        except Refused as error:
            outcome.note(_refused(describe(action.resource, action.name), error))

    async def _send(self, model: ModelRecord, action: Action, outcome: Outcome) -> None:
        namespace = model.key.namespace
        if action.verb is Verb.DELETE and action.record is not None:
            await self._client.delete(action.resource, namespace=namespace, name=action.name, uid=action.record.uid)
            self._cache.mark_deleting(model.key, action.record)
        elif action.verb is Verb.CREATE and action.intent is not None:
            live = await self._client.create_by_apply(action.resource, action.intent, namespace=namespace)
            self._learn(model, action, live)
        elif action.intent is not None and action.record is not None:
            intent = await self._with_kept_template(model, action, action.intent, action.record)
            if intent is None:
                return
            live = await self._client.update_by_apply(
                action.resource, intent, namespace=namespace, uid=action.record.uid
            )
            self._learn(model, action, live)
        outcome.writes += 1

    def _learn(self, model: ModelRecord, action: Action, live: JsonObject) -> None:
        record = child_record(live, action.resource)
        self._cache.put(action.resource.plural, model.key, record)
        if action.intent is None:
            return
        wanted = digests_of(action.intent)
        for got, want in ((record.owned, wanted.owned), (record.template, wanted.template)):
            if got != want:
                # Not an error for the user, but worth a look: render/ does not spell something the way the server does.
                logger.info("%s reads back differently from what was applied", describe(action.resource, action.name))
                self._equivalent.setdefault(model.uid, set()).add((got, want))

    async def _with_kept_template(
        self, model: ModelRecord, action: Action, intent: JsonObject, record: ChildRecord
    ) -> JsonObject | None:
        """The intent to apply; None when nothing is to be done.

        The pod template of a set is fixed when the set is made. A template that differs because another version of
        this operator renders differently is kept, so that an upgrade of the operator touches no set. One that differs
        because somebody edited it is put right."""
        if action.resource is not STATEFUL_SET:
            return intent
        wanted = digests_of(intent)
        if record.template == wanted.template:
            return intent
        live = await self._client.get(action.resource, namespace=model.key.namespace, name=action.name)
        ours = live_body(live)
        if ours is None or edited_by_others(live):
            return intent
        if action.verb is Verb.CHECK_TEMPLATE:
            self._equivalent.setdefault(model.uid, set()).add((record.template, wanted.template))
            return None
        template = (ours.get("spec") or {}).get("template") or intent["spec"]["template"]
        return {**intent, "spec": {**intent["spec"], "template": template}}

    async def _after_conflict(self, model: ModelRecord, action: Action, outcome: Outcome) -> None:
        """Something was not as we believed: looks, and corrects the picture."""
        found = await self._look(model, action.resource, action.name)
        if found is Found.FOREIGN:
            outcome.foreign.append(describe(action.resource, action.name))
        elif found is Found.ABSENT and action.verb is Verb.CREATE and action.intent is not None:
            # The name was free again a moment later, or this server does not create on our precondition.
            live = await self._client.create_by_plain_apply(
                action.resource, action.intent, namespace=model.key.namespace
            )
            self._learn(model, action, live)
            outcome.writes += 1
        else:
            outcome.again = True

    async def _look(self, model: ModelRecord, resource: Resource, name: str) -> Found:
        """Reads one object into the picture."""
        try:
            live = await self._client.get(resource, namespace=model.key.namespace, name=name)
        except NotFound:
            known = self._cache.children(model.key).get((resource.plural, name))
            if known is not None:
                self._cache.forget_child(model.key, known)
            return Found.ABSENT
        record = child_record(live, resource)
        if record.owner == model.uid:
            self._cache.put(resource.plural, model.key, record)
            return Found.OURS
        # Not into the cache: without our label nobody would ever tell us that it has gone.
        self._foreign.setdefault(model.uid, {})[resource.plural, name] = self._clock() + self._foreign_recheck
        return Found.FOREIGN

    async def _still_foreign(self, model: ModelRecord, action: Action, outcome: Outcome) -> bool:
        """Is somebody else's object known to have this name? Looked at again only now and then."""
        known = self._foreign.get(model.uid, {})
        place = (action.resource.plural, action.name)
        if place not in known:
            return False
        if self._clock() >= known[place]:
            del known[place]
            found = await self._look(model, action.resource, action.name)
            if found is not Found.FOREIGN:
                outcome.again = outcome.again or found is Found.OURS
                return found is Found.OURS
        outcome.foreign.append(describe(action.resource, action.name))
        return True

    def _vanished(self, model: ModelRecord, action: Action, outcome: Outcome) -> None:
        if action.record is not None:
            self._cache.forget_child(model.key, action.record)
            outcome.again = outcome.again or action.verb is not Verb.DELETE
        elif action.resource in OPTIONAL:
            outcome.note(
                Trouble(
                    reason=Reason.API_ERROR,
                    message=f"the cluster does not know the kind {action.resource.kind}, which the spec needs",
                    users=True,
                )
            )
        else:
            outcome.gone = True  # 404 on creation: the namespace has gone

    def _known_refusal(self, model: ModelRecord, action: Action) -> str | None:
        refused = self._refused.get(model.uid, {}).get((action.resource.plural, action.name))
        if refused is None or action.intent is None:
            return None
        return refused[1] if refused[0] == digests_of(action.intent).owned else None

    def _remember_refusal(self, model: ModelRecord, action: Action, message: str) -> None:
        if action.intent is not None:
            refused = self._refused.setdefault(model.uid, {})
            refused[action.resource.plural, action.name] = (digests_of(action.intent).owned, message)

    async def make_secret(self, model: ModelRecord, manifest: JsonObject, outcome: Outcome) -> None:
        """Creates the peer Secret. It is never updated: engines read it once, and a new token would part them from
        their peers."""
        try:
            await self._client.create(SECRET, manifest, namespace=model.key.namespace)
        except Conflict:
            if await self._observer.look_at_secret(model) is not SecretState.OURS:
                outcome.foreign.append(describe(SECRET, secret_name(model.key)))
            return
        except (NamespaceGone, NotFound):
            outcome.gone = True
            return
        except Refused as error:
            outcome.note(_refused(describe(SECRET, secret_name(model.key)), error))
            return
        outcome.writes += 1
        self._observer.secret_made(model)


def _refused(what: str, error: Refused) -> Trouble:
    """Quota, admission or rights: cured from outside, without a change of the spec."""
    reason, remedy = judge(error.message)
    message = f"the API server refuses {what}: {error.message}{f'; {remedy}' if remedy else ''}"
    return Trouble(reason=reason, message=message, users=False)


def edited_by_others(live: Mapping[str, Any]) -> bool:
    """Does another field manager own anything in the set's pod spec? `kubectl rollout restart` only adds an
    annotation, which is not an edit."""
    for entry in (live.get("metadata") or {}).get("managedFields") or ():
        if entry.get("subresource") or entry.get("manager") == MANAGER:
            continue
        template = ((entry.get("fieldsV1") or {}).get("f:spec") or {}).get("f:template") or {}
        if template.get("f:spec"):
            return True
    return False
