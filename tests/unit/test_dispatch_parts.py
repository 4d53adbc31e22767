"""Settings, identities, tokens, bodies and parameters: what is read from elsewhere, and what is made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prebook_connector.dispatch import bodies, params
from prebook_connector.dispatch.identity import Identity, Load, NotAnIdentity, SideChannel, mismatch, read
from prebook_connector.dispatch.reasons import LocalReason, Refusal
from prebook_connector.dispatch.security import PeerToken
from prebook_connector.dispatch.settings import Mode, Role, Settings, SettingsError

WIRE: dict[str, Any] = {
    "role": "decode", "mode": "prebook", "peers": "dns:///m-prefill.ns.svc:8000", "token_file": "/t", "revision": "r",
    "control_dir": "/run/prebook", "local_prefill_max_tokens": 64, "policy": "LeastLoaded", "on_failure": "recompute",
    "lease_seconds": 30, "side_channel_host": "10.1.2.3", "side_channel_port": 5600, "tp_size": 1, "pp_size": 1,
    "dp_size": 1, "served_model": "m", "bind": "10.1.2.3:8000",
}  # fmt: skip


def settings_of(**changes: Any) -> Settings:
    return Settings.from_environment({"PREBOOK_DISPATCH": json.dumps({**WIRE, **changes})})


def test_settings_as_the_operator_renders_them() -> None:
    settings = settings_of()
    assert (settings.role, settings.mode, settings.workers) == (Role.DECODE, Mode.PREBOOK, 1)
    assert settings.recompute


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"role": "router"}, "role"), ({"side_channel_host": "0.0.0.0"}, "side_channel_host"),
        ({"side_channel_host": "localhost"}, "side_channel_host"), ({"side_channel_host": "$(POD_IP)"}, "own IP"),
        ({"policy": "Random"}, "policy"), ({"tp_size": 0}, "tp_size"), ({"peers": None}, "peers"),
        ({"peers": "http://a"}, "peers"),
        ({"timing": {"poll": -1}}, "timing.poll"),
    ],
)  # fmt: skip
def test_wrong_settings_are_named(changes: dict[str, Any], names: str) -> None:
    with pytest.raises(SettingsError, match=names):
        settings_of(**changes)


def test_missing_and_broken_settings() -> None:
    for environment in ({}, {"PREBOOK_DISPATCH": ""}, {"PREBOOK_DISPATCH": "{"}, {"PREBOOK_DISPATCH": "[]"}):
        with pytest.raises(SettingsError, match="PREBOOK_DISPATCH"):
            Settings.from_environment(environment)


def identity(**changes: Any) -> Identity:
    base = Identity(version=1, role=Role.PREFILL, engine_id="e", side_channel=SideChannel(host="10.0.0.1", port=5600),
                    tp_size=1, pp_size=1, dp_size=1, revision="r", mode=Mode.PREBOOK, served_model="m")  # fmt: skip
    return base.model_copy(update=changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"role": Role.DECODE}, "role"), ({"mode": Mode.NIXL_PULL}, "mode"), ({"revision": "x"}, "revision"),
        ({"served_model": "x"}, "model"), ({"vllm_version": "9"}, "vLLM"), ({"compat_hash": "x"}, "hash"),
        ({"side_channel": SideChannel(host="0.0.0.0", port=1)}, "no address"),
        ({"side_channel": SideChannel(host="127.0.0.1", port=1)}, "loopback"),
        ({"side_channel": SideChannel(host="localhost", port=1)}, "loopback"), ({"tp_size": 2}, "TP"),
    ],
)  # fmt: skip
def test_what_must_not_pair(changes: dict[str, Any], says: str) -> None:
    own = identity(role=Role.DECODE, compat_hash="h")
    assert mismatch(identity(), own=own, address="10.0.0.1:8000", mla=False) is None
    sentence = mismatch(identity(**changes), own=own, address="10.0.0.1:8000", mla=False)
    assert sentence is not None
    assert says in sentence


def test_loopback_is_fine_on_one_machine_and_tp_for_mla() -> None:
    own = identity(role=Role.DECODE)
    near = identity(side_channel=SideChannel(host="127.0.0.2", port=5600))
    assert mismatch(near, own=own, address="127.0.0.2:8000", mla=False) is None
    assert mismatch(identity(tp_size=2), own=own, address="10.0.0.1:8000", mla=True) is None
    prefill = identity(tp_size=2)
    assert "TP" in (mismatch(own, own=prefill, address="10.0.0.1:8000", mla=False) or "")


@given(st.binary(max_size=300) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["version", "role", "engine_id", "side_channel", "tp_size", "load", "x"]), inner, max_size=7),
    max_leaves=20).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_garbage_is_never_an_identity(raw: bytes) -> None:
    with pytest.raises(NotAnIdentity):
        read(raw)


def test_identity_survives_the_wire() -> None:
    one = identity(load=Load(legs=2, tokens=9), compat_hash="h")
    assert read(one.model_dump_json().encode()) == one
    with pytest.raises(NotAnIdentity, match="version"):
        read(one.model_copy(update={"version": 2}).model_dump_json().encode())
    negative = json.loads(one.model_dump_json()) | {"load": {"legs": 1, "tokens": -5}}
    with pytest.raises(NotAnIdentity, match=r"load\.tokens"):
        read(json.dumps(negative).encode())


def test_token_rotates_and_is_never_empty(tmp_path: Path) -> None:
    now = 0.0
    path = tmp_path / "token"
    token = PeerToken(path, clock=lambda: now)
    assert token.check("x") is Refusal.NO_TOKEN_CONFIGURED
    assert token.check("") is Refusal.NO_TOKEN_CONFIGURED
    path.write_text("\n")
    now += 10
    assert token.check("") is Refusal.NO_TOKEN_CONFIGURED
    path.write_text("first\n")
    now += 10
    assert token.check("first") is None
    assert token.check(None) is Refusal.NO_TOKEN
    assert token.check("firs") is Refusal.WRONG_TOKEN
    assert token.check("\u20ac") is Refusal.WRONG_TOKEN
    path.unlink()
    (tmp_path / "new").write_text("second")
    (tmp_path / "new").rename(path)
    now += 10
    assert token.check("second") is None
    assert token.check("first") is None, "peers see a new Secret at different moments"
    now += 200
    assert token.check("first") is Refusal.WRONG_TOKEN
    assert token.check("") is Refusal.WRONG_TOKEN
    path.unlink()
    now += 10
    assert token.check("second") is None
    assert token.current() == "second"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4), max_leaves=15,
)  # fmt: skip
fields = ["prompt", "messages", "n", "best_of", "max_tokens", "max_completion_tokens", "stream", "echo", "tools",
          "prompt_logprobs", "min_tokens", "kv_transfer_params", "vllm_xargs", "sampling_params"]  # fmt: skip
any_body = st.dictionaries(
    st.sampled_from(fields), json_values | st.fixed_dictionaries({"kv_transfer_params": json_values})
)


@given(any_body, st.sampled_from(sorted(bodies.DISPATCHED)))
def test_any_object_is_inspected_without_an_exception(body: dict[str, Any], path: str) -> None:
    clean, _ = bodies.strip(body)
    facts = bodies.inspect(path, clean)
    assert facts.tokens >= 0
    assert bodies.parse(bodies.dump(clean)) == bodies.Parsed(clean)
    assert bodies.parse(bodies.dump_odd(clean)) is not None
    assert bodies.strip(clean)[1] == 0
    leg = bodies.prefill_body(path, clean, {"t": 1})
    assert (leg["max_tokens"], leg["stream"], leg["kv_transfer_params"]) == (1, False, {"t": 1})
    assert leg.get("prompt") == clean.get("prompt")
    assert leg.get("messages") == clean.get("messages")


@given(st.text(max_size=4000))
def test_estimate_of_text_is_a_quarter_of_its_bytes(text: str) -> None:
    size = len(text.encode())
    assert bodies.estimate_tokens(bodies.COMPLETIONS, {"prompt": text}) == -(-size // 4)
    chat = bodies.estimate_tokens(bodies.CHAT, {"messages": [{"role": "user", "content": text}]})
    assert chat == 4 + -(-(size + 4) // 4)


@pytest.mark.parametrize(
    ("raw", "odd"),
    [
        (b'{"prompt":"a"}', False), (b'{"prompt":"\\ud800"}', True), (b'{"temperature":NaN}', True),
        (b'{"temperature":1e999}', True), ('{"prompt":"a"}'.encode("utf-16"), True),
        ('{"prompt":"a"}'.encode("utf-8-sig"), True), (b'{"seed":99999999999999999999}', False),
    ],
)  # fmt: skip
def test_bodies_that_only_python_reads_keep_their_meaning(raw: bytes, odd: bool) -> None:
    parsed = bodies.parse(raw)
    assert parsed is not None
    assert parsed.odd is odd
    again = (bodies.dump_odd if odd else bodies.dump)(parsed.body)
    assert repr(json.loads(again)) == repr(json.loads(raw))


def test_token_ids_count_exactly() -> None:
    assert bodies.estimate_tokens(bodies.COMPLETIONS, {"prompt": [1] * 77}) == 77
    assert bodies.estimate_tokens(bodies.COMPLETIONS, {"prompt": [[1] * 77]}) == 77
    assert bodies.inspect(bodies.COMPLETIONS, {"prompt": [[1] * 77]}).local is None
    assert bodies.inspect(bodies.COMPLETIONS, {"prompt": [[1], [2]]}).local is LocalReason.SEVERAL_PROMPTS


def pulled(**changes: Any) -> dict[str, Any]:
    return {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2]], "remote_engine_id": "e",
        "remote_request_id": "cmpl-1", "remote_host": "10.0.0.1", "remote_port": 5600, "tp_size": 1, **changes,
    }  # fmt: skip


def test_a_pull_answer_is_handed_on() -> None:
    made = params.pull_params({**pulled(), "surprise": 1}, identity(), 0, cached_tokens=16)
    assert made == {**pulled(), "remote_prefill_cached_tokens": 16}


@pytest.mark.parametrize(
    "changes",
    [
        {"remote_engine_id": "other"}, {"remote_host": "10.6.6.6"}, {"remote_port": 22}, {"remote_port": "5600"},
        {"remote_block_ids": None}, {"remote_block_ids": []}, {"remote_block_ids": [[-1]]},
        {"remote_block_ids": [["1"]]}, {"remote_block_ids": [1]}, {"remote_block_ids": [[True]]},
        {"remote_request_id": 7}, {"do_remote_prefill": False}, {"tp_size": 0}, {"tp_size": "1"},
    ],
)  # fmt: skip
def test_a_broken_or_foreign_pull_answer_is_not(changes: dict[str, Any]) -> None:
    assert params.pull_params(pulled(**changes), identity(), 0, cached_tokens=None) is None


@given(json_values)
def test_any_pull_answer_is_judged_without_an_exception(value: Any) -> None:
    assert params.pull_params(value, identity(), 0, cached_tokens=None) is None


@given(json_values)
def test_any_leg_parameters_are_judged_without_an_exception(value: Any) -> None:
    assert not bodies.is_prefill_params(value)


def test_leg_parameters() -> None:
    assert bodies.is_prefill_params(params.prefill_params("t"))
    assert bodies.is_prefill_params({"do_remote_decode": True})
    for wrong in ({"do_remote_prefill": True}, {"transfer_id": ""}, {"transfer_id": 7}, {"transfer_id": "x" * 129}):
        assert not bodies.is_prefill_params({"do_remote_decode": True, **wrong})
