"""Pure parts of the measurements beside `exposed`: link use, overhead, first and short requests, generators."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from prebook_bench import (
    client,
    first_request,
    html_report,
    link,
    link_use,
    manifest,
    overhead,
    rig,
    router,
    setting,
    short_prompts,
    stats,
    tables,
    vllm_bench,
)
from prebook_bench.first_request import Fresh
from prebook_bench.link_use import Reading
from prebook_bench.load import Lengths
from prebook_bench.modes import EngineIdentity, Mode, Role
from prebook_bench.overhead import Arm, Step
from prebook_bench.rig import RigError
from prebook_bench.short_prompts import Short


def test_link_use_is_bytes_over_time() -> None:
    readings = [Reading(at=10.0, sent=1000), Reading(at=10.5, sent=1000), Reading(at=11.0, sent=63_501_000)]
    used = link_use.describe(readings, bits_per_second=1e9)
    assert used is not None
    assert used["bytes"] == 63_500_000
    assert used["mean_bits_per_second"] == pytest.approx(508e6)
    assert used["mean_share"] == pytest.approx(0.508)
    assert used["peak_bits_per_second"] == pytest.approx(1016e6)
    assert used["series"] == [[0.5, 0.0], [1.0, pytest.approx(1016e6)]]
    assert link_use.describe(readings[:1], bits_per_second=1e9) is None
    unshaped = link_use.describe(readings, bits_per_second=None)
    assert unshaped is not None
    assert unshaped["mean_share"] is None


async def test_the_counter_is_read_while_something_runs(tmp_path: Path) -> None:
    counter = tmp_path / "rx_bytes"
    counter.write_text("5\n")
    async with link_use.watched(counter) as readings:
        await asyncio.sleep(0.5)
        counter.write_text("77\n")
    assert len(readings) >= 3
    assert (readings[0].sent, readings[-1].sent) == (5, 77)
    async with link_use.watched(None) as none:
        pass
    assert none == []


def test_a_step_counts_only_while_all_requests_are_decoded() -> None:
    early = [0.0, 0.5, 1.0, 1.1, 1.2, 1.3]
    late = [1.0, 1.1, 1.2, 1.3, 1.4]
    assert overhead.full_batch_step([early, late]) == pytest.approx(0.1)  # not the half seconds of `early` alone
    with pytest.raises(client.RequestError, match="longer answers"):
        overhead.full_batch_step([[0.0, 1.0], [2.0, 3.0]])


async def test_requests_at_once_fail_with_the_failure_itself() -> None:
    async def number(value: int) -> int:
        if value < 0:
            raise client.RequestError("HTTP 500")
        await asyncio.sleep(0.01)
        return value

    assert await overhead.together([number(1), number(2)]) == [1, 2]
    with pytest.raises(client.RequestError, match="HTTP 500"):
        await overhead.together([number(1), number(-1)])


def test_overhead_is_taken_within_each_repeat() -> None:
    steps = [
        Step(role=Role.DECODE, arm=arm, start=0, repeat=repeat, seconds=base * factor)
        for repeat, base in ((0, 0.010), (1, 0.020), (2, 0.010))  # the machine was slower in the second repeat
        for arm, factor in ((Arm.NONE, 1.0), (Arm.LOADED, 1.01), (Arm.TRANSFERRING, 1.1))
    ]
    rows = overhead.summarise(steps)
    assert [(row["arm"], row["to_none"]["value"]) for row in rows] == [
        (Arm.NONE, 1.0), (Arm.LOADED, pytest.approx(1.01)), (Arm.TRANSFERRING, pytest.approx(1.1)),
    ]  # fmt: skip
    assert "1.010 [1.010-1.010]" in tables.overhead_table({"summary": rows})


def test_a_plain_socket_is_measured_beside_prefill_only() -> None:
    assert {arm for arm in Arm if Role.DECODE not in arm.roles} == {Arm.SOCKET}
    assert all(Role.PREFILL in arm.roles for arm in Arm)


def test_bytes_beside_prefill_leave_while_it_computes() -> None:
    with rig.loopback(cores=((0,), (0,))) as places:
        with link.sending(places, total=3 << 20) as send:
            send(1 << 20)
            send(2 << 20)
            time.sleep(1.0)
        with pytest.raises(RigError, match="longer prompts"), link.sending(places, total=1 << 28) as send:
            send(1 << 28)
        with (
            pytest.raises(RigError, match=r"of 2048 bytes .* only 1024 arrived"),
            link.sending(places, total=1024) as send,
        ):
            send(2048)


def test_first_requests_are_compared_within_their_pair() -> None:
    taken = [
        Fresh(mode=Mode.PREBOOK, repeat=0, first=1.1, warm=(1.0, 1.0, 1.2), errors=()),
        Fresh(mode=Mode.PREBOOK, repeat=1, first=2.4, warm=(2.0,), errors=()),
        Fresh(mode=Mode.PUSH, repeat=0, first=None, warm=(1.0,), errors=("request 1: no", "request 3: no")),
    ]
    ours, push = first_request.summarise(taken)
    assert ours["ratio"] == pytest.approx(1.15)
    assert (ours["first_failed"], ours["warm_failed"]) == (0, 0)
    assert (push["first_s"], push["ratio"]) == (None, None)
    assert (push["first_failed"], push["warm_failed"]) == (1, 1)
    assert json.loads(json.dumps([ours]))[0]["mode"] == "prebook"
    assert "push" in tables.first_table({"summary": [ours, push]})


def test_short_prompts_are_within_noise_unless_the_whole_interval_is_above_one() -> None:
    def requests(mode: Mode, ttft: float) -> list[Short]:
        return [
            Short(mode=mode, tokens=16, start=n % 3, block=n % 2, ttft=ttft + n / 1e3, tpot=0.01, e2e=1.0 + n / 1e3)
            for n in range(30)
        ]

    rows = short_prompts.summarise(requests(Mode.NONE, 0.050) + requests(Mode.PREBOOK, 0.150))
    by_metric = {row["metric"]: row for row in rows}
    assert not by_metric["ttft"]["within_noise"]
    assert by_metric["ttft"]["ratio"]["low"] > 2
    assert by_metric["tpot"]["within_noise"]
    assert by_metric["e2e"]["within_noise"]
    assert short_prompts.summarise(requests(Mode.NONE, 0.05)) == []
    assert "no" in tables.short_table({"summary": rows})


def test_more_values_of_one_group_do_not_narrow_what_differs_between_groups() -> None:
    few, many = (stats.bootstrap_groups([[1.0] * n, [1.2] * n, [1.1] * n]) for n in (2, 200))
    assert few == many
    assert few.value == pytest.approx(1.1)
    assert (few.low, few.high) == (pytest.approx(1.0, abs=0.04), pytest.approx(1.2, abs=0.04))
    for groups in ([], [[1.0], []]):
        with pytest.raises(ValueError, match="empty"):
            stats.bootstrap_groups(groups)


def test_what_differs_from_start_to_start_is_noise() -> None:
    """Two of four starts were slower with Prebook, by far more than requests of one start differ."""
    requests = [
        Short(mode=mode, tokens=16, start=start, block=block, ttft=0.1, tpot=0.010 * factor, e2e=1.0)
        for start, slower in enumerate((1.05, 0.99, 1.05, 0.99))
        for mode, factor in ((Mode.NONE, 1.0 + start / 100), (Mode.PREBOOK, slower * (1.0 + start / 100)))
        for block in range(50)
    ]
    (row,) = (row for row in short_prompts.summarise(requests) if row["metric"] == "tpot")
    assert row["ratio"]["value"] == pytest.approx(1.02)
    assert (row["starts"], row["within_noise"]) == (4, True)
    assert row["starts_differ"] == pytest.approx(1.03)
    only = short_prompts.summarise([one for one in requests if one.start == 0])
    assert not next(row for row in only if row["metric"] == "tpot")["within_noise"]


async def test_a_target_that_never_warms_up_is_reported_not_dropped() -> None:
    asked = []

    async def attempt(number: int) -> None:
        asked.append(number)
        if number not in (1, 4):
            raise client.RequestError("HTTP 500")

    failures = await setting.warm_up("push", attempt, check=lambda: None, timeout_s=1, progress=lambda _: None)
    assert [failure["attempt"] for failure in failures] == [0, 2, 3]
    assert len(asked) == 5

    async def never(_: int) -> None:
        raise client.RequestError("HTTP 500")

    failures = await setting.warm_up("push", never, check=lambda: None, timeout_s=1, progress=lambda _: None)
    assert {failure["phase"] for failure in failures} == {"warm-up"}
    assert len(failures) >= 5


def test_turns_rotate() -> None:
    assert [setting.rotated("abc", by=n) for n in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]


def ask(lengths: Lengths) -> vllm_bench.Ask:
    return vllm_bench.Ask(base_url="http://x:1", model="m", tokenizer="/t", rate=0.5, count=3, lengths=lengths, seed=7)


FIXED = Lengths("2000:3", "fixed", prompt=2000, output=3)


def test_vllm_bench_is_asked_for_the_same_load() -> None:
    arguments = vllm_bench.arguments(ask(FIXED), folder="/f", file="r.json")
    assert {"--request-rate=0.5", "--num-prompts=3", "--random-input-len=2000", "--seed=7", "--ignore-eos"} <= set(
        arguments
    )
    with pytest.raises(ValueError, match="fixed length"):
        vllm_bench.arguments(ask(Lengths("chat", "lognormal", prompt=1, output=1)), folder="/f", file="r.json")


def test_vllm_bench_results_become_records() -> None:
    result: dict[str, Any] = {
        "start_times": [100.0, 102.5], "input_lens": [2000, 2000], "output_lens": [3, 0], "ttfts": [0.5, 0.0],
        "itls": [[0.1, 0.2], []], "errors": ["", "Traceback\nConnectionError: gone"],
    }  # fmt: skip
    good, bad = vllm_bench.records(result, ask=ask(FIXED))
    assert (good.ttft, good.tpot, good.e2e, good.tokens) == (0.5, pytest.approx(0.15), pytest.approx(0.8), 3)
    assert bad.arrival.at == 2.5
    assert bad.error == "vllm bench: ConnectionError: gone"


MODEL = """
kind: Secret
metadata: {name: hf}
---
apiVersion: prebook.dev/v1alpha1
kind: DisaggregatedModel
metadata: {name: tiny}
spec:
  model: {uri: "pkg://tiny"}
  transfer: {connector: Prebook, backend: UCX, firstToken: Prefill}
"""


def test_variants_differ_in_name_and_transfer_only() -> None:
    documents = list(yaml.safe_load_all(MODEL))
    pull = manifest.variant(documents, mode=Mode.PULL)
    assert pull[0] == documents[0]
    assert pull[1]["metadata"]["name"] == "tiny-pull"
    assert pull[1]["spec"]["transfer"] == {"connector": "NixlPull", "backend": "UCX"}
    assert pull[1]["spec"]["model"] == documents[1]["spec"]["model"]
    first = manifest.variant(documents, mode=Mode.PREBOOK_FIRST)[1]["spec"]["transfer"]
    assert first == {"connector": "Prebook", "backend": "UCX", "firstToken": "Prefill"}
    assert documents[1]["metadata"]["name"] == "tiny"


def test_files_that_no_variant_can_be_made_of(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="0 DisaggregatedModel"):
        manifest.variant([{"kind": "Secret"}], mode=Mode.PULL)
    with pytest.raises(ValueError, match="aggregated"):
        manifest.variant(list(yaml.safe_load_all(MODEL)), mode=Mode.AGGREGATED)
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [")
    with pytest.raises(ValueError, match="not YAML"):
        manifest.read(broken, modes=[Mode.PULL])


def test_the_router_is_told_where_the_engines_are() -> None:
    prefill, decode = (EngineIdentity(mode=Mode.PULL, role=role, address="10.0.0.2") for role in Role)
    told = router.arguments(prefill=prefill, decode=decode, host="10.0.0.1", port=8400)
    assert told[told.index("--prefill") + 1] == prefill.base_url
    assert told[told.index("--decode") + 1] == decode.base_url
    assert "--disable-retries" in told


def test_a_missing_router_is_said_with_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    with pytest.raises(RigError, match="pip install vllm-router"):
        router.find()


def test_the_page_of_a_quick_run_shows_both_parts_and_what_failed() -> None:
    machine = {
        "time": "t", "cores": 2, "cpu": "c", "memory_bytes": 2**30, "kernel": "k", "architecture": "x",
        "load_1min_at_start": 0.1, "versions": {}, "command": ["quick"],
    }  # fmt: skip
    figure = {"value": 0.1, "low": 0.05, "high": 0.2}
    metric = {"n": 1, "mean": figure, "p50": figure, "p90": None, "p99": None}
    rows = [
        {
            "target": "pull", "rate": rate, "requests": 2, "answered": 1, "errors": {"TimeoutError: <b>late</b>": 1},
            "ttft": metric, "tpot": None, "e2e": metric, "requests_per_second": 0.1, "output_tokens_per_second": 1.0,
            "goodput_share": 0.5,
        }
        for rate in (0.1, 0.2)
    ]  # fmt: skip
    ab: dict[str, Any] = {
        "summary": rows, "ratios_to": "pull", "ratios": {"0.1": {"pull": {"ttft_p50": 1.0}}}, "errors": [],
        "records": [{"target": "pull", "rate": 0.1, "ttft": 0.1, "tpot": None}],
        "link": [{"target": "pull", "rate": 0.1, "round": 0, "seconds": 1.0, "bytes": 10, "mean_bits_per_second": 80.0,
                  "peak_bits_per_second": 80.0, "mean_share": None, "series": [[1.0, 80.0]]}],
    }  # fmt: skip
    exposed = {
        "summary": [{"mode": "pull", "tokens": 2000, "samples": 1, "ttft_s": 1.0, "bare_prefill_s": 0.9,
                     "exposed_s": 0.1, "exposed_in_request_s": None, "line_time_s": 0.2, "exposed_to_pull": 1.0}],
        "errors": [{"target": "push", "phase": "warm-up", "error": "HTTP 500"}],
    }  # fmt: skip
    page = html_report.html({"measurement": "quick", "machine": machine, "exposed": exposed, "ab": ab})
    for words in ("Exposed transfer", "Use of the link", "Load curves", "HTTP 500", "How many times faster"):
        assert words in page
    assert "<b>late" not in page
    assert '<span class="interval">[50-200]</span>' in page
    assert "TTFT p99" not in page
