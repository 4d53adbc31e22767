"""CEL rules of the CRDs: what the API server itself refuses, with the message that a user sees.

Each rule stands at the object that holds all fields it reads, names the field at fault, and says what to do.
`validation.py` gives the same verdicts for documents that do not pass an API server. Rules are written for the
server's cost limits: every list, map and string that a rule walks is bounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from prebook_operator.api.forms import form_of
from prebook_operator.api.owned import (
    OWNED_ENV,
    OWNED_ENV_PREFIX,
    OWNED_FLAG_FAMILIES,
    OWNED_FLAGS,
    OWNED_MOUNTS,
    OWNED_RESOURCES,
    OWNED_VOLUME_PREFIX,
    SAMPLER_FLAGS,
    SECRET_ENV,
)
from prebook_operator.api.profiles import MACHINES
from prebook_operator.api.resources import MAX_NAME
from prebook_operator.api.spec import MODEL_URI

ITEMS: Final = "[]"
"""Step of a path into the elements of a list."""

Path = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One x-kubernetes-validations entry."""

    rule: str
    message: str
    field: str = ""
    """Path of the field at fault below the object that the rule stands at, such as `.gpus`."""
    expression: str = ""
    """CEL that makes a message with the value in it; `message` is used when it cannot be evaluated."""
    replaces_pattern: bool = False
    """Whether the schema's own pattern is left out, because its message would show nothing but a regular expression."""

    def to_wire(self) -> dict[str, Any]:
        """The entry as the API server reads it."""
        entry = {
            "rule": self.rule,
            "message": self.message,
            "messageExpression": self.expression,
            "fieldPath": self.field,
        }
        return {key: value for key, value in entry.items() if value}


def _strings(values: Any) -> str:
    return "[" + ", ".join(f"'{value}'" for value in values) + "]"


def _table(values: Mapping[str, int]) -> str:
    return "{" + ", ".join(f"'{key}': {value}" for key, value in values.items()) + "}"


def _each(values: Mapping[str, int]) -> str:
    """Counts for a message. Text made by CEL from numbers is not an option: its cost is estimated as unbounded."""
    return ", ".join(f"{key} has {value}" for key, value in values.items())


_GPUS: Final = {profile.value: node.gpus for profile, node in MACHINES.items()}
_EFA: Final = {profile.value: node.efa for profile, node in MACHINES.items()}
_NODE_GPUS: Final = _table(_GPUS)
_NODE_EFA: Final = _table(_EFA)
_SHARE: Final = _table({profile.value: node.efa_per_gpu for profile, node in MACHINES.items()})

_HAS_FABRIC: Final = "self.hardware.profile != 'none'"
_PER_GPU: Final = f"(has(self.hardware.efaPerGPU) ? self.hardware.efaPerGPU : {_SHARE}[self.hardware.profile])"


def _gpus(role: str) -> str:
    return f"(has(self.{role}.gpus) ? self.{role}.gpus : self.{role}.tensorParallelSize)"


_USES_EFA: Final = f"{_HAS_FABRIC} && {_PER_GPU} > 0 && ({_gpus('prefill')} > 0 || {_gpus('decode')} > 0)"

ROOT: Final = (
    Rule(
        rule=f"size(self.metadata.name) <= {MAX_NAME}",
        message=f"at most {MAX_NAME} characters: pod labels carry the name",
        field=".metadata.name",
    ),
    Rule(
        rule="self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        message="must be lower-case letters, digits and '-', starting with a letter: a Service has this name",
        field=".metadata.name",
    ),
)

SPEC: Final = (
    Rule(
        rule="self.transfer.firstToken != 'Prefill' || self.transfer.connector == 'Prebook'",
        message=(
            "only the Prebook connector can make decode continue from prefill's token. Use Decode, or connector Prebook"
        ),
        field=".transfer.firstToken",
    ),
    Rule(
        rule=(
            "self.transfer.firstToken != 'Prefill' || !has(self.engine.args) || "
            f"!self.engine.args.exists(argument, {_strings(SAMPLER_FLAGS)}.exists(flag, "
            "argument.replace('_', '-').startsWith(flag)))"
        ),
        message=(
            "Prefill cannot be combined with speculative decoding or --logits-processors in spec.engine.args. "
            "Use Decode, or remove the option"
        ),
        field=".transfer.firstToken",
    ),
    Rule(
        rule=f"!({_USES_EFA}) || !has(self.transfer.backend) || self.transfer.backend == 'LIBFABRIC'",
        message=(
            "UCX does not use EFA: it would silently run over TCP. Use LIBFABRIC, or set spec.hardware.efaPerGPU to 0"
        ),
        field=".transfer.backend",
    ),
    *(
        Rule(
            rule=f"!({_HAS_FABRIC}) || {_gpus(role)} <= {_NODE_GPUS}[self.hardware.profile]",
            message=f"a pod cannot span nodes, and {_each(_GPUS)}: use fewer GPUs",
            field=f".{role}.gpus",
        )
        for role in ("prefill", "decode")
    ),
    *(
        Rule(
            rule=(
                f"!({_HAS_FABRIC}) || {_gpus(role)} > {_NODE_GPUS}[self.hardware.profile] || "
                f"{_gpus(role)} * {_PER_GPU} <= {_NODE_EFA}[self.hardware.profile]"
            ),
            message=f"gpus of {role} times efaPerGPU is too much: {_each(_EFA)}. Use fewer per GPU",
            field=".hardware.efaPerGPU",
        )
        for role in ("prefill", "decode")
    ),
    Rule(
        rule=(
            "self.prefill.tensorParallelSize <= self.decode.tensorParallelSize || "
            "self.transfer.multiHeadLatentAttention"
        ),
        message=(
            "more than decode's, which decode cannot receive. Use at most spec.decode.tensorParallelSize, or set "
            "spec.transfer.multiHeadLatentAttention for a model that has it"
        ),
        field=".prefill.tensorParallelSize",
    ),
    Rule(
        rule=(
            "self.prefill.tensorParallelSize % self.decode.tensorParallelSize == 0 || "
            "self.decode.tensorParallelSize % self.prefill.tensorParallelSize == 0"
        ),
        message="does not divide evenly with prefill's: make one a multiple of the other",
        field=".decode.tensorParallelSize",
    ),
    Rule(
        rule=(
            "!has(self.scaling) || !has(self.scaling.ratio) || "
            "!has(self.prefill.replicas) || !has(self.decode.replicas) || "
            "self.prefill.replicas == 0 || self.decode.replicas == 0 || "
            "((!has(self.scaling.ratio.min) || "
            "self.prefill.replicas * int(self.scaling.ratio.min.split(':')[1]) >= "
            "self.decode.replicas * int(self.scaling.ratio.min.split(':')[0])) && "
            "(!has(self.scaling.ratio.max) || "
            "self.prefill.replicas * int(self.scaling.ratio.max.split(':')[1]) <= "
            "self.decode.replicas * int(self.scaling.ratio.max.split(':')[0])))"
        ),
        message="replicas of prefill and decode are outside of it: change replicas, or widen the range",
        field=".scaling.ratio",
    ),
    *(
        Rule(
            rule=(
                f"!has(self.{role}.template) || !has(self.{role}.template.spec) || "
                f"!has(self.{role}.template.spec.terminationGracePeriodSeconds) || "
                f"self.{role}.template.spec.terminationGracePeriodSeconds >= "
                "self.transfer.drainSeconds + self.engine.shutdownSeconds + self.transfer.leaseSeconds"
            ),
            message=(
                "shorter than drain, shutdown and lease together: raise it, or lower "
                "spec.transfer.drainSeconds or spec.engine.shutdownSeconds"
            ),
            field=f".{role}.template.spec.terminationGracePeriodSeconds",
        )
        for role in ("prefill", "decode")
    ),
)

MODEL: Final = (
    Rule(
        rule="!has(self.hfTokenSecretRef) || self.uri.startsWith('hf://')",
        message="only hf:// models use it: remove it or use an hf:// uri",
        field=".hfTokenSecretRef",
    ),
)
URI: Final = (Rule(rule=f"self.matches(r'{MODEL_URI}')", message=form_of(MODEL_URI), replaces_pattern=True),)
CACHE: Final = (
    Rule(
        rule=(
            "[has(self.persistentVolumeClaim), has(self.emptyDir), has(self.hostPath)].filter(given, given).size() <= 1"
        ),
        message="several sources are given: keep one of persistentVolumeClaim, emptyDir, hostPath",
    ),
)
ARGS: Final = (
    Rule(
        rule="self.size() == 0 || self[0].startsWith('-')",
        message="the first element belongs to no option: start with an option such as --max-model-len=32768",
    ),
)
_FLAG: Final = "self.split('=')[0].split('.')[0].replace('_', '-')"
# The list of one element binds the flag to a name, so that its cost is counted once and not for every owned flag.
ARG: Final = (
    Rule(
        rule=(
            f"!self.startsWith('-') || [{_FLAG}].all(flag, "
            f"!({_strings(OWNED_FLAGS)}.exists(owned, owned.startsWith(flag)) || "
            f"{_strings(OWNED_FLAG_FAMILIES)}.exists(family, flag.startsWith(family))))"
        ),
        message="is set by Prebook, or may abbreviate an option that is: remove it and use the field of the spec",
        expression=(
            f"{_FLAG} + ' is set by Prebook, or may abbreviate an option that is: "
            "remove it and use the field of the spec'"
        ),
    ),
)
ENV: Final = (
    Rule(
        rule=f"!(self.name in {_strings(OWNED_ENV)}) && !self.name.startsWith('{OWNED_ENV_PREFIX}')",
        message="is set by Prebook: remove it",
        expression="self.name + ' is set by Prebook: remove it'",
        field=".name",
    ),
    Rule(rule="!(has(self.value) && has(self.valueFrom))", message="has both value and valueFrom: keep one"),
    Rule(
        rule=f"!(self.name in {_strings(SECRET_ENV)}) || !has(self.value) || self.value == ''",
        message="holds a credential as plain text: put it into a Secret and use valueFrom.secretKeyRef",
        field=".value",
    ),
)
ENV_SOURCE: Final = (
    Rule(
        rule=(
            "[has(self.secretKeyRef), has(self.configMapKeyRef), has(self.fieldRef)].filter(given, given).size() == 1"
        ),
        message="give exactly one of secretKeyRef, configMapKeyRef, fieldRef",
    ),
)
HARDWARE: Final = (
    Rule(
        rule="self.profile != 'none' || !has(self.efaPerGPU) || self.efaPerGPU == 0",
        message=(
            f"profile none has no EFA devices: set spec.hardware.profile to one of {', '.join(MACHINES)}, or remove it"
        ),
        field=".efaPerGPU",
    ),
)
ROLE: Final = (
    Rule(
        rule="!has(self.gpus) || self.gpus == 0 || self.gpus >= self.tensorParallelSize",
        message="too few GPUs for tensorParallelSize: use at least as many, or 0 to run on the CPU",
        field=".gpus",
    ),
)
TOLERATION: Final = (
    Rule(
        rule="self.operator != 'Exists' || !has(self.value) || self.value == ''",
        message="is not compared with operator Exists: remove it, or use operator Equal",
        field=".value",
    ),
    Rule(
        rule="has(self.key) || self.operator == 'Exists'",
        message="is required with operator Equal: name the taint, or use operator Exists",
        field=".key",
    ),
    Rule(
        rule="!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
        message="has no meaning without effect NoExecute: remove it",
        field=".tolerationSeconds",
    ),
)
RATIO: Final = (
    Rule(
        rule=(
            "!has(self.min) || !has(self.max) || int(self.min.split(':')[0]) * int(self.max.split(':')[1]) <= "
            "int(self.max.split(':')[0]) * int(self.min.split(':')[1])"
        ),
        message="is more than max: exchange the two, or widen the range",
        field=".min",
    ),
)
TEMPLATE_LABELS: Final = (
    Rule(
        rule="!self.exists(key, key.startsWith('prebook.dev/') || key.startsWith('app.kubernetes.io/'))",
        message="labels of prebook.dev and app.kubernetes.io are set by Prebook: use a label of your own domain",
    ),
)
POD: Final = (
    Rule(
        rule=(
            "!has(self.containers) || self.containers.all(container, !has(container.volumeMounts) || "
            "container.volumeMounts.all(mount, has(self.volumes) && "
            "self.volumes.exists(volume, volume.name == mount.name)))"
        ),
        message=(
            "a volumeMount names a volume that this template does not have: add it under volumes, or correct the name"
        ),
        field=".containers",
    ),
)
_SOURCES: Final = ("emptyDir", "persistentVolumeClaim", "configMap", "secret", "hostPath")
VOLUME: Final = (
    Rule(
        rule=f"!self.name.startsWith('{OWNED_VOLUME_PREFIX}')",
        message=f"names starting with {OWNED_VOLUME_PREFIX} are Prebook's: use another name",
        field=".name",
    ),
    Rule(
        rule=f"[{', '.join(f'has(self.{source})' for source in _SOURCES)}].filter(given, given).size() == 1",
        message=f"give exactly one of {', '.join(_SOURCES)}",
    ),
)
MOUNT: Final = (
    Rule(
        rule=(
            f"!{_strings(OWNED_MOUNTS)}.exists(owned, "
            "self.mountPath == owned || self.mountPath.startsWith(owned + '/'))"
        ),
        message="is mounted by Prebook: mount it elsewhere",
        field=".mountPath",
    ),
)
AMOUNTS: Final = (
    Rule(
        rule=f"!self.exists(name, name in {_strings(OWNED_RESOURCES)})",
        message="GPUs and EFA devices are set by Prebook: use gpus of the role and spec.hardware.efaPerGPU",
    ),
)


def _template(prefix: Path) -> dict[Path, tuple[Rule, ...]]:
    pod = (*prefix, "template", "spec")
    engine = (*pod, "containers", ITEMS)
    return {
        prefix: ROLE,
        (*prefix, "tolerations", ITEMS): TOLERATION,
        (*prefix, "template", "metadata", "labels"): TEMPLATE_LABELS,
        pod: POD,
        (*pod, "tolerations", ITEMS): TOLERATION,
        (*pod, "volumes", ITEMS): VOLUME,
        (*engine, "env", ITEMS): ENV,
        (*engine, "env", ITEMS, "valueFrom"): ENV_SOURCE,
        (*engine, "volumeMounts", ITEMS): MOUNT,
        (*engine, "resources", "requests"): AMOUNTS,
        (*engine, "resources", "limits"): AMOUNTS,
    }


DISAGGREGATED_MODEL: Final[Mapping[Path, tuple[Rule, ...]]] = {
    (): ROOT,
    ("spec",): SPEC,
    ("spec", "model"): MODEL,
    ("spec", "model", "uri"): URI,
    ("spec", "model", "cache"): CACHE,
    ("spec", "engine", "args"): ARGS,
    ("spec", "engine", "args", ITEMS): ARG,
    ("spec", "engine", "env", ITEMS): ENV,
    ("spec", "engine", "env", ITEMS, "valueFrom"): ENV_SOURCE,
    ("spec", "hardware"): HARDWARE,
    ("spec", "scaling", "ratio"): RATIO,
    **_template(("spec", "prefill")),
    **_template(("spec", "decode")),
}
"""Rules of DisaggregatedModel by schema path."""

MODEL_ROLE: Final[Mapping[Path, tuple[Rule, ...]]] = {
    ("spec", "model"): (Rule(rule="self == oldSelf", message="a role cannot move to another model"),),
    ("spec", "role"): (Rule(rule="self == oldSelf", message="a role cannot change its kind"),),
}
"""Rules of ModelRole by schema path."""
