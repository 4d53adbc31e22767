"""`make cluster` and `make cluster-down`: a real one-node Kubernetes on this machine, with the chart installed.

    python -m hack.cluster up      start it (root on Linux); prints three commands to try
    python -m hack.cluster down    end it and remove everything of it

It is the cluster of the node tests, except that it outlives the command that started it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hack.kube.binaries import locate
from hack.kube.binaries import main as build_binaries
from prebook_operator.local.models import ModelError, ensure_model
from tests.kube.cluster import ClusterOptions, RealCluster, tear_down
from tests.kube.controlplane import ControlPlane
from tests.kube.engine_image import ENGINE_IMAGE
from tests.kube.node import missing_requirements
from tests.kube.nodenet import NodeSetupFailed
from tests.kube.processes import ProcessFailed
from tests.kube.release import install_chart, operator_image

MODEL_FOLDER = "smollm2-135m-instruct"  # as examples/smollm2-cpu.yaml names it
QUESTION = (
    '{"model": "smollm2", "temperature": 0, '
    '"messages": [{"role": "user", "content": "What is the capital of France?"}]}'
)


def state_folder() -> Path:
    """Where the cluster lives: $XDG_CACHE_HOME/prebook/cluster."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "prebook" / "cluster"


def write_kubectl(control_plane: ControlPlane) -> Path:
    """A kubectl that talks to this cluster, whatever else is on the user's PATH or in their kubeconfig."""
    path = control_plane.folder / "kubectl"
    config, program = shlex.quote(str(control_plane.kubeconfig)), shlex.quote(str(locate("kubectl")))
    path.write_text(f'#!/bin/sh\nexec {program} --kubeconfig={config} "$@"\n')
    path.chmod(0o755)
    return path


def commands(kubectl: Path) -> list[str]:
    """The three commands to try: apply, get, chat."""
    call = shlex.quote(str(kubectl))
    chat = f"run chat --quiet --rm -i --restart=Never --image={ENGINE_IMAGE} --"
    curl = f"curl -sS http://smollm2:8000/v1/chat/completions -H content-type:application/json -d '{QUESTION}'"
    return [
        f"{call} apply -f examples/smollm2-cpu.yaml",
        f"{call} wait dm/smollm2 --for=condition=Ready --timeout=10m && {call} get dm",
        f"{call} {chat} {curl}",
    ]


def up() -> int:
    """Start the cluster and install the chart; returns the exit status."""
    folder, started = state_folder(), time.monotonic()

    def say(line: str) -> None:
        print(f"cluster: {line}", flush=True)

    if folder.exists():
        print(f"a cluster is there already ({folder}): `make cluster-down` removes it", file=sys.stderr)
        return 1
    if reasons := missing_requirements():
        print("\n".join(reasons), file=sys.stderr)
        return 1
    if status := build_binaries([]):
        return status
    say("model")
    models = {MODEL_FOLDER: ensure_model("smollm2", progress=say)}
    say("operator image")
    options = ClusterOptions(models=models, images=(operator_image(),), watched=False)
    cluster = RealCluster(options, folder=folder, say=say)
    cluster.start()
    try:
        install_chart(cluster.control_plane)
    except ProcessFailed:
        say(f"the chart could not be installed; the cluster stays for a look: {write_kubectl(cluster.control_plane)}")
        raise
    kubectl = write_kubectl(cluster.control_plane)
    say(f"chart installed ({time.monotonic() - started:.0f} s)")
    print("\nTry (from this folder):\n\n" + "\n\n".join(f"  {command}" for command in commands(kubectl)))
    print("\nThe first answer needs a minute or two: two engines start. `make cluster-down` removes everything.")
    return 0


def down() -> int:
    """End the cluster; returns the exit status."""
    folder = state_folder()
    if not folder.exists():
        print("cluster: there is none")
        return 0
    tear_down(folder)
    print("cluster: gone")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="A real one-node Kubernetes on this machine, with Prebook installed.")
    parser.add_argument("action", choices=["up", "down"])
    try:
        return up() if parser.parse_args(argv).action == "up" else down()
    except (ModelError, NodeSetupFailed, ProcessFailed, TimeoutError, subprocess.CalledProcessError) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
