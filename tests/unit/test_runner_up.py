"""``prebook up``, ``ps``, ``logs`` and ``down`` as a user types them, with fake engines: real processes, nothing
left behind.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.runner_support import Sandbox, free_port, front_service, stateful_set, wait_until


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    # Not tmp_path: its long name would send the run's folder, whose sockets need a short path, elsewhere.
    with tempfile.TemporaryDirectory(prefix="p", dir="/tmp") as folder:
        box = Sandbox(Path(folder))
        yield box
        box.run("down", "--all", "--now")
        wait_until(lambda: not box.processes(), what="end of every process")
        assert box.leftovers() == []


def pair(**decode: Any) -> tuple[dict[str, Any], ...]:
    return front_service(), stateful_set("prefill"), stateful_set("decode", **decode)


def get(port: int, path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as response:
        return json.load(response)


def test_ask_prints_answer_and_account_and_leaves_nothing(sandbox: Sandbox) -> None:
    done = sandbox.run("up", sandbox.write(*pair()), "--port=0", "--ask", "What is the capital of France?")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Paris.\n\n")
    for part in ("prefill-0 (127.0.", "81,920 bytes", "250 ms before prefill finished"):
        assert part in done.stdout
    assert "decode-0: Ready" in done.stderr
    assert not sandbox.processes()


def test_pods_see_their_own_address_and_the_secret(sandbox: Sandbox) -> None:
    volumes = [{"name": "token", "secret": {"secretName": "fake-peer-token"}}]
    decode = stateful_set(
        "decode",
        replicas=2,
        spec={"volumes": volumes},
        container={"volumeMounts": [{"name": "token", "mountPath": "/etc/token"}]},
    )
    decode["spec"]["template"]["spec"]["containers"][0]["env"].append(
        {"name": "TOKEN_FILE", "value": "/etc/token/token"}
    )
    port = free_port()
    assert sandbox.run("up", sandbox.write(front_service(), decode), f"--port={port}", "--detach").returncode == 0
    seen = [get(port, "/env") for _ in range(4)]
    assert {env["POD_NAME"] for env in seen} == {"fake-decode-0", "fake-decode-1"}
    assert len({env["POD_IP"] for env in seen}) == 2
    assert all(len(Path(env["TOKEN_FILE"]).read_text()) == 64 for env in seen)
    # `python3` in a pod's command is the Python that runs prebook.
    assert all(env["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent) for env in seen)


def test_detached_run_is_found_listed_logged_and_ended(sandbox: Sandbox) -> None:
    path, port = sandbox.write(*pair()), free_port()
    first = sandbox.run("up", path, f"--port={port}", "--detach")
    assert first.returncode == 0, first.stderr
    again = sandbox.run("up", path, "--detach", "--ask", "again?", timeout=15)
    assert again.returncode == 0, again.stderr
    assert again.stdout.startswith("Paris.")

    def listed() -> list[tuple[str, str, int | None]]:
        pods = json.loads(sandbox.run("ps", "-o", "json").stdout)[0]["pods"]
        return [(pod["short"], pod["phase"], pod["requests"]) for pod in pods]

    # What the pods say of themselves is asked every two seconds.
    wait_until(lambda: listed() == [("prefill-0", "Ready", 4), ("decode-0", "Ready", 4)], what="list with status")
    assert "decode-0" in sandbox.run("ps").stdout
    other = sandbox.run("up", sandbox.write(*pair(replicas=2), name="other.yaml"), "--detach")
    assert other.returncode == 2
    assert "running from another file" in other.stderr
    assert sandbox.run("down", "fake").stdout == "fake ended\n"
    assert "nothing runs" in sandbox.run("ps").stdout
    assert not sandbox.processes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_at_any_moment_leaves_nothing(sandbox: Sandbox, number: int) -> None:
    slow = pair(args=["--delay=30"])
    process = sandbox.start("up", sandbox.write(*slow), "--port=0")
    wait_until(lambda: len(sandbox.processes()) >= 5, what="start of the pods")
    process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert "stopping" in output


def test_second_interrupt_does_not_wait_for_the_grace_period(sandbox: Sandbox) -> None:
    path = sandbox.write(*pair(args=["--ignore-term"], spec={"terminationGracePeriodSeconds": 600}))
    process = sandbox.start("up", path, "--port=0")
    wait_until(lambda: '"ready"' in state_text(sandbox), what="readiness")
    process.send_signal(signal.SIGINT)
    wait_until(lambda: '"stopping"' in state_text(sandbox), what="the first interrupt's effect")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=15)
    assert process.returncode == 130


def test_killed_runner_takes_its_pods_along(sandbox: Sandbox) -> None:
    path = sandbox.write(*pair(args=["--child"]))
    assert sandbox.run("up", path, "--port=0", "--detach").returncode == 0
    runner = json.loads(state_text(sandbox))["pid"]
    assert len(sandbox.processes()) >= 6
    os.kill(runner, signal.SIGKILL)
    wait_until(lambda: not sandbox.processes(), what="death of the pods")
    assert "nothing runs" in sandbox.run("ps").stdout
    assert sandbox.run("down", "fake").returncode == 0  # removes the folder that the killed runner could not


def test_crash_loop_before_the_first_ready_is_given_up_with_the_reason(sandbox: Sandbox) -> None:
    done = sandbox.run("up", sandbox.write(*pair(args=["--crash=0"])), "--port=0", "--ask", "x")
    assert done.returncode == 4
    assert "decode-0 ended 3 times before it was ever ready" in done.stderr
    assert "ValueError: the fake engine was told to crash" in done.stderr
    assert "fake-decode-0.log" in done.stderr
    shown = sandbox.run("logs", "fake", "decode-0")
    assert shown.stdout.count("ValueError: the fake engine was told to crash") == 3


def test_hopeless_start_is_not_repeated(sandbox: Sandbox) -> None:
    done = sandbox.run("up", sandbox.write(*pair(args=["--no-such-flag"])), "--port=0", "--ask", "x")
    assert done.returncode == 4
    assert "decode-0 ended once" in done.stderr
    assert "correct spec.engine.args" in done.stderr


def test_detached_start_that_fails_says_why_and_ends(sandbox: Sandbox) -> None:
    done = sandbox.run("up", sandbox.write(*pair(args=["--no-such-flag"])), "--port=0", "--detach")
    assert done.returncode == 4
    assert "decode-0 ended once" in done.stderr


def test_detached_start_passes_on_the_exit_status_of_its_supervisor(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = sandbox.run("up", sandbox.write(*pair()), f"--port={taken.getsockname()[1]}", "--detach")
    assert done.returncode == 3
    assert "is in use" in done.stderr


def test_crash_after_ready_is_restarted(sandbox: Sandbox) -> None:
    port = free_port()
    assert sandbox.run("up", sandbox.write(*pair()), f"--port={port}", "--detach").returncode == 0
    before = {pod["short"]: pod for pod in json.loads(state_text(sandbox))["pods"]}["decode-0"]
    subprocess.run(["pkill", "-KILL", "-P", str(before["pid"])], check=True)

    def restarted() -> bool:
        pod = {pod["short"]: pod for pod in json.loads(state_text(sandbox))["pods"]}["decode-0"]
        return bool(pod["restarts"] == 1 and pod["phase"] == "Ready" and pod["ip"] == before["ip"])

    wait_until(restarted, what="restart of decode-0")
    assert get(port, "/x")["pod"] == "fake-decode-0"


def test_port_in_use_is_said_before_anything_starts(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = sandbox.run("up", sandbox.write(*pair()), f"--port={port}")
    assert done.returncode == 3
    assert f"port {port} of 127.0.0.1 is in use" in done.stderr
    assert "Starting" not in done.stderr


def model(uri: str) -> dict[str, Any]:
    return {
        "apiVersion": "prebook.dev/v1alpha1",
        "kind": "DisaggregatedModel",
        "metadata": {"name": "m"},
        "spec": {"model": {"uri": uri}},
    }


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "not valid YAML"),
        ("a: 1", "not a Kubernetes object"),
        (json.dumps(model("file:///no/such/folder")), "the folder /no/such/folder does not exist"),
        (json.dumps(model("pkg://no-such-model")), "spec.model.uri"),
        (json.dumps(model("hf://a/b")) + "\n---\n" + json.dumps({"kind": "Deployment"}), "found Deployment"),
    ],
)
def test_file_that_cannot_work_is_refused_with_a_reason(sandbox: Sandbox, text: str, named: str) -> None:
    path = sandbox.folder / "bad.yaml"
    path.write_text(text)
    done = sandbox.run("up", path, "--port=0")
    assert done.returncode == 2
    assert named in done.stderr
    assert "Traceback" not in done.stderr


def test_file_that_does_not_exist_and_empty_question(sandbox: Sandbox) -> None:
    assert "cannot read" in sandbox.run("up", sandbox.folder / "none.yaml").stderr
    done = sandbox.run("up", sandbox.write(*pair()), "--ask", " ")
    assert (done.returncode, "the question is empty" in done.stderr) == (2, True)


def state_text(sandbox: Sandbox) -> str:
    path = sandbox.folder / "state" / "prebook" / "fake" / "state.json"
    return path.read_text() if path.exists() else ""
