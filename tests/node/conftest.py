"""One real cluster for the session: control plane, node, engine image. Namespaces separate the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from prebook_operator.local.models import ensure_model
from tests.kube.cluster import ClusterOptions, RealCluster
from tests.kube.controlplane import ControlPlane, wait_for
from tests.kube.fixtures import new_namespace

MODEL_FOLDER = "smollm2-135m-instruct"  # as examples/smollm2-cpu.yaml names it


@pytest.fixture(scope="session")
def cluster() -> Iterator[RealCluster]:
    """The cluster, with the engine image on its node."""
    options = ClusterOptions(models={MODEL_FOLDER: ensure_model("smollm2")}, audit=True)
    with RealCluster(options, say=print) as running:
        yield running


@pytest.fixture
def pods_namespace(cluster: RealCluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of the test's own whose pods really run; afterwards it is deleted, and its end awaited."""
    name = new_namespace(cluster.control_plane, request.node.name.removeprefix("test_"))
    wait_for("the namespace's service account", lambda: _has_account(cluster.control_plane, name), seconds=30)
    yield name
    cluster.control_plane.api.delete(f"/api/v1/namespaces/{name}")
    path = f"/api/v1/namespaces/{name}"
    wait_for(f"the end of namespace {name}", lambda: not cluster.control_plane.api.exists(path), seconds=180)


def _has_account(control_plane: ControlPlane, namespace: str) -> bool:
    return control_plane.api.exists(f"/api/v1/namespaces/{namespace}/serviceaccounts/default")
