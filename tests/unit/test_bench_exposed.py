"""How samples become the rows of the exposed and idle reports, and the flags that the engines get."""

import json
import os
from pathlib import Path

import pytest

from prebook_bench import exposed, fleet, idle, tables
from prebook_bench.engines import PairOptions
from prebook_bench.fronts import prefill_body
from prebook_bench.modes import (
    EngineIdentity,
    EngineShape,
    FrontKind,
    Mode,
    PrebookOptions,
    Role,
    dispatch_environment,
    engine_arguments,
    front_kind,
    kv_transfer_config,
)
from prebook_bench.rig import Place, Rig
from prebook_bench.setting import Setting

CONFIG = {
    "num_attention_heads": 8, "head_dim": 64, "num_hidden_layers": 8, "vocab_size": 512, "dtype": "bfloat16",
}  # fmt: skip
PLACE = Place(address="10.0.0.1", prefix=(), cores=(0,))


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder with the configuration of a model of 16 KiB of KV a token."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


PAIR = PairOptions(shape=EngineShape(model="/m", chunk_tokens=512), front=FrontKind.DIRECT, prebook=PrebookOptions())


def setting(model: str, *modes: Mode, rate: str | None = "1gbit") -> Setting:
    shape = EngineShape(model=model, chunk_tokens=512)
    return Setting(
        batches=(modes or (Mode.PULL, Mode.PREBOOK),),
        pair=PairOptions(shape=shape, front=FrontKind.DIRECT, prebook=PrebookOptions()),
        rig=Rig(prefill=PLACE, decode=PLACE, rate=rate),
        command=("x",),
        progress=lambda _: None,
    )


def lengths(*tokens: int) -> exposed.ExposedOptions:
    return exposed.ExposedOptions(lengths=tokens or (2000, 4000), repeats=3)


def sample(
    mode: Mode, *, ttft: float, bare: float = 1.0, leg: float | None = None, tokens: int = 4000
) -> exposed.Sample:
    return exposed.Sample(mode=mode, tokens=tokens, repeat=0, bare_leg=bare, ttft=ttft, prefill_leg=leg)


def test_exposed_is_the_difference_of_medians(model: str) -> None:
    run = exposed.Run(
        samples=[sample(Mode.PULL, ttft=t, bare=b) for t, b in ((1.6, 1.0), (1.7, 1.1), (9.0, 0.9))]
        + [sample(Mode.PREBOOK, ttft=1.1, bare=1.0, leg=1.04)]
    )
    rows = exposed.summarise(run, options=lengths(), setting=setting(model))
    pull, prebook = rows
    assert pull["exposed_s"] == pytest.approx(0.7)  # 1.7 - 1.0: the outlier moves neither median
    assert pull["exposed_in_request_s"] is None
    assert prebook["exposed_s"] == pytest.approx(0.1)
    assert prebook["exposed_in_request_s"] == pytest.approx(0.06)
    assert prebook["exposed_to_pull"] == pytest.approx(1 / 7)
    assert prebook["line_time_s"] == pytest.approx(0.524288)
    assert prebook["last_chunk_line_time_s"] == pytest.approx(4000 % 512 * 16384 * 8 / 1e9)
    assert json.loads(json.dumps(rows))[0]["mode"] == "pull"


def test_the_last_chunk_of_an_even_prompt_is_a_whole_chunk(model: str) -> None:
    run = exposed.Run(samples=[sample(Mode.PULL, ttft=2, tokens=1024)])
    row = exposed.summarise(run, options=lengths(1024), setting=setting(model))[0]
    assert row["last_chunk_line_time_s"] == pytest.approx(512 * 16384 * 8 / 1e9)


def test_modes_without_samples_have_no_row(model: str) -> None:
    run = exposed.Run(samples=[sample(Mode.PREBOOK, ttft=2)])
    rows = exposed.summarise(run, options=lengths(), setting=setting(model, rate=None))
    assert [(row["mode"], row["tokens"]) for row in rows] == [(Mode.PREBOOK, 4000)]
    assert rows[0]["exposed_to_pull"] is None
    assert rows[0]["line_time_s"] is None
    assert "prebook" in tables.exposed_table({"summary": rows})


def test_modes_are_up_together_as_far_as_they_fit() -> None:
    gib = 1024**3
    three = (Mode.PULL, Mode.PUSH, Mode.PREBOOK)
    assert fleet.batches(three, available_bytes=32 * gib, kv_cache_bytes=gib // 2) == (three,)
    assert fleet.batches(three, available_bytes=12 * gib, kv_cache_bytes=gib // 2) == (three[:2], three[2:])
    # One engine where another mode has two: it fits beside a pair where a second pair would not.
    mixed = (Mode.PULL, Mode.AGGREGATED, Mode.PREBOOK)
    assert fleet.batches(mixed, available_bytes=9 * gib, kv_cache_bytes=gib // 2) == (mixed[:2], mixed[2:])
    # What does not fit even alone is tried all the same.
    assert fleet.batches(three, available_bytes=gib, kv_cache_bytes=gib) == tuple((mode,) for mode in three)


def test_every_mode_has_the_front_that_can_drive_it() -> None:
    router = {mode: front_kind(mode, asked=FrontKind.ROUTER) for mode in Mode}
    assert router[Mode.PULL] is router[Mode.PUSH] is FrontKind.ROUTER
    assert router[Mode.PREBOOK] is router[Mode.PREBOOK_FIRST] is FrontKind.DISPATCH
    assert router[Mode.NONE] is router[Mode.AGGREGATED] is FrontKind.PLAIN
    assert front_kind(Mode.PREBOOK, asked=FrontKind.DIRECT) is FrontKind.DIRECT
    assert front_kind(Mode.PREBOOK_FIRST, asked=FrontKind.DIRECT) is FrontKind.DISPATCH


def test_idle_rows_are_compared_with_the_pair_without_a_connector() -> None:
    rows = [{"mode": mode, "prefill_cores": c / 2, "decode_cores": c / 2, "pair_cores": c, "warm_up": "ok"}
            for mode, c in ((Mode.NONE, 0.02), (Mode.PUSH, 2.02))]  # fmt: skip
    compared = idle.with_baseline(rows)
    assert compared[1]["beyond_baseline_cores"] == pytest.approx(2.0)
    assert idle.with_baseline(rows[1:])[0]["beyond_baseline_cores"] is None
    assert "+2.000" in tables.idle_table({"summary": compared})


def identity(mode: Mode, role: Role) -> EngineIdentity:
    return EngineIdentity(mode=mode, role=role, address="10.0.0.2")


def test_pairs_of_different_modes_share_no_port() -> None:
    identities = [identity(mode, Role.PREFILL) for mode in Mode]
    ports = [port for i in identities for port in (i.http_port, i.side_channel_port)]
    assert len(set(ports)) == len(ports)
    assert len({i.engine_id for i in identities}) == len(identities)


def test_transfer_configs() -> None:
    made = {
        mode: kv_transfer_config(
            identity(mode, Role.DECODE), control_dir="/c", timeline_dir="/t", options=PrebookOptions()
        )
        for mode in Mode
    }
    assert made[Mode.NONE] is None
    assert made[Mode.PULL] is not None
    assert made[Mode.PULL]["kv_connector"] == "NixlConnector"
    ours = made[Mode.PREBOOK]
    assert ours is not None
    assert ours["kv_role"] == "kv_consumer"
    assert ours["kv_connector_extra_config"]["prebook"]["control_dir"] == "/c"
    assert ours["kv_connector_extra_config"]["prebook"]["timeline_dir"] == "/t"


def test_engine_flags_differ_only_in_the_connector() -> None:
    def flags(mode: Mode) -> list[str]:
        engine = identity(mode, Role.PREFILL)
        transfer = kv_transfer_config(engine, control_dir="/c", timeline_dir=None, options=PrebookOptions())
        made = engine_arguments(engine, shape=PAIR.shape, dtype="float32", transfer=transfer, dispatch=False)
        assert "--distributed-executor-backend=vllm.v1.executor.uniproc_executor.UniProcExecutor" in made
        return [flag for flag in made if not flag.startswith(("--kv-transfer-config", "--port"))]

    assert flags(Mode.PULL) == flags(Mode.PUSH) == flags(Mode.PREBOOK) == flags(Mode.NONE) == flags(Mode.PREBOOK_FIRST)
    assert {"--max-num-batched-tokens=512", "--dtype=float32"} < set(flags(Mode.PULL))


def test_dispatch_environment_points_at_the_peer() -> None:
    prefill, decode = identity(Mode.PREBOOK, Role.PREFILL), identity(Mode.PREBOOK, Role.DECODE)
    env = dispatch_environment(
        decode, peer=prefill, token_file="/k", control_dir="/c", model="m", local_prefill_max_tokens=0
    )
    value = json.loads(env["PREBOOK_DISPATCH"])
    assert value["peers"] == f"static:///10.0.0.2:{prefill.http_port}"
    assert value["role"] == "decode"
    assert value["first_token"] == "decode"


def test_first_token_from_prefill_is_asked_of_both_roles_and_loaded_in_decode() -> None:
    decode, prefill = (identity(Mode.PREBOOK_FIRST, role) for role in (Role.DECODE, Role.PREFILL))
    for engine, peer in ((decode, prefill), (prefill, decode)):
        env = dispatch_environment(
            engine, peer=peer, token_file="/k", control_dir="/c", model="m", local_prefill_max_tokens=0
        )
        assert json.loads(env["PREBOOK_DISPATCH"])["first_token"] == "prefill"
    flags = {
        engine.role: [
            flag for flag in engine_arguments(engine, shape=PAIR.shape, dtype="float32", transfer={}, dispatch=True)
            if flag.startswith("--logits-processors")
        ]
        for engine in (decode, prefill)
    }  # fmt: skip
    assert len(flags[Role.DECODE]) == 1
    assert flags[Role.PREFILL] == []


def test_a_prefill_leg_asks_for_one_token_without_streaming() -> None:
    body = {"prompt": [1, 2], "max_tokens": 64, "stream": True, "stream_options": {}, "min_tokens": 9, "temperature": 0}
    assert prefill_body(body) == {"prompt": [1, 2], "max_tokens": 1, "stream": False, "temperature": 0}


def test_the_package_is_importable_without_vllm_loaded() -> None:
    import subprocess
    import sys

    code = "import sys, prebook_bench.cli; sys.exit(any(m.split('.')[0] in ('vllm', 'torch') for m in sys.modules))"
    environment = {**os.environ}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
    assert Path(exposed.__file__).exists()
