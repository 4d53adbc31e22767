"""The promise, on a real node: apply one object, get tokens; lose a pod, lose no request; delete it, keep nothing.

The tests share one model and run in the order of the file: two engines need a minute to start, and each test needs what
the one before it made.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.kube.cluster import RealCluster
from tests.kube.controlplane import wait_for
from tests.kube.fixtures import new_namespace
from tests.kube.processes import ProcessFailed
from tests.kube.release import NAMESPACE, RELEASE, ROOT, install_chart, operator_image, uninstall_chart
from tests.kube.rest import Json
from tests.node.test_real_node import pod, wait_phase

EXAMPLE = ROOT / "examples" / "smollm2-cpu.yaml"
CLIENT = Path(__file__).with_name("client.py")
READY_SECONDS = 600  # two engines on two busy cores
TRAFFIC_SECONDS = 60.0
OWNED = "statefulsets,services,secrets,serviceaccounts,poddisruptionbudgets,networkpolicies,modelroles,pods,configmaps"


@dataclass(frozen=True)
class Serving:
    """The model's namespace, in which a client pod waits for work."""

    cluster: RealCluster
    namespace: str

    def kubectl(self, *args: str, stdin: str | None = None, seconds: float = 240) -> str:
        """kubectl in the namespace."""
        return self.cluster.control_plane.kubectl("--namespace", self.namespace, *args, stdin=stdin, seconds=seconds)

    def client(self, *args: str, seconds: float = 240) -> str:
        """Run the client script in the client pod and return what it prints."""
        return self.kubectl(
            "exec", "-i", "client", "--", "python3", "-", *args, stdin=CLIENT.read_text(), seconds=seconds
        )

    def chat(self, seconds: float, *, first: int) -> list[dict[str, Any]]:
        """Requests through the front Service, one after the other, until `seconds` have passed."""
        return [
            json.loads(line)
            for line in self.client("chat", str(seconds), str(first), seconds=seconds + 240).splitlines()
        ]

    def get(self, address: str, path: str) -> dict[str, Any]:
        """A GET from the client pod to an engine pod."""
        answer: dict[str, Any] = json.loads(self.client("get", f"http://{address}:8000{path}"))
        return answer

    def pods(self, role: str) -> list[Json]:
        """The model's pods of a role that are not being deleted."""
        query = {"labelSelector": f"prebook.dev/model=smollm2,prebook.dev/role={role}"}
        pods = self.cluster.control_plane.api.items(f"/api/v1/namespaces/{self.namespace}/pods", **query)
        return [one for one in pods if "deletionTimestamp" not in one["metadata"]]

    def address(self, role: str) -> str:
        """IP of the role's only pod."""
        (only,) = self.pods(role)
        return str(only["status"]["podIP"])


@pytest.fixture(scope="module")
def serving(cluster: RealCluster) -> Iterator[Serving]:
    """The example applied on a cluster with the chart installed, and waited for."""
    control_plane = cluster.control_plane
    cluster.node.import_image(operator_image())
    install_chart(control_plane)
    here = Serving(cluster, new_namespace(control_plane, "serving"))
    here.kubectl("apply", "-f", str(EXAMPLE))
    here.kubectl("apply", "-f", "-", stdin=json.dumps(pod("client", "sleep", "infinity")))
    wait_phase(control_plane, here.namespace, "client", "Running")
    try:
        _wait_ready(here)
        yield here
    finally:
        control_plane.api.delete(f"/api/v1/namespaces/{here.namespace}")
        uninstall_chart(control_plane)


def _wait_ready(here: Serving) -> None:
    waiting = ("wait", "dm/smollm2", "--for=condition=Ready", f"--timeout={READY_SECONDS}s")
    try:
        here.kubectl(*waiting, seconds=READY_SECONDS + 30)
    except ProcessFailed as error:
        logs = here.kubectl("logs", "--selector=prebook.dev/model=smollm2", "--container=engine", "--tail=20")
        raise ProcessFailed(f"{error}\n{here.kubectl('describe', 'dm', 'smollm2')}\n{logs}") from error


@pytest.mark.timeout(1500)
def test_chat_through_the_front_service_from_another_pod(serving: Serving) -> None:
    (answer,) = serving.chat(0, first=1)
    assert answer["error"] is None
    assert answer["status"] == 200
    assert "Paris" in answer["text"]


def test_kv_is_pushed_from_one_pod_to_the_other(serving: Serving) -> None:
    prefill, decode = serving.address("prefill"), serving.address("decode")
    assert prefill != decode
    identity = serving.get(prefill, "/prebook/v1/identity")
    assert identity["side_channel"]["host"] == prefill

    (answer,) = serving.chat(0, first=100)
    assert answer["transfer"] is not None, answer
    account = serving.get(decode, f"/prebook/v1/transfers/{answer['transfer']}")
    assert account["state"] == "committed"
    assert account["prefill_engine_id"] == identity["engine_id"]
    assert account["bytes"] > 0
    assert account["writes"] > 0


def test_the_charts_own_test_passes(serving: Serving) -> None:
    said = serving.cluster.control_plane.helm("test", RELEASE, "--namespace", NAMESPACE, seconds=240)
    assert "Succeeded" in said, said


def test_get_and_describe_say_that_it_serves(serving: Serving) -> None:
    header, row = serving.kubectl("get", "dm", "smollm2").splitlines()
    columns = dict(zip(header.split(), row.split(), strict=False))
    assert columns["NAME"] == "smollm2"
    assert columns["READY"] == "True"
    assert (columns["PREFILL"], columns["DECODE"], columns["PAIRS"]) == ("1/1", "1/1", "1/1")
    text = serving.kubectl("describe", "dm", "smollm2")
    assert "1 of 1 pairs have shaken hands" in text


@pytest.mark.timeout(1500)
def test_prefill_pod_deleted_under_traffic_costs_no_request(serving: Serving) -> None:
    (before,) = serving.pods("prefill")
    with ThreadPoolExecutor(1) as pool:
        traffic = pool.submit(serving.chat, TRAFFIC_SECONDS, first=200)
        time.sleep(5)
        serving.kubectl("delete", "pod", before["metadata"]["name"], "--wait=false")
        answers = traffic.result()
    assert [answer for answer in answers if answer["error"] is not None or answer["status"] != 200] == []
    assert len(answers) >= 3

    def replaced() -> bool:
        pods = serving.pods("prefill")
        return len(pods) == 1 and pods[0]["metadata"]["uid"] != before["metadata"]["uid"]

    wait_for("the prefill pod's successor", replaced, seconds=180)

    def pushed_again() -> bool:
        (answer,) = serving.chat(0, first=int(time.monotonic()) + 1000)
        assert answer["error"] is None
        return answer["transfer"] is not None

    wait_for("KV pushed by the successor", pushed_again, seconds=READY_SECONDS, interval=5)


@pytest.mark.timeout(900)
def test_nothing_is_left_of_a_deleted_model(serving: Serving) -> None:
    serving.kubectl("delete", "dm", "smollm2", "--wait=false")
    selector = "--selector=prebook.dev/model=smollm2"
    wait_for(
        "the end of everything that the model owned",
        lambda: serving.kubectl("get", OWNED, selector, "-o", "name").strip() == "",
        seconds=240,
        interval=1,
    )
    node = serving.cluster.node
    wait_for("the end of its processes", lambda: _engines(node.enter(["ps", "-eo", "args"])) == [], seconds=60)


def _engines(processes: str) -> list[str]:
    return [line for line in processes.splitlines() if "vllm.entrypoints" in line or "VLLM::" in line]
