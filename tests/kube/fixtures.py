"""Pytest fixtures: one control plane a session, one namespace a test.

Enable them with `pytest_plugins = ["tests.kube.fixtures"]` in the root conftest.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator

import pytest

from hack.kube.binaries import BinaryMissing, locate
from tests.kube.controlplane import ControlPlane, Options
from tests.kube.fakenodes import FakeKubelet, remove_nodes

CONTROL_PLANE_PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")


def require_binaries(*names: str) -> None:
    """Skip where programs are not built; fail when PREBOOK_REQUIRE_KUBE says that they must be there."""
    try:
        for name in names:
            locate(name)
    except BinaryMissing as error:
        if os.environ.get("PREBOOK_REQUIRE_KUBE"):
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))


def new_namespace(control_plane: ControlPlane, hint: str = "test") -> str:
    """Create a namespace with a fresh name that shows what it is for."""
    stem = re.sub(r"[^a-z0-9]+", "-", hint.lower()).strip("-")[:40].rstrip("-") or "test"
    name = f"{stem}-{secrets.token_hex(3)}"
    control_plane.api.create(
        "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    )
    return name


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """A real control plane with an audit log, shared by the session."""
    require_binaries(*CONTROL_PLANE_PROGRAMS)
    with ControlPlane(Options(audit=True)) as running:
        yield running


@pytest.fixture
def namespace(control_plane: ControlPlane, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of the test's own; it is deleted afterwards, without waiting for its end."""
    name = new_namespace(control_plane, request.node.name.removeprefix("test_"))
    yield name
    FakeKubelet(control_plane.api, name).finish_deletions()
    control_plane.api.delete(f"/api/v1/namespaces/{name}")


@pytest.fixture
def fake_kubelet(control_plane: ControlPlane, namespace: str) -> FakeKubelet:
    """Writes pod status in the test's namespace."""
    return FakeKubelet(control_plane.api, namespace)


@pytest.fixture
def fake_nodes(control_plane: ControlPlane) -> Iterator[ControlPlane]:
    """The control plane, with all nodes that the test adds removed afterwards."""
    yield control_plane
    remove_nodes(control_plane.api)
