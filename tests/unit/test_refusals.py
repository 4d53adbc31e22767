"""Pods that cannot be created: the API server's word becomes a reason with a remedy, and reaches the condition."""

from __future__ import annotations

from typing import Any

import pytest

from prebook_operator.api import Reason, Role
from prebook_operator.kube.resources import EVENT
from prebook_operator.kube.transport import Request, Response
from prebook_operator.refusals import Refusal, judge, newest_note
from tests.model_documents import minimal
from tests.unit.fake_api import respond
from tests.unit.fake_cluster import MODEL_PATH, FakeCluster, FakeOperator

QUOTA = 'pods "demo-decode-x-0" is forbidden: exceeded quota: tight, requested: pods=1, used: pods=1, limited: pods=1'
UNSTATED = 'pods "demo-decode-x-0" is forbidden: failed quota: q: must specify requests.memory for: engine'
SECURITY = (
    'pods "demo-decode-x-0" is forbidden: violates PodSecurity "restricted:latest": unrestricted capabilities '
    '(container "engine" must not include "IPC_LOCK" in securityContext.capabilities.add)'
)
HOOK = 'admission webhook "images.example.org" denied the request: unsigned image'
RANGE = 'pods "d-0" is forbidden: maximum memory usage per Container is 1Gi, but limit is 2Gi'


@pytest.mark.parametrize(
    ("note", "reason", "remedy"),
    [
        (QUOTA, Reason.QUOTA_EXCEEDED, "raise that ResourceQuota"),
        (UNSTATED, Reason.QUOTA_EXCEEDED, "set them in the resources of spec.decode.template.spec.containers"),
        (SECURITY, Reason.POD_SECURITY, "pod-security.kubernetes.io/enforce=privileged"),
        (SECURITY.replace("IPC_LOCK", "SYS_ADMIN"), Reason.POD_SECURITY, "take out of spec.decode.template"),
        (HOOK, Reason.ADMISSION_DENIED, "meet that policy"),
        (RANGE, Reason.PODS_REFUSED, "LimitRange"),
        ("something that nobody has seen yet", Reason.PODS_REFUSED, "kubectl describe statefulset demo-decode-x"),
    ],
)
def test_each_refusal_has_a_reason_and_a_remedy(note: str, reason: Reason, remedy: str) -> None:
    refusal = Refusal(role=Role.DECODE, set_name="demo-decode-x", note=note)
    assert refusal.reason is reason
    assert note in refusal.message
    assert remedy in refusal.message


def test_a_refused_object_that_is_no_pod_is_not_called_one() -> None:
    assert judge("something that nobody has seen yet") == (Reason.API_ERROR, "")
    assert judge(QUOTA)[0] is Reason.QUOTA_EXCEEDED


def test_the_newest_note_counts_whichever_recorder_wrote_it() -> None:
    old = {"note": "old", "deprecatedLastTimestamp": "2030-01-01T00:00:00Z"}
    new = {
        "note": "create Pod demo-decode-x-0 in StatefulSet demo-decode-x failed error: new",
        "eventTime": "2030-01-01T00:00:00Z",
        "series": {"lastObservedTime": "2030-01-02T00:00:00.000000Z"},
    }
    assert newest_note([new, old]) == newest_note([old, new]) == "new"
    assert newest_note([]) == ""


class Refusing(FakeCluster):
    """The StatefulSet controller may not make pods of a role, and records why."""

    def __init__(self, role: str, note: str) -> None:
        super().__init__()
        self.role, self.note = role, note

    def run_controllers(self) -> None:
        """See FakeCluster; sets of the role stay without pods."""
        super().run_controllers()
        for path, one in list(self.objects.items()):
            if one["kind"] == "StatefulSet" and f"-{self.role}-" in path:
                one["status"] = {"observedGeneration": one["metadata"]["generation"], "replicas": 0}
                self.objects[f"/events/{one['metadata']['uid']}"] = {
                    "kind": EVENT.kind,
                    "reason": "FailedCreate",
                    "note": self.note,
                    "regarding": {"uid": one["metadata"]["uid"]},
                }


def ready(cluster: FakeCluster) -> dict[str, Any]:
    conditions = cluster.objects[MODEL_PATH]["status"]["conditions"]
    return next(one for one in conditions if one["type"] == "Ready")


async def test_a_quota_is_named_in_the_condition() -> None:
    cluster = Refusing("decode", QUOTA)
    cluster.put_model(dict(minimal()["spec"]))
    await FakeOperator(cluster).settle()
    assert ready(cluster)["reason"] == "QuotaExceeded"
    assert "raise that ResourceQuota" in ready(cluster)["message"]


async def test_without_the_right_to_list_events_it_says_where_to_look() -> None:
    cluster = Refusing("decode", QUOTA)
    cluster.put_model(dict(minimal()["spec"]))

    def forbid(request: Request) -> Response | None:
        listing = request.method == "GET" and request.path.endswith("/events")
        return respond(403, {"message": "events.events.k8s.io is forbidden"}) if listing else None

    cluster.answer = forbid
    await FakeOperator(cluster).settle()
    assert ready(cluster)["reason"] == "PodsRefused"
    assert "kubectl describe statefulset demo-decode-" in ready(cluster)["message"]


async def test_nobody_asks_for_events_while_no_pod_is_missing() -> None:
    cluster = FakeCluster()
    cluster.put_model(dict(minimal()["spec"]))
    operator = FakeOperator(cluster)
    await operator.settle()
    cluster.requests.clear()
    await operator.look()
    assert [one.path for one in cluster.requests if one.path.endswith("/events")] == []
