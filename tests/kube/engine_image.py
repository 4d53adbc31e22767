"""The engine image of the node tests: vLLM for CPUs, NIXL and a small chat model, as this machine has them.

The environment is 6.5 GB. A layer of that size would be written four times (tar, content store, unpacked, page cache)
for every cluster. So the image that is imported has a skeleton as its only layer, and the unpacked layer in
containerd's snapshot folder is then filled with hard links: seconds, and no disk. For kubelet and for pods it is an
image like any other: read-only below, each container writing to an upper layer of its own, so that nothing can change
this machine's files through it.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

from tests.kube.images import ImageConfig, Tree, link_tree, skeleton_image
from tests.kube.node import RealNode
from tests.kube.nodenet import NodeSetupFailed

ENGINE_IMAGE = "localhost/prebook-engine:cpu"
ENVIRONMENT = Path("/opt/engine")
MODELS = Path("/models")
# What the environment's programs and libraries link to, and the few tools that a person expects in a pod.
SYSTEM_TREES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/bin", "/etc/ssl")


def engine_trees(models: dict[str, Path]) -> list[Tree]:
    """What the image holds: the running interpreter's environment, its Python, system libraries, and models by name.

    Our own packages are left out: pods get the connector from the operator's image, or not at all.
    """
    ours = frozenset({"prebook", *(path.name for path in _site_packages().glob("*prebook*"))})
    return [
        Tree(Path(sys.prefix), ENVIRONMENT, skip=ours),
        Tree(Path(sys.base_prefix), Path(sys.base_prefix), skip=frozenset({"test", "idlelib"})),
        *(Tree(Path(path), Path(path)) for path in SYSTEM_TREES),
        *(Tree(path, MODELS / name) for name, path in models.items()),
    ]


def install_engine_image(node: RealNode, models: dict[str, Path], *, tag: str = ENGINE_IMAGE) -> None:
    """Make the image on the node. `models` maps names below /models to folders of this machine."""
    config = ImageConfig(
        tag,
        command=["python3"],
        env={
            "PATH": f"{ENVIRONMENT}/bin:/usr/bin",
            "HOME": "/home/nonroot",
            # Debian's CPU engine finds its OpenMP runtime and NIXL's plugins by itself; nothing is to be fetched from
            # anywhere.
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        },
    )
    archive = skeleton_image(node.folder / "engine.tar", config)
    node.import_image(archive)
    root = layer_folder(node, tag)
    for tree in engine_trees(models):
        link_tree(tree, root)


def layer_folder(node: RealNode, tag: str) -> Path:
    """The folder with the unpacked layer of a one-layer image. NodeSetupFailed: containerd says otherwise."""
    manifest = json.loads(node.ctr("content", "get", _digest(node, tag)))
    description = json.loads(node.ctr("content", "get", manifest["config"]["digest"]))
    (layer,) = description["rootfs"]["diff_ids"]
    # Where a snapshot lies is containerd's own business, but a view of it has to name its source.
    view = "prebook-layer"
    node.ctr("snapshots", "view", view, layer)
    try:
        mount = shlex.split(node.ctr("snapshots", "mounts", "/nowhere", view))
    finally:
        node.ctr("snapshots", "remove", view)
    folder = Path(mount[mount.index("-t") + 2])
    if not folder.is_relative_to(node.folder):
        raise NodeSetupFailed(f"containerd keeps {tag} in {folder}, which is not below {node.folder}")
    return folder


def _digest(node: RealNode, tag: str) -> str:
    for line in node.ctr("images", "list").splitlines():
        words = line.split()
        if words and words[0] == tag:
            return next(word for word in words if word.startswith("sha256:"))
    raise NodeSetupFailed(f"{tag} was not imported")


def _site_packages() -> Path:
    return Path(sys.prefix) / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
