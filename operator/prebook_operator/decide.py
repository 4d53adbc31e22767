"""Plan and render for one snapshot: pure. What is wanted, which revision serves, and every object that should exist."""

from __future__ import annotations

from dataclasses import dataclass

from prebook_operator.api import API_VERSION, Allow, DisaggregatedModel, FieldError, Reason, Role, UserError, load
from prebook_operator.fabric import Verdict, assess
from prebook_operator.kube.transport import JsonObject
from prebook_operator.observe import Snapshot
from prebook_operator.plan import DesiredReplicas, desired_replicas, revision_of
from prebook_operator.records import Key
from prebook_operator.render import Owner, cluster_context, render_revision, render_shared
from prebook_operator.takeover import Fleet, Step
from prebook_operator.takeover import decide as decide_step


@dataclass(frozen=True, kw_only=True)
class RenderSettings:
    """What rendering needs from the operator's own settings."""

    operator_image: str
    operator_namespace: str | None
    allow: Allow
    has_pod_monitor: bool


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What is wanted of a model whose spec can be used. `keep` are revisions whose objects stay although they are not
    among `intents`."""

    model: DisaggregatedModel
    target: str
    desired: DesiredReplicas
    step: Step
    fabric: Verdict
    intents: tuple[JsonObject, ...]
    keep: frozenset[str]

    @property
    def replicas(self) -> dict[Role, int]:
        """Engines wanted, by role."""
        return {role: self.desired.of(role) for role in Role}

    @property
    def scaling(self) -> tuple[Reason, str] | None:
        """The ratio bound at work; None when it changes nothing."""
        clamped = self.desired.reason is Reason.CLAMPED_TO_RATIO
        return (self.desired.reason, self.desired.message) if clamped else None


def parse(key: Key, snapshot: Snapshot, *, allow: Allow) -> DisaggregatedModel | tuple[FieldError, ...]:
    """The checked model, or what is wrong with it."""
    document = {
        "apiVersion": API_VERSION,
        "kind": "DisaggregatedModel",
        "metadata": {
            "name": key.name,
            "namespace": key.namespace,
            "uid": snapshot.model.uid,
            "generation": snapshot.model.generation,
        },
        "spec": snapshot.model.parsed_spec(),
    }
    try:
        return load(document, allow=allow)
    except UserError as error:
        return error.errors


def decide(
    model: DisaggregatedModel, snapshot: Snapshot, *, settings: RenderSettings, target_pairs: int, token: str | None
) -> Decision:
    """`target_pairs` are the handshaken pairs that pods of the target revision report; `token` is a new peer token,
    None when the Secret exists."""
    target = revision_of(model).rev8
    desired = desired_replicas(
        model.spec,
        prefill_scale=snapshot.role_replicas[Role.PREFILL],
        decode_scale=snapshot.role_replicas[Role.DECODE],
    )
    replicas = {role: desired.of(role) for role in Role}
    step = decide_step(
        Fleet(
            target=target,
            front=snapshot.front,
            sets=snapshot.sets,
            desired=replicas,
            pairs=target_pairs,
            paused=model.spec.rollout.paused,
        )
    )
    context = cluster_context(
        snapshot.model.key.namespace,
        operator_image=settings.operator_image,
        owner=Owner(uid=snapshot.model.uid, name=snapshot.model.key.name),
        allow=settings.allow,
        has_pod_monitor=settings.has_pod_monitor,
        peer_token=token,
        replicas=replicas,
        operator_namespace=settings.operator_namespace,
        front_revision=step.serving or target,
    )
    intents = render_shared(model, context)
    if step.start:
        intents += render_revision(model, context)
    return Decision(
        model=model,
        target=target,
        desired=desired,
        step=step,
        fabric=assess(model.spec, snapshot.nodes),
        intents=tuple(intents),
        keep=frozenset({step.serving, snapshot.front} - {""} - step.retire),
    )
