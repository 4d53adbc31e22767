"""Revision of a DisaggregatedModel: a hash over the fields that decide what an engine does.

Prefill and decode of different revisions never discover each other, so the hash decides who may pair, and a new hash
restarts engines. Hence:

- Fields are *selected*. Replicas, pausing, scaling bounds, network policy and monitoring change nothing inside a pod
  and are left out.
- Values are taken in *canonical form*: quantities as numbers, maps without order, enums as their text, the defaults
  that follow from other fields filled in. `4Mi` and `4194304` are the same revision.
- A field that has its default is *absent* from the form. So a later version can add a field, with a default that
  means what was done before, and no existing model gets a new hash. Defaults are written down here, not read from the
  types: editing a type must not restart a fleet.
- The form is hashed as JSON text made here (sorted keys, no spaces, ASCII), so that neither pydantic nor a JSON
  library can change it.

The algorithm has an id, carried in a label beside the revision. It changes only when the meaning of the form does.
Golden hashes are in tests/golden/revisions.json.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from operator import itemgetter
from typing import Any, Final

from prebook_operator.api import derived
from prebook_operator.api.base import quantity_value
from prebook_operator.api.resources import DisaggregatedModel
from prebook_operator.api.spec import DisaggregatedModelSpec, Role

ALGORITHM: Final = "v1"

Canonical = dict[str, Any]

_DEFAULTS: Final[Mapping[str, Any]] = {
    "model": {"revision": None, "hfTokenSecretRef": None, "cache": {}},
    "engine": {
        "args": [],
        "env": [],
        "sharedMemory": None,
        "startupTimeoutSeconds": 3600,
        "shutdownSeconds": 60,
    },
    "transfer": {
        "connector": "Prebook",
        "leaseSeconds": 30,
        "drainSeconds": 60,
        "onFailure": "Recompute",
        "progressive": {"enabled": True, "minBytes": "4194304", "maxInFlight": 2},
        "firstToken": "Decode",
        "verify": "Off",
    },
    "hardware": {
        "profile": "none",
        "efaPerGPU": 0,
        "nodeGroups": {},
        "devices": "Plugin",
        "dra": {
            "efaDeviceClass": "efa.networking.k8s.aws",
            "gpuDeviceClass": None,
            "alignAttribute": "resource.kubernetes.io/pcieRoot",
        },
    },
    "routing": {"localPrefillMaxTokens": 64, "policy": "LeastLoaded"},
    "role": {"tensorParallelSize": 1, "gpus": 0, "nodeSelector": {}, "tolerations": [], "template": {}},
}


@dataclass(frozen=True)
class Revision:
    """Hash of one state of a model's engines."""

    digest: str
    """64 hexadecimal digits."""
    algorithm: str = ALGORITHM

    @property
    def rev8(self) -> str:
        """The first 8 digits: part of object names and the value of the label `prebook.dev/revision`."""
        return self.digest[:8]


def revision_of(model: DisaggregatedModel) -> Revision:
    """The revision that the spec of `model` asks for."""
    return Revision(hashlib.sha256(canonical_text(model).encode("ascii")).hexdigest())


def canonical_text(model: DisaggregatedModel) -> str:
    """The hashed text, for golden tests and for people who ask why a revision changed."""
    return json.dumps(canonical_form(model), sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def canonical_form(model: DisaggregatedModel) -> Canonical:
    """Selected fields of `model`, in canonical form, without those that have their default."""
    spec = model.spec
    form = {
        "model": _model(model),
        "engine": _engine(spec),
        "transfer": _transfer(spec),
        "hardware": _hardware(spec),
        "routing": _without(_wire(spec.routing), _DEFAULTS["routing"]),
        **{role.value: _role(spec, role) for role in Role},
    }
    return {key: value for key, value in form.items() if value != {}}


def _wire(part: Any) -> Canonical:
    wire: Canonical = part.model_dump(mode="json", by_alias=True, exclude_none=True)
    return wire


def _number(quantity: str) -> str:
    # Decimal.normalize gives one text per value; format 'f' keeps large numbers free of exponents.
    return format(quantity_value(quantity).normalize() + Decimal(0), "f")


def _without(value: Canonical, defaults: Mapping[str, Any]) -> Canonical:
    """`value` without the keys that have their default, nested."""
    kept: Canonical = {}
    for key, item in value.items():
        default = defaults.get(key)
        if isinstance(item, dict) and isinstance(default, Mapping):
            rest = _without(item, default)
            if rest:
                kept[key] = rest
        elif item != default or key not in defaults:
            kept[key] = item
    return kept


def _model(model: DisaggregatedModel) -> Canonical:
    wire = _wire(model.spec.model)
    wire["servedName"] = model.served_name
    cache = wire.get("cache", {})
    if "emptyDir" in cache:
        cache["emptyDir"] = {key: _number(value) for key, value in cache["emptyDir"].items()}
        if not cache["emptyDir"]:
            del cache["emptyDir"]  # an emptyDir without a limit is what an absent cache means
    return _without(wire, _DEFAULTS["model"])


def _env(variables: Sequence[Canonical]) -> list[Canonical]:
    return sorted(variables, key=lambda variable: str(variable["name"]))


def _engine(spec: DisaggregatedModelSpec) -> Canonical:
    wire = _wire(spec.engine)
    wire["env"] = _env(wire.get("env", []))
    if "sharedMemory" in wire:
        wire["sharedMemory"] = _number(wire["sharedMemory"])
    return _without(wire, _DEFAULTS["engine"])


def _transfer(spec: DisaggregatedModelSpec) -> Canonical:
    wire = _wire(spec.transfer)
    wire["backend"] = derived.backend(spec).value
    wire["progressive"]["minBytes"] = _number(wire["progressive"]["minBytes"])
    # Only validation reads it: it says what the model is, not what an engine does.
    del wire["multiHeadLatentAttention"]
    return _without(wire, _DEFAULTS["transfer"])


def _hardware(spec: DisaggregatedModelSpec) -> Canonical:
    wire = _wire(spec.hardware)
    wire["efaPerGPU"] = derived.efa_per_gpu(spec)
    return _without(wire, _DEFAULTS["hardware"])


def _role(spec: DisaggregatedModelSpec, role: Role) -> Canonical:
    wire = _wire(spec.role(role))
    wire.pop("replicas", None)
    wire["gpus"] = derived.gpus(spec, role)
    wire["template"] = _template(wire["template"])
    return _without(wire, _DEFAULTS["role"])


def _template(template: Canonical) -> Canonical:
    pod = template.get("spec", {})
    for container in pod.get("containers", []):
        container["env"] = _env(container.get("env", []))
        for amounts in container.get("resources", {}).values():
            amounts.update({name: _number(amount) for name, amount in amounts.items()})
    for volume in pod.get("volumes", []):
        limit = volume.get("emptyDir", {}).get("sizeLimit")
        if limit is not None:
            volume["emptyDir"]["sizeLimit"] = _number(limit)
    for field in ("volumes", "imagePullSecrets"):
        pod[field] = sorted(pod.get(field, []), key=itemgetter("name"))
    pruned: Canonical = _pruned(template)
    _drop_bare_containers(pruned)
    again: Canonical = _pruned(pruned)
    return again


def _drop_bare_containers(template: Canonical) -> None:
    # A container that is only named changes nothing.
    pod = template.get("spec", {})
    if "containers" in pod:
        pod["containers"] = [container for container in pod["containers"] if container.keys() != {"name"}]


def _pruned(value: Any) -> Any:
    """`value` without empty maps, empty lists, empty strings and false, which all mean the same as absence in a
    template."""
    if isinstance(value, dict):
        items = ((key, _pruned(item)) for key, item in value.items())
        return {key: item for key, item in items if not _is_empty(item)}
    if isinstance(value, list):
        return [_pruned(item) for item in value]
    return value


def _is_empty(value: Any) -> bool:
    # Zero is a value (group 0, no toleration time), although it equals False.
    return value is False or value in ({}, [], "")
