"""What the benchmarks read: /proc, model configurations, command lines, server-sent events."""

import argparse
import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from prebook_bench import arguments, client, machine, processes, rig, workload
from prebook_bench.cli import parser
from prebook_bench.modes import Mode
from prebook_operator.local.model_recipes import TinySpec


def test_proc_stat_with_a_name_full_of_parentheses() -> None:
    line = "4242 (a) b (c) 1 2) S 17 4242 4000 0 -1 4194560 1 0 0 0 250 50 9 9 20 0 5 0 1 2 3"
    assert processes.parse_stat(line) == processes.ProcessStat(pid=4242, parent=17, session=4000, cpu_ticks=300)


def test_tree_follows_parents_and_the_session() -> None:
    def stat(pid: int, parent: int, session: int) -> processes.ProcessStat:
        return processes.ProcessStat(pid=pid, parent=parent, session=session, cpu_ticks=1)

    everything = [stat(1, 0, 1), stat(10, 1, 10), stat(11, 10, 10), stat(12, 11, 99), stat(13, 1, 10), stat(20, 1, 20)]
    assert [p.pid for p in processes.tree(10, everything)] == [10, 11, 12, 13]


def test_cpu_seconds_of_this_process_grow_with_work() -> None:
    before = processes.cpu_seconds(os.getpid())
    total = 0
    while processes.cpu_seconds(os.getpid()) < before + 0.05:
        total += sum(range(10_000))
    assert total > 0


def test_pinning_reaches_all_threads_of_a_tree() -> None:
    code = (
        "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "print('up', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        core = max(os.sched_getaffinity(0))
        processes.pin(child.pid, [core])
        threads = [int(thread.name) for thread in Path(f"/proc/{child.pid}/task").iterdir()]
        assert len(threads) == 2
        assert {frozenset(os.sched_getaffinity(thread)) for thread in threads} == {frozenset({core})}
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


@pytest.mark.parametrize(("text", "bits"), [("1gbit", 1e9), ("250mbit", 250e6), ("1.5Gbit", 1.5e9), ("800bit", 800)])
def test_rates(text: str, bits: float) -> None:
    assert rig.parse_rate(text) == bits


@pytest.mark.parametrize("text", ["", "fast", "0mbit", "-1gbit", "1gbyte", "1gbit; reboot"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(ValueError, match="not a rate"):
        rig.parse_rate(text)


@pytest.mark.parametrize(
    ("cores", "expected"),
    [([0, 1], ((0,), (1,))), ([3], ((3,), (3,))), ([7, 5, 6, 4], ((4, 5), (6, 7))), ([0, 1, 2], ((0,), (1, 2)))],
)
def test_cores_are_split_in_halves(cores: list[int], expected: object) -> None:
    assert rig.split_cores(cores) == expected


def test_machine_parsing() -> None:
    assert machine.cpu_model("processor\t: 0\nmodel name\t: Fast CPU 9000\n") == "Fast CPU 9000"
    assert machine.cpu_model("") == "unknown"
    assert machine.meminfo("MemTotal:       100 kB\nHugePages_Total:  0\n") == {"MemTotal": 102400}


def test_machine_description_is_of_this_machine() -> None:
    described = machine.describe(["x"])
    assert described["cores"] >= 1
    assert described["memory_bytes"] > 1e8
    assert described["command"] == ["x"]


def test_kv_bytes_of_a_grouped_query_model() -> None:
    config: dict[str, Any] = {
        "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576, "num_hidden_layers": 30,
        "vocab_size": 49152, "dtype": "bfloat16",
    }  # fmt: skip
    assert workload.ModelShape.from_config(config).kv_bytes_per_token == 23040
    wide = workload.ModelShape.from_config({**config, "dtype": "float32"})
    assert (wide.kv_bytes_per_token, wide.dtype) == (46080, "float32")


@pytest.mark.parametrize("flags", ["avx2", "avx2 avx512bw"])
def test_the_random_model_has_the_same_kv_on_every_processor(flags: str) -> None:
    name = arguments.model_for(f"flags : {flags}")
    assert TinySpec.parse(name).kv_bytes_per_token == 16 * 1024
    assert (TinySpec.parse(name).dtype == "bfloat16") is ("avx512bw" in flags)


def test_a_config_without_a_needed_field_names_it() -> None:
    with pytest.raises(ValueError, match="num_hidden_layers"):
        workload.ModelShape.from_config({"num_attention_heads": 1, "hidden_size": 8, "vocab_size": 3})


def test_prompts_have_the_exact_length_and_depend_on_the_seed() -> None:
    one, again, other = (workload.token_prompt(100, vocabulary=512, seed=seed) for seed in ("a", "a", "b"))
    assert len(one) == 100
    assert one == again != other
    assert all(16 <= token < 512 for token in one)


def test_line_time_of_64_megabytes_at_a_gigabit() -> None:
    assert workload.line_time(4000, kv_bytes_per_token=16384, bits_per_second=1e9) == pytest.approx(0.524, abs=1e-3)


def test_command_line_defaults_are_those_of_the_documentation() -> None:
    args = parser().parse_args(["exposed"])
    assert args.modes == (Mode.PULL, Mode.PUSH, Mode.PREBOOK)
    assert args.tokens == (2000, 4000)
    assert args.rate == "1gbit"
    assert args.repeats >= 5
    assert parser().parse_args(["idle"]).modes == (Mode.NONE, Mode.PUSH, Mode.PREBOOK)
    assert parser().parse_args(["exposed", "--rate", "none"]).rate is None
    assert parser().parse_args(["exposed", "--decode-cores", "1,3-4"]).decode_cores == (1, 3, 4)


@pytest.mark.parametrize(
    "argv",
    [["exposed", "--modes", "pull,teleport"], ["exposed", "--tokens", "0"], ["exposed", "--rate", "quick"],
     ["idle", "--decode-cores", "a-b"], ["nonsense"], []],
)  # fmt: skip
def test_wrong_usage_is_refused_with_status_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        parser().parse_args(argv)
    assert refused.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ({"choices": [{"text": " Paris"}]}, " Paris"),
        ({"choices": [{"text": ""}]}, ""),
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, None),
        ({"choices": [{"delta": {"content": "a"}}]}, "a"),
        ({"choices": [{"delta": {"reasoning": "hm"}}]}, "hm"),
        ({"choices": [], "usage": {"completion_tokens": 3}}, None),
    ],
)
def test_which_stream_events_carry_tokens(event: dict[str, Any], text: str | None) -> None:
    assert client.event_text(event) == text


class Server:
    """An HTTP server that streams fixed events, one every `gap` seconds."""

    def __init__(self, events: list[str], *, gap: float = 0.0, status: int = 200) -> None:
        self.events, self.gap, self.status = events, gap, status

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if self.status != 200:
            return web.Response(status=self.status, text="no room")
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "X-Prebook-Transfer": "t1"})
        await response.prepare(request)
        for event in self.events:
            await asyncio.sleep(self.gap)
            await response.write(f": comment\r\ndata: {event}\n\n".encode())
        return response


async def ask(server: Server) -> client.Answer:
    import aiohttp

    application = web.Application()
    application.router.add_post("/v1/completions", server.answer)
    async with TestServer(application) as running, aiohttp.ClientSession() as session:
        return await client.stream(session, str(running.make_url("/v1/completions")), body={"prompt": "x"})


TOKEN = '{"choices": [{"text": "a"}]}'
USAGE = '{"choices": [], "usage": {"completion_tokens": 4}}'


async def test_arrival_times_are_those_of_the_events() -> None:
    answer = await ask(Server([TOKEN, TOKEN, TOKEN, USAGE, "[DONE]"], gap=0.05))
    assert answer.text == "aaa"
    assert answer.tokens == 4  # the server's own count, also when events held several tokens
    assert answer.headers["x-prebook-transfer"] == "t1"
    assert 0.05 <= answer.ttft < 1  # wide: the machine may be busy
    assert all(0.03 < b - a < 1 for a, b in zip(answer.arrivals, answer.arrivals[1:], strict=False))
    assert answer.tpot == pytest.approx((answer.arrivals[-1] - answer.arrivals[0]) / 3)


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (Server([], status=503), "HTTP 503: no room"),
        (Server(['{"error": {"message": "lost"}}']), "lost"),
        (Server([USAGE, "[DONE]"]), "without a token"),
    ],
)
async def test_bad_answers_are_errors(server: Server, message: str) -> None:
    with pytest.raises(client.RequestError, match=message):
        await ask(server)


def test_shaping_without_root_is_refused_politely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(rig.RigError, match=r"needs root.*--rate none"), rig.shaped(rate="1gbit", cores=((0,), (0,))):
        pytest.fail("the rig was set up without root")


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "iproute2" in (rig.why_not() or "")


def test_parser_has_help_for_every_command() -> None:
    root = parser()
    subparsers = next(a for a in root._actions if isinstance(a, argparse._SubParsersAction))
    assert {"exposed", "idle", "trace"} <= set(subparsers.choices)
    for name, command in subparsers.choices.items():
        assert command.description, name
