"""Container images without a registry: docker-archives written by hand, and file trees of what this machine has.

`ctr images import` and `buildah` read the archives. The tree of the engine image is not archived at all (see docs/adr
on the node tests).
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

USER = 65532  # the conventional "nonroot" user of distroless images
PASSWD = f"root:x:0:0:root:/root:/sbin/nologin\nnonroot:x:{USER}:{USER}:nonroot:/home/nonroot:/sbin/nologin\n"
GROUP = f"root:x:0:\nnonroot:x:{USER}:\n"


@dataclass(frozen=True)
class ImageConfig:
    """What an image says about itself."""

    tag: str
    entrypoint: Sequence[str] = ()
    command: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    user: str = str(USER)
    working_dir: str = "/"


def write_archive(target: Path, config: ImageConfig, fill: Callable[[tarfile.TarFile], None]) -> Path:
    """Write a docker-archive with one layer; `fill` adds the layer's members. The layer is written twice."""
    layer = target.with_suffix(".layer")
    with tarfile.open(layer, "w", format=tarfile.PAX_FORMAT) as members:
        fill(members)
    with layer.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    description = {
        "architecture": "amd64",
        "os": "linux",
        "config": {
            "Entrypoint": list(config.entrypoint),
            "Cmd": list(config.command),
            "Env": [f"{key}={value}" for key, value in config.env.items()],
            "User": config.user,
            "WorkingDir": config.working_dir,
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [config.tag], "Layers": ["layer.tar"]}]
    with tarfile.open(target, "w") as archive:
        add_text(archive, "manifest.json", json.dumps(manifest))
        add_text(archive, "config.json", json.dumps(description))
        archive.add(layer, "layer.tar")
    layer.unlink()
    return target


def add_text(archive: tarfile.TarFile, name: str, text: str, *, mode: int = 0o644) -> None:
    """Add a file with the given text."""
    member = tarfile.TarInfo(name)
    data = text.encode()
    member.size, member.mode = len(data), mode
    archive.addfile(member, io.BytesIO(data))


def add_directory(archive: tarfile.TarFile, name: str, *, mode: int = 0o755, user: int = 0) -> None:
    """Add an empty directory."""
    member = tarfile.TarInfo(name)
    member.type, member.mode, member.uid, member.gid = tarfile.DIRTYPE, mode, user, user
    archive.addfile(member)


def add_symlink(archive: tarfile.TarFile, name: str, to: str) -> None:
    """Add a symbolic link."""
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, to
    archive.addfile(member)


def add_skeleton(archive: tarfile.TarFile) -> None:
    """Add what every root file system has: users, a home, /tmp, and Debian's merged-/usr links."""
    for name in ("etc", "usr", "usr/bin", "usr/lib", "usr/lib64", "proc", "sys", "dev", "run", "var", "home", "root"):
        add_directory(archive, name)
    add_directory(archive, "home/nonroot", user=USER)
    add_directory(archive, "tmp", mode=0o1777)
    add_directory(archive, "var/tmp", mode=0o1777)
    for name in ("bin", "lib", "lib64"):
        add_symlink(archive, name, f"usr/{name}")
    add_text(archive, "etc/passwd", PASSWD)
    add_text(archive, "etc/group", GROUP)


def pause_image(target: Path, program: Path, *, tag: str) -> Path:
    """The image of a pod's sandbox: one static program."""

    def fill(archive: tarfile.TarFile) -> None:
        archive.add(program, "pause")

    return write_archive(target, ImageConfig(tag, entrypoint=["/pause"]), fill)


def skeleton_image(target: Path, config: ImageConfig) -> Path:
    """An image with the skeleton alone."""
    return write_archive(target, config, add_skeleton)


@dataclass(frozen=True)
class Tree:
    """A file or folder of this machine, and where it appears in a container. `skip` are names left out at any depth."""

    source: Path
    target: Path
    skip: frozenset[str] = frozenset()


def link_tree(tree: Tree, root: Path) -> None:
    """Make `tree` appear below `root` with hard links, which cost next to nothing; copies where disks differ."""
    destination = root / tree.target.relative_to("/")
    destination.parent.mkdir(parents=True, exist_ok=True)
    if tree.source.is_file():
        _link(str(tree.source), str(destination))
        return

    def ignore(_folder: str, names: list[str]) -> Iterable[str]:
        return [name for name in names if name in tree.skip]

    shutil.copytree(tree.source, destination, symlinks=True, ignore=ignore, copy_function=_link, dirs_exist_ok=True)


def _link(source: str, destination: str) -> str:
    if os.path.lexists(destination):
        return destination
    try:
        os.link(source, destination, follow_symlinks=False)
    except OSError as error:
        if error.errno not in {errno.EXDEV, errno.EMLINK, errno.EPERM}:
            raise
        shutil.copy2(source, destination, follow_symlinks=False)
    return destination
