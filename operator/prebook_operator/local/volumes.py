"""Volumes of a pod as folders of this machine.

Each volume becomes one folder below the run's own folder, except claims and the engines' caches (folders that
outlive the run), host paths (themselves) and a memory volume at /dev/shm (the machine already has one). The caller
rewrites mount paths in commands and variables with what ``prepare_volumes`` returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from prebook_operator.local.environment import PodFacts, field_value
from prebook_operator.local.errors import UserError
from prebook_operator.local.kube import Container, DownwardVolume, HostPath, KeyToPath, Volume
from prebook_operator.local.workload import Workload

# Engine pods' home and download cache: an emptyDir in a cluster, but here they would be filled again by every run.
_KEPT = frozenset({"prebook-home", "prebook-cache"})


def prepare_volumes(*, facts: PodFacts, workload: Workload, folder: Path, claims: Path) -> dict[str, Path]:
    """Creates the folder of every volume of the pod and returns it by volume name. ``claims`` holds the folders of
    persistent claims.

    Raises ``UserError`` when a Secret, ConfigMap or host path is missing.
    """
    return {
        volume.name: _prepare(volume, facts=facts, workload=workload, folder=folder / volume.name, claims=claims)
        for volume in facts.pod.spec.volumes
    }


def mounts_of(container: Container, *, volumes: Mapping[str, Path]) -> dict[str, str]:
    """Mount path → folder for one container; raises ``UserError`` for a mount of an unknown volume."""
    mounts: dict[str, str] = {}
    for mount in container.volume_mounts:
        if mount.name not in volumes:
            raise UserError(f"container {container.name} mounts volume {mount.name!r}, which the pod does not have")
        if mount.mount_path.rstrip("/") == "/dev/shm":
            continue
        target = volumes[mount.name] / _inside(mount.sub_path, what=f"subPath of {mount.name}")
        if not target.exists():
            target.mkdir(parents=True)
        mounts[mount.mount_path] = str(target)
    return mounts


def _prepare(volume: Volume, *, facts: PodFacts, workload: Workload, folder: Path, claims: Path) -> Path:
    pod = facts.pod.name
    if volume.persistent_volume_claim is not None:
        claim = claims / volume.persistent_volume_claim.claim_name
        claim.mkdir(parents=True, exist_ok=True)
        return claim
    if volume.host_path is not None:
        return _host_path(volume.host_path, pod=pod)
    if volume.name in _KEPT and volume.empty_dir is not None:
        kept = claims / volume.name
        kept.mkdir(parents=True, exist_ok=True)
        return kept
    folder.mkdir(parents=True, exist_ok=True)
    if volume.secret is not None:
        source = volume.secret
        _write_keys(
            folder,
            data=workload.secrets.get(source.secret_name),
            items=source.items,
            optional=source.optional,
            what=f"pod {pod} needs Secret {source.secret_name}",
        )
    elif volume.config_map is not None:
        named = volume.config_map
        _write_keys(
            folder,
            data=workload.config_maps.get(named.name),
            items=named.items,
            optional=named.optional,
            what=f"pod {pod} needs ConfigMap {named.name}",
        )
    elif volume.downward_api is not None:
        _write_fields(folder, source=volume.downward_api, facts=facts)
    elif volume.projected is not None:
        for part in volume.projected.sources:
            if part.secret is not None:
                _write_keys(
                    folder,
                    data=workload.secrets.get(part.secret.name),
                    items=part.secret.items,
                    optional=part.secret.optional,
                    what=f"pod {pod} needs Secret {part.secret.name}",
                )
            if part.config_map is not None:
                _write_keys(
                    folder,
                    data=workload.config_maps.get(part.config_map.name),
                    items=part.config_map.items,
                    optional=part.config_map.optional,
                    what=f"pod {pod} needs ConfigMap {part.config_map.name}",
                )
            if part.downward_api is not None:
                _write_fields(folder, source=part.downward_api, facts=facts)
    return folder


def _host_path(source: HostPath, *, pod: str) -> Path:
    path = Path(source.path)
    if source.type == "DirectoryOrCreate":
        path.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        raise UserError(
            f"pod {pod} mounts the host path {path}, which does not exist", remedy="create it, or change the file"
        )
    return path


def _write_keys(
    folder: Path, *, data: Mapping[str, bytes] | None, items: list[KeyToPath] | None, optional: bool, what: str
) -> None:
    if data is None:
        if optional:
            return
        raise UserError(f"{what}, which the file does not hold", remedy="add it as another YAML document of the file")
    wanted = {item.key: item.path for item in items} if items is not None else {key: key for key in data}
    for key, path in wanted.items():
        if key not in data:
            if optional:
                continue
            raise UserError(f"{what} with the key {key!r}")
        _write(folder / _inside(path, what=what), data[key])


def _write_fields(folder: Path, *, source: DownwardVolume, facts: PodFacts) -> None:
    for item in source.items:
        value = field_value(item.field_ref.field_path, facts=facts)
        _write(folder / _inside(item.path, what=f"downward API of pod {facts.pod.name}"), value.encode())


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(content)


def _inside(path: str, *, what: str) -> PurePosixPath:
    """``path`` as a relative path that cannot leave its volume."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts:
        raise UserError(f"{what}: the path {path!r} leaves its volume")
    return pure
