"""FabricReady names the node, the count and the remedy."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prebook_operator.api import DisaggregatedModelSpec, Reason, load
from prebook_operator.fabric import assess
from prebook_operator.records import NodeRecord, node_record
from tests.model_documents import changed, minimal, p5en

GPU, EFA = "nvidia.com/gpu", "vpc.amazonaws.com/efa"


def spec(**changes: Any) -> DisaggregatedModelSpec:
    return load(changed(p5en(), {path.replace("__", "/"): value for path, value in changes.items()})).spec


def node(name: str = "n1", *, gpu: int = 8, efa: int = 16, zone: str = "a", **labels: str) -> NodeRecord:
    carried = {"node.kubernetes.io/instance-type": "p5en.48xlarge", "topology.kubernetes.io/zone": zone, **labels}
    return NodeRecord(
        name=name,
        version=1,
        ready=True,
        schedulable=True,
        zone=zone,
        labels=tuple(sorted(carried.items())),
        devices=((GPU, gpu), (EFA, efa)),
    )


def test_enough_in_one_zone() -> None:
    verdict = assess(spec(), [node(), node("n2")])
    assert (verdict.ready, verdict.reason) == (True, Reason.FABRIC_AVAILABLE)


def test_without_a_fabric_nothing_is_asked_for() -> None:
    assert assess(load(minimal()).spec, None).reason is Reason.FABRIC_NOT_NEEDED


def test_without_the_right_to_read_nodes_it_is_unknown() -> None:
    verdict = assess(spec(), None)
    assert verdict.ready is None
    assert "rbac.nodeReader=Always" in verdict.message


@pytest.mark.parametrize(
    ("nodes", "reason", "says"),
    [
        ([], Reason.NO_MATCHING_NODES, "node.kubernetes.io/instance-type=p5en.48xlarge"),
        ([node(efa=0)], Reason.TOO_FEW_EFA_DEVICES, "needs 8 vpc.amazonaws.com/efa, and n1 advertise 0 at most"),
        ([node(efa=4)], Reason.TOO_FEW_EFA_DEVICES, "install the EFA device plugin"),
        ([node(gpu=2)], Reason.TOO_FEW_GPUS, "NVIDIA device plugin"),
    ],
)
def test_what_is_missing_is_named_with_a_remedy(nodes: list[NodeRecord], reason: Reason, says: str) -> None:
    verdict = assess(spec(), nodes)
    assert (verdict.ready, verdict.reason) == (False, reason)
    assert says in verdict.message


def test_cordoned_nodes_are_named() -> None:
    from dataclasses import replace

    verdict = assess(spec(), [replace(node(), schedulable=False)])
    assert verdict.ready is False
    assert "n1" in verdict.message
    assert "cordoned" in verdict.message


def test_efa_cannot_leave_a_zone() -> None:
    groups = {"spec__hardware__nodeGroups": {"prefill": "p", "decode": "d"}}
    label = "eks.amazonaws.com/nodegroup"
    apart = [node("n1", zone="a", **{label: "p"}), node("n2", zone="b", **{label: "d"})]
    verdict = assess(spec(**groups), apart)
    assert (verdict.ready, verdict.reason) == (False, Reason.ZONES_DIFFER)
    assert "prefill fits in a, decode in b" in verdict.message
    together = [node("n1", zone="a", **{label: "p"}), node("n2", zone="a", **{label: "d"})]
    assert assess(spec(**groups), together).ready is True


def test_claimed_devices_are_not_counted_on_nodes() -> None:
    dra = spec(spec__hardware__devices="DRA")
    assert assess(dra, [node(efa=0)]).ready is True
    assert assess(dra, [node(gpu=0)]).reason is Reason.TOO_FEW_GPUS
    assert assess(
        spec(spec__hardware__devices="DRA", spec__hardware__dra={"gpuDeviceClass": "gpu.nvidia.com"}),
        [node(gpu=0, efa=0)],
    ).ready


@given(
    st.lists(
        st.builds(
            node,
            st.sampled_from(["n1", "n2", "n3"]),
            gpu=st.integers(0, 8),
            efa=st.integers(0, 16),
            zone=st.sampled_from("abc"),
        ),
        max_size=4,
    )
)
def test_ready_exactly_when_one_zone_fits_both_roles(nodes: list[NodeRecord]) -> None:
    fits = any(one.device(GPU) >= 4 and one.device(EFA) >= 8 for one in nodes)
    verdict = assess(spec(), nodes)
    assert verdict.ready is fits
    assert verdict.message


def test_the_record_of_a_node() -> None:
    raw = {
        "metadata": {"name": "n", "resourceVersion": "7", "labels": {"topology.kubernetes.io/zone": "z", "team": "x"}},
        "spec": {"unschedulable": True},
        "status": {
            "allocatable": {"cpu": "192", GPU: "8", EFA: "16"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }
    record = node_record(raw)
    assert (record.ready, record.schedulable, record.zone) == (True, False, "z")
    assert (record.device(GPU), record.device(EFA), record.device("cpu")) == (8, 16, 0)
    assert record.matches({"team": "x"})
    assert not record.matches({"team": "y"})
