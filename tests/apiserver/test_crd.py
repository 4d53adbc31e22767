"""The CRDs on a real API server: accepted, defaults filled in, wrong objects refused with words that help."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.kube.controlplane import ControlPlane
from tests.kube.rest import ApiError, Json
from tests.model_cases import GOOD, WRONG, Good, Wrong
from tests.model_documents import changed, minimal

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.yaml"))


@pytest.fixture(scope="module")
def server(prebook_api: ControlPlane) -> ControlPlane:
    """The control plane with both CRDs served."""
    return prebook_api


def models(namespace: str) -> str:
    return f"/apis/prebook.dev/v1alpha1/namespaces/{namespace}/disaggregatedmodels"


def roles(namespace: str) -> str:
    return f"/apis/prebook.dev/v1alpha1/namespaces/{namespace}/modelroles"


def refusal(server: ControlPlane, path: str, body: Json) -> dict[str, str]:
    """Field → message of every cause of the refusal."""
    with pytest.raises(ApiError) as caught:
        server.api.create(path, body)
    assert caught.value.status == 422
    return {cause["field"]: cause["message"] for cause in json.loads(caught.value.body)["details"]["causes"]}


@pytest.fixture(scope="module")
def scratch(server: ControlPlane) -> str:
    """A namespace in which nothing is kept: every object of it is only tried."""
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "crd-scratch"}}
    server.api.create("/api/v1/namespaces", body)
    return "crd-scratch"


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.id)
def test_good_models_are_accepted(server: ControlPlane, scratch: str, case: Good) -> None:
    made = server.api.create(f"{models(scratch)}?dryRun=All&fieldValidation=Strict", case.document)
    assert made["metadata"]["name"] == case.document["metadata"]["name"]


@pytest.mark.parametrize("case", [case for case in WRONG if case.cel], ids=lambda case: case.id)
def test_wrong_models_are_refused_with_a_remedy(server: ControlPlane, scratch: str, case: Wrong) -> None:
    found = refusal(server, f"{models(scratch)}?dryRun=All", case.document)
    told = [field for field, message in found.items() if case.expected_from_server in message]
    assert told, found
    # The server counts list elements where `load` names them, and stands at the list where `load` knows the element.
    assert any(case.path.startswith(field.split("[")[0]) for field in told), (case.path, told)


@pytest.mark.parametrize("case", [case for case in WRONG if not case.cel], ids=lambda case: case.id)
def test_what_an_operator_may_allow_is_left_to_it(server: ControlPlane, scratch: str, case: Wrong) -> None:
    server.api.create(f"{models(scratch)}?dryRun=All", case.document)


def _cluster_models() -> list[Json]:
    documents = (document for path in EXAMPLES for document in yaml.safe_load_all(path.read_text()) if document)
    # pkg:// names a model that the local runner prepares; such a file is not meant for a cluster.
    return [
        document
        for document in documents
        if document["kind"] == "DisaggregatedModel" and not document["spec"]["model"]["uri"].startswith("pkg://")
    ]


@pytest.mark.parametrize("document", _cluster_models(), ids=lambda document: document["metadata"]["name"])
def test_examples_are_accepted(server: ControlPlane, scratch: str, document: Json) -> None:
    server.api.create(f"{models(scratch)}?dryRun=All&fieldValidation=Strict", document)


def test_unknown_fields_are_refused(server: ControlPlane, scratch: str) -> None:
    document = changed(minimal(), {"spec/transfer": {"leaseSecond": 3}})
    with pytest.raises(ApiError, match="unknown field") as caught:
        server.api.create(f"{models(scratch)}?dryRun=All&fieldValidation=Strict", document)
    assert caught.value.status == 400


def test_defaults_are_filled_in(server: ControlPlane, namespace: str) -> None:
    spec = server.api.create(models(namespace), minimal())["spec"]
    assert spec["transfer"] == {
        "connector": "Prebook",
        "leaseSeconds": 30,
        "drainSeconds": 60,
        "onFailure": "Recompute",
        "progressive": {"enabled": True, "minBytes": "4Mi", "maxInFlight": 2},
        "firstToken": "Decode",
        "verify": "Off",
        "multiHeadLatentAttention": False,
    }
    assert spec["engine"]["startupTimeoutSeconds"] == 3600
    assert spec["hardware"]["profile"] == "none"
    assert spec["decode"] == {"tensorParallelSize": 1}
    assert spec["networkPolicy"] == {"enabled": True}


def test_defaults_of_the_server_and_of_the_types_are_the_same_model(server: ControlPlane, namespace: str) -> None:
    from prebook_operator.api import load
    from prebook_operator.plan import revision_of

    for index, case in enumerate(GOOD):
        stored = server.api.create(models(namespace), changed(case.document, {"metadata/name": f"m{index}"}))
        ours = load(changed(case.document, {"metadata/name": f"m{index}"}))
        assert load(stored).spec == ours.spec, case.id
        assert revision_of(load(stored)) == revision_of(ours), case.id


def test_a_wrong_change_leaves_the_stored_model_alone(server: ControlPlane, namespace: str) -> None:
    server.api.create(models(namespace), minimal())
    path = f"{models(namespace)}/demo"
    with pytest.raises(ApiError, match="has no EFA devices"):
        server.api.merge(path, {"spec": {"hardware": {"efaPerGPU": 2}}})
    stored = server.api.get(path)
    assert stored["metadata"]["generation"] == 1
    assert "efaPerGPU" not in stored["spec"]["hardware"]


def test_status_is_a_subresource_that_keeps_every_field_of_ours(server: ControlPlane, namespace: str) -> None:
    from prebook_operator.api.conditions import Condition, ConditionStatus
    from prebook_operator.api.resources import DisaggregatedModelStatus, PairStatus, RoleStatus

    created = server.api.create(models(namespace), minimal())
    condition = Condition(
        type="Ready",
        status=ConditionStatus.TRUE,
        reason="Serving",
        message="1 of 1 pairs have shaken hands",
        last_transition_time="2026-01-02T03:04:05Z",
        observed_generation=1,
    )
    status = DisaggregatedModelStatus(
        observed_generation=1,
        revision="0123abcd",
        previous_revision="4567cdef",
        prefill=RoleStatus(desired=1, replicas=1, updated=1, ready=1, pending=0),
        decode=RoleStatus(desired=2, replicas=2, updated=1, ready=1, pending=1),
        prefill_summary="1/1",
        decode_summary="1/2",
        pairs=PairStatus(ready=1, possible=2, summary="1/2"),
        endpoint="http://demo.x.svc:8000",
        conditions=[condition],
    ).to_wire()
    stored = server.api.merge(f"{models(namespace)}/demo/status", {"status": status})
    assert stored["status"] == status
    assert stored["metadata"]["generation"] == created["metadata"]["generation"]


def test_the_table_answers_whether_it_serves(server: ControlPlane, namespace: str) -> None:
    server.api.create(models(namespace), minimal())
    status = {
        "prefillSummary": "1/1",
        "decodeSummary": "0/1",
        "pairs": {"ready": 0, "possible": 1, "summary": "0/1"},
        "revision": "0123abcd",
        "conditions": [
            {
                "type": "Ready",
                "status": "False",
                "reason": "PodsNotReady",
                "message": "m",
                "lastTransitionTime": "2026-01-02T03:04:05Z",
            }
        ],
    }
    server.api.merge(f"{models(namespace)}/demo/status", {"status": status})
    head, row = server.kubectl("get", "dm", "-n", namespace).splitlines()[:2]
    assert head.split() == ["NAME", "READY", "REASON", "PREFILL", "DECODE", "PAIRS", "REVISION", "AGE"]
    assert row.split()[:-1] == ["demo", "False", "PodsNotReady", "1/1", "0/1", "0/1", "0123abcd"]
    wide = server.kubectl("get", "dm", "-n", namespace, "-o", "wide").splitlines()[0].split()
    assert wide[-3:] == ["MODEL", "FABRIC", "ENDPOINT"]
    assert server.kubectl("get", "prebook", "-n", namespace, "-o", "name").split() == [
        "disaggregatedmodel.prebook.dev/demo"
    ]


def test_explain_teaches(server: ControlPlane) -> None:
    text = " ".join(server.kubectl("explain", "dm.spec.transfer").split())
    assert "How the KV cache travels from prefill to decode." in text or "How the KV cache travels." in text
    assert "UCX would silently use TCP" in text
    assert "leaseSeconds" in text


def model_role(**spec: object) -> Json:
    return {
        "apiVersion": "prebook.dev/v1alpha1",
        "kind": "ModelRole",
        "metadata": {"name": "demo-prefill"},
        "spec": {"model": "demo", "role": "prefill", **spec},
    }


def test_a_role_scales_through_its_subresource(server: ControlPlane, namespace: str) -> None:
    made = server.api.create(roles(namespace), model_role())
    assert made["spec"]["replicas"] == 1
    selector = "prebook.dev/model=demo,prebook.dev/role=prefill"
    path = f"{roles(namespace)}/demo-prefill"
    server.api.merge(f"{path}/status", {"status": {"replicas": 1, "selector": selector}})
    server.kubectl("scale", "dmr/demo-prefill", "--replicas=3", "-n", namespace)
    scale = server.api.get(f"{path}/scale")
    assert scale["spec"]["replicas"] == 3
    assert scale["status"] == {"replicas": 1, "selector": selector}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": "other"}, "a role cannot move to another model"),
        ({"role": "decode"}, "a role cannot change its kind"),
        ({"replicas": 257}, "less than or equal to 256"),
    ],
)
def test_a_role_keeps_its_identity(server: ControlPlane, namespace: str, change: Json, says: str) -> None:
    server.api.create(roles(namespace), model_role())
    with pytest.raises(ApiError, match=says):
        server.api.merge(f"{roles(namespace)}/demo-prefill", {"spec": change})
