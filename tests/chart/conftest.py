"""Fixtures of the chart tests: Helm, and a control plane of their own (a release owns the CRDs of a whole cluster)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import pytest

from hack.kube.binaries import locate
from tests.chart.helm import Helm
from tests.kube.controlplane import ControlPlane, Options
from tests.kube.fakenodes import FakeKubelet
from tests.kube.fixtures import CONTROL_PLANE_PROGRAMS, new_namespace, require_binaries
from tests.kube.processes import ProcessFailed

CRDS = ("disaggregatedmodels.prebook.dev", "modelroles.prebook.dev")


def delete_crds(cluster: ControlPlane) -> None:
    """Deletes the CRDs and waits for their end.

    The server's own finalizer backs off exponentially when it meets a CRD that was deleted within moments of its
    creation, up to minutes; any change of the object has it look again at once.
    """
    for attempt in range(12):
        try:
            cluster.kubectl("delete", "crd", "--ignore-not-found", "--timeout=10s", *CRDS)
            return
        except ProcessFailed:
            for name in CRDS:
                with contextlib.suppress(ProcessFailed):
                    cluster.kubectl("annotate", "--overwrite", "crd", name, f"test.prebook.dev/look-again={attempt}")
    raise ProcessFailed("the CRDs did not go within two minutes")


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
    delete_crds(cluster)
    FakeKubelet(cluster.api, name).finish_deletions()
    cluster.api.delete(f"/api/v1/namespaces/{name}")
