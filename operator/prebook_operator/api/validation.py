"""Cross-field rules of a DisaggregatedModel: pure checks that name the field, the fault and the remedy.

The rules that need no knowledge of the operator's settings stand in the CRD as CEL too (`crd_rules.py`), so the API
server answers them at once; `tests/apiserver/test_crd.py` holds both to the same verdicts. The rest (what the
operator allows) ends in a condition.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction

from prebook_operator.api import derived
from prebook_operator.api.allow import NOTHING, Allow
from prebook_operator.api.base import quantity_value
from prebook_operator.api.errors import FieldError
from prebook_operator.api.owned import SAMPLER_FLAGS, flag_key
from prebook_operator.api.profiles import MACHINES
from prebook_operator.api.resources import MAX_NAME, DisaggregatedModel
from prebook_operator.api.spec import Backend, Connector, DisaggregatedModelSpec, FirstToken, Role
from prebook_operator.api.validation_env import check_args, check_env
from prebook_operator.api.validation_template import check_template

NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"


def check(model: DisaggregatedModel, *, allow: Allow = NOTHING) -> list[FieldError]:
    """Every cross-field fault of `model`, ordered by path; empty when it can be rendered."""
    spec = model.spec
    found = [
        *_name(model),
        *_weights(spec, allow),
        *check_args(spec.engine.args, path="spec.engine.args"),
        *check_env(spec.engine.env, path="spec.engine.env"),
        *_transfer(spec),
        *_hardware(spec),
        *_parallelism(spec),
        *_ratio(spec),
    ]
    for role in Role:
        found.extend(_role(spec, role))
        found.extend(check_template(spec, role, allow=allow))
    return sorted(found, key=lambda error: error.path)


def _name(model: DisaggregatedModel) -> Iterator[FieldError]:
    name = model.name
    if len(name) > MAX_NAME:
        yield FieldError(
            "metadata.name",
            f"{len(name)} characters are too many",
            f"Use at most {MAX_NAME}: pod labels carry the name",
        )
    if not re.match(NAME_PATTERN, name):
        yield FieldError(
            "metadata.name",
            f"{name!r} cannot be the name of a Service",
            "Use lower-case letters, digits and '-', starting with a letter",
        )


def _weights(spec: DisaggregatedModelSpec, allow: Allow) -> Iterator[FieldError]:
    model, cache = spec.model, spec.model.cache
    if model.hf_token_secret_ref is not None and not model.uri.startswith("hf://"):
        yield FieldError("spec.model.hfTokenSecretRef", "only hf:// models use it", "Remove it or use an hf:// uri")
    given = [value for value in (cache.persistent_volume_claim, cache.empty_dir, cache.host_path) if value is not None]
    if len(given) > 1:
        yield FieldError(
            "spec.model.cache", "several sources are given", "Keep one of persistentVolumeClaim, emptyDir, hostPath"
        )
    if cache.host_path is not None and not allow.host_path:
        yield FieldError(
            "spec.model.cache.hostPath",
            "folders of the node are not allowed",
            "Use persistentVolumeClaim, or start the operator with --allow-host-path",
        )


def _transfer(spec: DisaggregatedModelSpec) -> Iterator[FieldError]:
    if derived.uses_efa(spec) and derived.backend(spec) is not Backend.LIBFABRIC:
        yield FieldError(
            "spec.transfer.backend",
            "UCX does not use EFA: it would silently run over TCP",
            "Use LIBFABRIC, or set spec.hardware.efaPerGPU to 0",
        )
    if spec.transfer.first_token is not FirstToken.PREFILL:
        return
    if spec.transfer.connector is not Connector.PREBOOK:
        yield FieldError(
            "spec.transfer.firstToken",
            f"{spec.transfer.connector.value} cannot make decode continue from prefill's token",
            "Use Decode, or the Prebook connector",
        )
    for argument in spec.engine.args:
        if flag_key(argument).startswith(SAMPLER_FLAGS):
            yield FieldError(
                "spec.transfer.firstToken",
                f"Prefill cannot be combined with {flag_key(argument)} in spec.engine.args",
                "Use Decode, or remove the option",
            )


def _hardware(spec: DisaggregatedModelSpec) -> Iterator[FieldError]:
    hardware = spec.hardware
    node = derived.machine(spec)
    if node is None:
        if hardware.efa_per_gpu:
            names = ", ".join(profile.value for profile in MACHINES)
            yield FieldError(
                "spec.hardware.efaPerGPU",
                "profile `none` has no EFA devices",
                f"Set spec.hardware.profile to one of {names}, or remove it",
            )
        return
    for role in Role:
        count = derived.gpus(spec, role)
        path = f"spec.{role}.gpus"
        if count > node.gpus:
            yield FieldError(
                path,
                f"{count} GPUs are more than the {node.gpus} of one {hardware.profile} node",
                "A pod cannot span nodes: use fewer GPUs",
            )
        elif count * derived.efa_per_gpu(spec) > node.efa:
            yield FieldError(
                "spec.hardware.efaPerGPU",
                f"{count} GPUs of {role} with {derived.efa_per_gpu(spec)} EFA devices each "
                f"need more than the {node.efa} of one {hardware.profile} node",
                f"Use at most {node.efa // count}",
            )


def _parallelism(spec: DisaggregatedModelSpec) -> Iterator[FieldError]:
    prefill, decode = spec.prefill.tensor_parallel_size, spec.decode.tensor_parallel_size
    if prefill > decode and not spec.transfer.multi_head_latent_attention:
        yield FieldError(
            "spec.prefill.tensorParallelSize",
            f"{prefill} is more than decode's {decode}, which decode cannot receive",
            f"Use at most {decode}, or set spec.transfer.multiHeadLatentAttention for a model that has it",
        )
    larger, smaller = max(prefill, decode), min(prefill, decode)
    if larger % smaller:
        yield FieldError(
            "spec.decode.tensorParallelSize",
            f"{decode} and prefill's {prefill} do not divide evenly",
            "Make one a multiple of the other",
        )


def _role(spec: DisaggregatedModelSpec, role: Role) -> Iterator[FieldError]:
    count, parallel = derived.gpus(spec, role), spec.role(role).tensor_parallel_size
    if 0 < count < parallel:
        yield FieldError(
            f"spec.{role}.gpus",
            f"{count} GPUs cannot hold tensorParallelSize {parallel}",
            f"Use at least {parallel}, or 0 to run on the CPU",
        )


def ratio_value(text: str) -> Fraction:
    """`prefill:decode` as a number."""
    prefill, decode = text.split(":")
    return Fraction(int(prefill), int(decode))


def _ratio(spec: DisaggregatedModelSpec) -> Iterator[FieldError]:
    ratio = spec.scaling.ratio
    if ratio.min is not None and ratio.max is not None and ratio_value(ratio.min) > ratio_value(ratio.max):
        yield FieldError(
            "spec.scaling.ratio.min",
            f"{ratio.min} is more than max {ratio.max}",
            "Exchange the two, or widen the range",
        )
    prefill, decode = spec.prefill.replicas, spec.decode.replicas
    if not prefill or not decode:
        return
    actual = Fraction(prefill, decode)
    if (ratio.min is not None and actual < ratio_value(ratio.min)) or (
        ratio.max is not None and actual > ratio_value(ratio.max)
    ):
        yield FieldError(
            "spec.scaling.ratio",
            f"replicas {prefill}:{decode} are outside of it",
            "Change replicas, or widen the range",
        )


def bytes_of(quantity: str) -> int:
    """A checked quantity in whole bytes."""
    value: Decimal = quantity_value(quantity)
    return int(value)
