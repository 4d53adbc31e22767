"""Fixtures of the operator's tests: CRDs once a session, a World per test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from prebook_operator.api.crd import crds
from tests.apiserver.rig import Engines, World
from tests.kube.controlplane import ControlPlane, wait_for


@pytest.fixture(scope="session")
def prebook_api(control_plane: ControlPlane) -> ControlPlane:
    """The control plane with both kinds served."""
    for crd in crds().values():
        name = crd["metadata"]["name"]
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}"
        control_plane.api.apply(path, crd, manager="test-crd", force=True)

    def served() -> bool:
        document = control_plane.api.get("/openapi/v3/apis/prebook.dev/v1alpha1")
        names = document["components"]["schemas"]
        return all(any(name.endswith(kind) for name in names) for kind in (".DisaggregatedModel", ".ModelRole"))

    wait_for("the kinds to be served", served, seconds=30)
    return control_plane


@pytest.fixture(scope="session")
def engines() -> Iterator[Engines]:
    """One server that answers for all decode pods."""
    made = Engines()
    yield made
    made.close()


@pytest.fixture
def world(prebook_api: ControlPlane, namespace: str, engines: Engines) -> Iterator[World]:
    """A namespace with an operator's rights, and everything that is started in it stopped again."""
    engines.paired(0, 0)
    made = World(prebook_api, namespace, engines)
    yield made
    made.close()
