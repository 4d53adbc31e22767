"""Volumes of an engine's pod and where they are mounted."""

from __future__ import annotations

from typing import Final

from prebook_operator.api import derived
from prebook_operator.api.pod_template import Volume
from prebook_operator.api.resources import DisaggregatedModel
from prebook_operator.api.spec import Role
from prebook_operator.render.names import (
    CACHE_DIR,
    CONTROL_DIR,
    HOME_DIR,
    LIB_DIR,
    MODEL_DIR,
    TOKEN_DIR,
    secret_name,
)
from prebook_operator.render.types import Manifest, without_empty

LIB_VOLUME: Final = "prebook-lib"
SHM_WITH_GPUS: Final = "20Gi"
SHM_WITHOUT_GPUS: Final = "2Gi"


def volumes(model: DisaggregatedModel, role: Role) -> list[Manifest]:
    """Prebook's volumes, then those of the role's template."""
    own: list[Manifest] = [
        {"name": LIB_VOLUME, "emptyDir": {}},
        {"name": "prebook-run", "emptyDir": {}},
        {"name": "prebook-home", "emptyDir": {}},
        {"name": "prebook-token", "secret": {"secretName": secret_name(model), "defaultMode": 0o440}},
        {"name": "prebook-shm", "emptyDir": {"medium": "Memory", "sizeLimit": _shared_memory(model, role)}},
        {"name": "prebook-cache", **_cache(model)},
    ]
    claim = _model_claim(model)
    if claim is not None:
        own.append({"name": "prebook-model", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}})
    return [*own, *(_user_volume(volume) for volume in model.spec.role(role).template.pod.volumes)]


def volume_mounts(model: DisaggregatedModel, role: Role) -> list[Manifest]:
    """Mounts of the engine container."""
    own: list[Manifest] = [
        {"name": LIB_VOLUME, "mountPath": LIB_DIR, "readOnly": True},
        {"name": "prebook-run", "mountPath": CONTROL_DIR},
        {"name": "prebook-home", "mountPath": HOME_DIR},
        {"name": "prebook-token", "mountPath": TOKEN_DIR, "readOnly": True},
        {"name": "prebook-shm", "mountPath": "/dev/shm"},
        {"name": "prebook-cache", "mountPath": CACHE_DIR},
    ]
    if _model_claim(model) is not None:
        own.append({"name": "prebook-model", "mountPath": MODEL_DIR, "readOnly": True})
    mounts = model.spec.role(role).template.engine.volume_mounts
    return [
        *own,
        *(
            without_empty(
                name=mount.name, mountPath=mount.mount_path, subPath=mount.sub_path, readOnly=mount.read_only or None
            )
            for mount in mounts
        ),
    ]


def _shared_memory(model: DisaggregatedModel, role: Role) -> str:
    given = model.spec.engine.shared_memory
    if given is not None:
        return given
    return SHM_WITH_GPUS if derived.gpus(model.spec, role) > 0 else SHM_WITHOUT_GPUS


def _cache(model: DisaggregatedModel) -> Manifest:
    cache = model.spec.model.cache
    if cache.persistent_volume_claim is not None:
        return {"persistentVolumeClaim": {"claimName": cache.persistent_volume_claim}}
    if cache.host_path is not None:
        return {"hostPath": {"path": cache.host_path, "type": "DirectoryOrCreate"}}
    return {"emptyDir": without_empty(sizeLimit=cache.empty_dir.size_limit if cache.empty_dir else None)}


def _model_claim(model: DisaggregatedModel) -> str | None:
    scheme, _, rest = model.spec.model.uri.partition("://")
    return rest.partition("/")[0] if scheme == "pvc" else None


def _user_volume(volume: Volume) -> Manifest:
    made: Manifest = {"name": volume.name}
    if volume.empty_dir is not None:
        made["emptyDir"] = without_empty(
            medium=volume.empty_dir.medium.value or None, sizeLimit=volume.empty_dir.size_limit
        )
    if volume.persistent_volume_claim is not None:
        claim = volume.persistent_volume_claim
        made["persistentVolumeClaim"] = without_empty(claimName=claim.claim_name, readOnly=claim.read_only or None)
    if volume.config_map is not None:
        made["configMap"] = without_empty(name=volume.config_map.name, optional=volume.config_map.optional or None)
    if volume.secret is not None:
        made["secret"] = without_empty(secretName=volume.secret.secret_name, optional=volume.secret.optional or None)
    if volume.host_path is not None:
        made["hostPath"] = {"path": volume.host_path.path, "type": "Directory"}
    return made
