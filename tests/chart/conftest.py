"""Fixtures of the chart tests: Helm, and a control plane of their own (a release owns the CRDs of a whole cluster)."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from hack.kube.binaries import locate
from tests.chart.helm import Helm
from tests.kube.controlplane import ControlPlane, Options
from tests.kube.fakenodes import FakeKubelet
from tests.kube.fixtures import CONTROL_PLANE_PROGRAMS, new_namespace, require_binaries

CRDS = ("disaggregatedmodels.prebook.dev", "modelroles.prebook.dev")


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Helm 4 without a cluster."""
    require_binaries("helm")
    return Helm(locate("helm"), tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="session")
def cluster(helm: Helm) -> Iterator[ControlPlane]:
    """A real control plane for Helm releases, shared by the chart tests."""
    require_binaries(*CONTROL_PLANE_PROGRAMS)
    with ControlPlane(Options(audit=True)) as running:
        yield running


@pytest.fixture
def home(cluster: ControlPlane, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace for one release; release, CRDs and cluster-wide objects are gone afterwards, as they were before."""
    name = new_namespace(cluster, request.node.name.removeprefix("test_"))
    yield name
    for release in json.loads(cluster.helm("list", "--all-namespaces", "--output", "json")):
        cluster.helm("uninstall", release["name"], "--namespace", release["namespace"])
    cluster.kubectl("delete", "crd", "--ignore-not-found", "--timeout=60s", *CRDS)
    FakeKubelet(cluster.api, name).finish_deletions()
    cluster.api.delete(f"/api/v1/namespaces/{name}")
