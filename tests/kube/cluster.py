"""A whole cluster on this machine: control plane, one real node, and the images that the node tests need."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.kube import nodenet
from tests.kube.controlplane import ControlPlane, Options
from tests.kube.engine_image import install_engine_image
from tests.kube.node import NODE_NAME, RealNode
from tests.kube.processes import ProcessSet

Progress = Callable[[str], None]


@dataclass(frozen=True)
class ClusterOptions:
    """What a cluster is made of.

    `models` become folders below /models in the engine image; no engine image without one. `images` are archives to
    import.
    """

    models: dict[str, Path] = field(default_factory=dict)
    images: tuple[Path, ...] = ()
    audit: bool = False
    watched: bool = True


def silent(_: str) -> None:
    """Progress for those who want none."""


class RealCluster:
    """A control plane with one real node. Use as a context manager, or `start()` and `stop()`."""

    def __init__(
        self, options: ClusterOptions | None = None, *, folder: Path | None = None, say: Progress = silent
    ) -> None:
        self.options = options or ClusterOptions()
        self.network = nodenet.free_network()
        # A real kubelet sends heartbeats, so every controller may run. Its node is not ready at first, and the taint
        # that says so has to be taken away again by the node-lifecycle controller.
        settings = Options(advertise=self.network.host, controllers=("*",), audit=self.options.audit)
        self.control_plane = ControlPlane(settings, folder=folder, watched=self.options.watched)
        self.node = RealNode(
            self.control_plane,
            self.network,
            node_token=self.control_plane.add_token(f"system:node:{NODE_NAME}", group="system:nodes"),
            proxy_token=self.control_plane.add_token("system:kube-proxy", group="system:node-proxiers"),
        )
        self._say = say

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start everything; when this returns, the node is Ready and has its images."""
        started = time.monotonic()

        def done(what: str) -> None:
            self._say(f"{what} ({time.monotonic() - started:.0f} s)")

        try:
            self.node.prepare()
            self.control_plane.start()
            done("control plane ready")
            self.node.start()
            done("node ready")
            for archive in self.options.images:
                self.node.import_image(archive)
                done(f"image {archive.name} imported")
            if self.options.models:
                install_engine_image(self.node, self.options.models)
                done("engine image ready")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End everything and leave nothing: processes, mounts, network, control groups, files."""
        self.node.stop()
        self.control_plane.processes.stop_all()
        nodenet.clean_up(self.control_plane.folder)
        self.control_plane.stop()


def tear_down(folder: Path) -> None:
    """End the cluster of a folder, whoever started it, and remove what it left. Nothing to do is fine."""
    if not folder.exists():
        return
    processes = ProcessSet(folder)
    if any(running.name == "node" for running in processes.all()):
        processes.stop("node")
    processes.stop_all()
    nodenet.clean_up(folder)
    if not os.environ.get("PREBOOK_KEEP_CLUSTER"):
        shutil.rmtree(folder)
