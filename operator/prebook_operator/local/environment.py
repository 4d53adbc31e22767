"""The environment of a container: what the image would give, what the pod spec gives, and the downward API. Pure but
for the machine's own variables, which the caller passes in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from prebook_operator.local.errors import UserError
from prebook_operator.local.expand import expand_references
from prebook_operator.local.kube import Container, EnvSource, KeyRef
from prebook_operator.local.workload import PodPlan, Workload

# What a process of this machine needs to work at all. Everything else of the user's shell stays out, as it would in
# a container.
_INHERITED = re.compile(
    r"^(PATH|HOME|USER|LOGNAME|LANG|LC_\w+|TZ|TMPDIR|LD_LIBRARY_PATH|LD_PRELOAD|VIRTUAL_ENV|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE"
    r"|https?_proxy|HTTPS?_PROXY|no_proxy|NO_PROXY|HF_HOME|HF_ENDPOINT|XDG_CACHE_HOME|CUDA_HOME)$"
)
# What only matters on a developer's machine; a variable of the pod spec wins over these.
_LOCAL_DEFAULTS = {"PYTHONUNBUFFERED": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
_FIELD_WITH_KEY = re.compile(r"^metadata\.(labels|annotations)\['([^']+)'\]$")


@dataclass(frozen=True)
class PodFacts:
    """What the downward API can say about a pod."""

    pod: PodPlan
    ip: str
    node: str


def field_value(path: str, *, facts: PodFacts) -> str:
    """The value of a downward-API field; raises ``UserError`` for one that has none here."""
    pod = facts.pod
    simple = {
        "metadata.name": pod.name,
        "metadata.namespace": pod.namespace,
        "metadata.uid": pod.uid,
        "status.podIP": facts.ip,
        "status.podIPs": facts.ip,
        "status.hostIP": "127.0.0.1",
        "status.hostIPs": "127.0.0.1",
        "spec.nodeName": facts.node,
        "spec.serviceAccountName": pod.spec.service_account_name,
    }
    if path in simple:
        return simple[path]
    match = _FIELD_WITH_KEY.match(path)
    if match:
        return (pod.labels if match.group(1) == "labels" else pod.annotations).get(match.group(2), "")
    if path in {"metadata.labels", "metadata.annotations"}:
        values = pod.labels if path == "metadata.labels" else pod.annotations
        return "\n".join(f'{key}="{value}"' for key, value in sorted(values.items()))
    raise UserError(f"pod {pod.name}: the downward-API field {path!r} is not supported by the local runner")


def container_environment(
    container: Container, *, facts: PodFacts, workload: Workload, machine: Mapping[str, str], extra: Mapping[str, str]
) -> dict[str, str]:
    """Everything the container's process sees.

    ``machine`` is the runner's own environment, of which only the basics are passed on; ``extra`` is what the runner
    adds (offline switches, GPU choice). Order of precedence: pod spec, extra, defaults of this module, machine.
    Raises ``UserError`` for a missing Secret or ConfigMap.
    """
    inherited = {name: value for name, value in machine.items() if _INHERITED.match(name)}
    declared: dict[str, str] = {}
    for source in container.env_from:
        for reference, store, kind in (
            (source.secret_ref, workload.secrets, "Secret"),
            (source.config_map_ref, workload.config_maps, "ConfigMap"),
        ):
            if reference is None:
                continue
            if reference.name not in store and not reference.optional:
                raise _missing(kind=kind, name=reference.name, key="", pod=facts.pod.name)
            for key, value in store.get(reference.name, {}).items():
                declared[source.prefix + key] = value.decode()
    for variable in container.env:
        if variable.value_from is None:
            declared[variable.name] = expand_references(variable.value or "", variables=declared)
            continue
        value_here = _source_value(variable.value_from, facts=facts, workload=workload)
        if value_here is not None:
            declared[variable.name] = value_here
    return {**inherited, **_LOCAL_DEFAULTS, "HOSTNAME": facts.pod.name, **extra, **declared}


def _source_value(source: EnvSource, *, facts: PodFacts, workload: Workload) -> str | None:
    if source.field_ref is not None:
        return field_value(source.field_ref.field_path, facts=facts)
    if source.secret_key_ref is not None:
        return _key(source.secret_key_ref, store=workload.secrets, kind="Secret", pod=facts.pod.name)
    if source.config_map_key_ref is not None:
        return _key(source.config_map_key_ref, store=workload.config_maps, kind="ConfigMap", pod=facts.pod.name)
    return None


def _key(ref: KeyRef, *, store: Mapping[str, Mapping[str, bytes]], kind: str, pod: str) -> str | None:
    value = store.get(ref.name, {}).get(ref.key)
    if value is not None:
        return value.decode()
    if ref.optional:
        return None
    raise _missing(kind=kind, name=ref.name, key=ref.key, pod=pod)


def _missing(*, kind: str, name: str, key: str, pod: str) -> UserError:
    what = f"{kind} {name}" + (f" with key {key!r}" if key else "")
    return UserError(
        f"pod {pod} needs {what}, which the file does not hold",
        remedy=f"add the {kind} as another YAML document of the file",
    )
