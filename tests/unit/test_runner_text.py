"""What people read: stages, crash reports, tables, accounts, memory estimates."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import pytest

from prebook_operator.local import progress
from prebook_operator.local.ask import Answer, Transfer, describe_account
from prebook_operator.local.cpu import fast_bfloat16, vector_units
from prebook_operator.local.display import PlainDisplay, TerminalDisplay, age, table
from prebook_operator.local.errors import MachineError, UserError
from prebook_operator.local.preflight import assign_gpus, available_memory, check_memory, memory_needs, slow_dtype
from prebook_operator.local.state import PodRow, RunState
from prebook_operator.local.workload import PodPlan, build_workload
from tests.unit.runner_support import front_service, stateful_set

CRASH = """\
(APIServer pid=11) INFO 11-29 20:51:02 [api_server.py:1] vLLM API server version 0.32.0
(EngineCore pid=12) INFO 11-29 20:51:09 [cpu_model_runner.py:88] Starting to load model /models/x...
(EngineCore pid=12) ERROR 11-29 20:51:10 [core.py:900] Traceback (most recent call last):
(EngineCore pid=12) ERROR 11-29 20:51:10 [core.py:900]     raise ValueError(
(EngineCore pid=12) ERROR 11-29 20:51:10 [core.py:900] ValueError: To serve one request, 2 GiB KV cache is needed
(APIServer pid=11) RuntimeError: Engine core initialization failed. See root cause above.
""".splitlines()


@pytest.mark.parametrize(
    ("line", "stage"),
    [
        (CRASH[0], "reading the model's configuration"),
        (CRASH[1], "loading model"),
        ("(EngineCore pid=1) INFO 11-29 20:51:10 [x.py:1] Loading weights took 0.5 seconds", "weights loaded"),
        ("(EngineCore pid=1) INFO 11-29 20:51:10 [x.py:1] GPU KV cache size: 44,000 tokens", "allocating the KV cache"),
        ("(APIServer pid=1) INFO:     Application startup complete.", "engine up, waiting for its probe"),
        ("(APIServer pid=1) WARNING 11-29 20:51:10 [x.py:1] Enforce eager set, disabling torch.compile", ""),
        ("(APIServer pid=1) INFO 11-29 20:51:10 [nixl_utils.py:72] NIXL is available", ""),
        ("nothing that is known", ""),
    ],
)
def test_stage_from_a_log_line(line: str, stage: str) -> None:
    assert progress.stage([line]) == stage


def test_newest_telling_line_decides() -> None:
    assert progress.stage([*CRASH[:2], "something else"]) == "loading model"


def test_crash_report_names_the_root_cause_and_a_remedy() -> None:
    tail = progress.useful_tail(CRASH)
    assert len(tail) == 1
    assert tail[0].startswith("ValueError: To serve one request")
    assert "VLLM_CPU_KVCACHE_SPACE" in progress.remedy(CRASH, exit_status=1)


def test_crash_without_a_known_error_shows_the_last_lines() -> None:
    assert progress.useful_tail(["a", "", "b"]) == ["a", "b"]
    assert "memory" in progress.remedy(["a"], exit_status=137)
    assert "whole log" in progress.remedy(["a"], exit_status=1)


def test_lines_lose_colours_and_prefixes_and_are_cut() -> None:
    assert progress.clean("\x1b[1;36m(EngineCore pid=12)\x1b[0;0m INFO 11-29 20:51:09 [a/b.py:88] hello") == "hello"
    assert progress.clean("x" * 300, width=10) == "x" * 9 + "…"


def row(**fields: object) -> PodRow:
    values: dict[str, object] = {
        "name": "m-decode-0",
        "short": "decode-0",
        "role": "decode",
        "ip": "127.0.0.3",
        "port": 8000,
        "phase": "Ready",
    }
    return PodRow.model_validate({**values, **fields})


def state(*pods: PodRow, phase: str = "starting") -> RunState:
    return RunState.model_validate(
        {
            "name": "m",
            "pid": 1,
            "digest": "d",
            "file": "f",
            "host": "127.0.0.1",
            "port": 8000,
            "phase": phase,
            "run_folder": "/x",
            "started_at": 0.0,
            "pods": pods,
        }
    )


def test_table_has_a_line_per_pod() -> None:
    lines = table(
        [
            row(pairs_ready=1, pairs_possible=2, requests=7, age=131),
            row(short="prefill-0", phase="Starting", waiting_for="loading model"),
        ]
    )
    assert lines[1].split() == ["decode-0", "Ready", "2m11s", "1/2", "7", "0", "127.0.0.3:8000"]
    assert lines[2].endswith("loading model")
    assert age(5.9) == "5s"
    assert age(7300) == "2h1m"


def test_plain_display_says_changes_once_and_waits_every_ten_seconds() -> None:
    out, now = io.StringIO(), [0.0]
    display = PlainDisplay(out, logs=False, clock=lambda: now[0])
    starting = state(row(phase="Starting", waiting_for="loading model", last_line="Loading…", age=3))
    for now[0] in (0.0, 1.0, 9.0, 10.0, 11.0):
        display.state(starting)
    display.state(state(row()))
    display.log("decode-0", "hidden")
    assert out.getvalue().splitlines() == [
        "decode-0: Starting: loading model",
        "waiting for decode-0: loading model… (3 s) | Loading…",
        "decode-0: Ready",
    ]


def test_terminal_display_takes_its_table_away_before_a_line() -> None:
    out = io.StringIO()
    display = TerminalDisplay(out, logs=True)
    display.state(state(row()))
    display.log("decode-0", "a line")
    text = out.getvalue()
    assert text.index("\x1b[3F\x1b[J") < text.index("a line") < text.rindex("POD")
    display.pause()
    display.log("decode-0", "not shown")
    assert "not shown" not in out.getvalue()


def answer(**fields: object) -> Answer:
    values: dict[str, object] = {
        "transfer_id": "t",
        "local_reason": "",
        "prompt_tokens": 37,
        "completion_tokens": 8,
        "first_token": 0.4,
        "total": 1.5,
        "finish_reason": "stop",
        "text": "Paris.",
    }
    return Answer(**{**values, **fields})  # type: ignore[arg-type]


def test_account_of_a_pushed_prompt() -> None:
    transfer = Transfer(
        state="committed",
        prefill_engine_id="e1",
        tokens=37,
        blocks=3,
        bytes=1105920,
        writes=2,
        lead_s=0.4,
        exposed_s=0.012,
        overlap=0.5,
    )
    text = "\n".join(describe_account(answer(), transfer=transfer, pods=[row(short="prefill-0", engine_id="e1")]))
    for part in (
        "37 tokens",
        "prefill-0",
        "1,105,920 bytes (3 blocks) in 2 writes",
        "400 ms before prefill finished",
        "12 ms (50%",
    ):
        assert part in text


def test_account_of_a_prompt_that_was_not_pushed() -> None:
    assert "decode itself (short_prompt); no KV was moved" in "\n".join(
        describe_account(answer(transfer_id="", local_reason="short_prompt"), transfer=None, pods=[])
    )
    failed = describe_account(answer(), transfer=Transfer(state="failed"), pods=[])
    assert "failed; decode computed the prompt itself" in failed[-1]
    late = describe_account(answer(), transfer=Transfer(state="committed", lead_s=-0.1), pods=[])
    assert "100 ms after prefill finished" in "\n".join(late)


def engines(count: int, *, gpus: int = 0, kv: str = "2", args: Sequence[str] = ()) -> tuple[PodPlan, ...]:
    engine = {
        "command": ["python3", "-m", "vllm.entrypoints.openai.api_server"],
        "args": list(args),
        "env": [{"name": "VLLM_CPU_KVCACHE_SPACE", "value": kv}],
        "resources": {"limits": {"nvidia.com/gpu": gpus}},
    }
    manifests = [front_service(), stateful_set("decode", replicas=count, container=engine)]
    return build_workload(manifests, new_token=lambda: "t").pods


@pytest.mark.parametrize(
    ("cpuinfo", "units", "fast"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512bw avx512_bf16\n", ("avx512_bf16", "avx512bw", "avx2"), True),
        ("flags : fpu avx2\nflags : fpu avx2\n", ("avx2",), False),
        ("flags : avx512bw avx2\nflags : avx2\n", ("avx2",), False),  # only what every processor has
        ("Features\t: fp asimd sve bf16\n", ("bf16", "sve", "asimd"), True),
        ("Features\t: fp asimd\n", ("asimd",), False),
        ("nothing known", (), False),
    ],
)
def test_bfloat16_is_fast_where_the_processor_has_the_instructions(
    cpuinfo: str, units: tuple[str, ...], fast: bool
) -> None:
    assert vector_units(cpuinfo) == units
    assert fast_bfloat16(cpuinfo) is fast


@pytest.mark.parametrize("args", [(), ("--dtype=bfloat16",), ("--dtype", "half"), ("--dtype=float32", "--dtype=auto")])
def test_sixteen_bits_on_a_processor_that_is_slow_at_them_are_warned_of(args: Sequence[str]) -> None:
    warning = slow_dtype(engines(2, args=args), cpuinfo="flags : avx2")
    assert warning is not None
    assert "decode-0, decode-1" in warning
    assert "--dtype=float32" in warning
    assert slow_dtype(engines(2, args=args), cpuinfo="flags : avx2 avx512bw") is None
    assert slow_dtype(engines(2, gpus=1, args=args), cpuinfo="flags : avx2") is None


@pytest.mark.parametrize("args", [("--dtype=float32",), ("--dtype", "float"), ("--dtype=auto", "--dtype=float32")])
def test_float32_is_not_warned_of(args: Sequence[str]) -> None:
    assert slow_dtype(engines(1, args=args), cpuinfo="flags : avx2") is None


def test_memory_is_estimated_per_engine_and_compared() -> None:
    needs = memory_needs(engines(2), weights=1 << 30)
    assert [need.kv_cache >> 30 for need in needs] == [2, 2]
    check_memory(needs, available=sum(need.total for need in needs))
    with pytest.raises(MachineError, match=r"too little memory: .*decode-0 5\.1, decode-1 5\.1"):
        check_memory(needs, available=1 << 30)
    assert memory_needs(engines(1, gpus=1), weights=1 << 30) == []
    with pytest.raises(UserError, match="not a number"):
        memory_needs(engines(1, kv="lots"), weights=0)


def test_available_memory_is_the_smaller_of_system_and_cgroup(tmp_path: Path) -> None:
    info = tmp_path / "meminfo"
    info.write_text("MemTotal: 100 kB\nMemAvailable:   1000 kB\n")
    assert available_memory(meminfo=info, cgroups=tmp_path) == 1000 * 1024
    for name, text in (
        ("memory.max", "500000"),
        ("memory.current", "300000"),
        ("memory.stat", "anon 1\ninactive_file 100000\n"),
    ):
        (tmp_path / name).write_text(text)
    assert available_memory(meminfo=info, cgroups=tmp_path) == 300000
    assert available_memory(meminfo=tmp_path / "none", cgroups=tmp_path) is None


def test_gpus_are_given_once_unless_shared() -> None:
    pods = engines(2, gpus=1)
    assert list(assign_gpus(pods, present=2, shared=False).values()) == [(0,), (1,)]
    assert list(assign_gpus(pods, present=1, shared=True).values()) == [(0,), (0,)]
    with pytest.raises(MachineError, match="0 of 1 are left"):
        assign_gpus(pods, present=1, shared=False)
    fabric = build_workload(
        [front_service(), stateful_set("decode", container={"resources": {"limits": {"vpc.amazonaws.com/efa": "2"}}})],
        new_token=lambda: "t",
    ).pods
    with pytest.raises(UserError, match=r"vpc\.amazonaws\.com/efa"):
        assign_gpus(fabric, present=8, shared=False)
