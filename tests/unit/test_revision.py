"""The revision: stable where nothing changes for an engine, different where something does."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prebook_operator.api import load
from prebook_operator.plan.revision import ALGORITHM, Revision, canonical_text, revision_of
from tests.model_cases import GOOD
from tests.model_documents import changed, minimal, p5en

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "revisions.json"


def digest(document: dict[str, Any]) -> str:
    return revision_of(load(document)).digest


def test_golden_hashes_never_change() -> None:
    """A changed hash restarts every engine of every user: a failure here needs a new algorithm id, not a new golden
    file."""
    golden = json.loads(GOLDEN.read_text())
    assert golden["algorithm"] == ALGORITHM
    assert golden["revisions"] == {case.id: revision_of(load(case.document)).digest for case in GOOD}


def test_canonical_text_of_the_smallest_model() -> None:
    assert canonical_text(load(minimal())) == (
        '{"engine":{"image":"vllm/vllm-openai:v0.32.0"},'
        '"model":{"servedName":"demo","uri":"file:///models/tiny"},"transfer":{"backend":"UCX"}}'
    )


def test_rev8_is_part_of_the_digest() -> None:
    assert Revision("0123456789abcdef" * 4).rev8 == "01234567"


SEMANTIC: list[tuple[str, Any]] = [
    ("spec/model/uri", "hf://Qwen/Qwen3-8B"),
    ("spec/model/revision", "other"),
    ("spec/model/servedName", "other"),
    ("spec/model/cache", {"persistentVolumeClaim": "models"}),
    ("spec/model/hfTokenSecretRef", {"name": "hf", "key": "token"}),
    ("spec/engine/image", "vllm/vllm-openai:v0.33.0"),
    ("spec/engine/args", ["--max-model-len=1024"]),
    ("spec/engine/env", [{"name": "A", "value": "1"}]),
    ("spec/engine/sharedMemory", "8Gi"),
    ("spec/engine/startupTimeoutSeconds", 1800),
    ("spec/engine/shutdownSeconds", 30),
    ("spec/transfer/connector", "NixlPush"),
    ("spec/transfer/leaseSeconds", 20),
    ("spec/transfer/drainSeconds", 61),
    ("spec/transfer/onFailure", "Fail"),
    ("spec/transfer/progressive/enabled", False),
    ("spec/transfer/progressive/minBytes", "8Mi"),
    ("spec/transfer/progressive/maxInFlight", 3),
    ("spec/transfer/verify", "All"),
    ("spec/hardware/efaPerGPU", 1),
    ("spec/hardware/profile", "p5.48xlarge"),
    ("spec/hardware/nodeGroups", {"prefill": "a"}),
    ("spec/hardware/devices", "DRA"),
    ("spec/hardware/dra", {"gpuDeviceClass": "gpu.nvidia.com"}),
    ("spec/prefill/tensorParallelSize", 2),
    ("spec/prefill/gpus", 5),
    ("spec/decode/gpus", 8),
    ("spec/decode/nodeSelector", {"a": "b"}),
    ("spec/decode/tolerations", [{"operator": "Exists"}]),
    ("spec/decode/template/metadata/annotations", {"a": "b"}),
    ("spec/decode/template/spec/securityContext", {"runAsGroup": 0}),
    ("spec/decode/template/spec/priorityClassName", "high"),
    ("spec/routing/localPrefillMaxTokens", 0),
]


@pytest.mark.parametrize(("path", "value"), SEMANTIC, ids=[path for path, _ in SEMANTIC])
def test_what_an_engine_notices_changes_the_revision(path: str, value: Any) -> None:
    assert digest(changed(p5en(), {path: value})) != digest(p5en())


def test_the_two_roles_are_not_confused() -> None:
    assert digest(changed(minimal(), {"spec/prefill/nodeSelector": {"a": "b"}})) != digest(
        changed(minimal(), {"spec/decode/nodeSelector": {"a": "b"}})
    )


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec/prefill/replicas", 7),
        ("spec/decode/replicas", None),
        ("spec/rollout", {"paused": True}),
        ("spec/scaling/ratio", {"max": "8:1"}),
        ("spec/networkPolicy", {"enabled": False}),
        ("spec/monitoring", {"podMonitor": True}),
        ("spec/transfer/multiHeadLatentAttention", True),
        ("metadata/labels", {"team": "a"}),
        ("metadata/generation", 9),
    ],
)
def test_what_an_engine_does_not_notice_keeps_the_revision(path: str, value: Any) -> None:
    assert digest(changed(p5en(), {path: value})) == digest(p5en())


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec/transfer/progressive/minBytes", 4194304),
        ("spec/transfer/progressive/minBytes", "4096Ki"),
        ("spec/transfer/backend", "LIBFABRIC"),
        ("spec/transfer/leaseSeconds", 30),
        ("spec/engine/args", []),
        ("spec/hardware/efaPerGPU", None),
        ("spec/prefill/gpus", None),
        ("spec/model/servedName", "qwen3-32b"),
        ("spec/model/cache", {"emptyDir": {}}),
        ("spec/decode/template", {"metadata": {}, "spec": {"hostNetwork": False, "containers": [{"name": "engine"}]}}),
        ("spec/routing", {"localPrefillMaxTokens": 64}),
    ],
)
def test_the_same_thing_said_otherwise_keeps_the_revision(path: str, value: Any) -> None:
    assert digest(changed(p5en(), {path: value})) == digest(p5en())


_KEYS = st.text("abcdefghij", min_size=1, max_size=6)
_AMOUNTS = st.integers(1, 512).map(lambda gib: (f"{gib}Gi", str(gib * 1024**3), f"{gib * 1024}Mi"))


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """Models with many of the fields set."""
    names = draw(st.lists(_KEYS, unique=True, max_size=5))
    engine = {
        "image": "v:1",
        "args": draw(st.lists(st.sampled_from(["--enforce-eager", "--seed=1", "--dtype=auto"]), max_size=3)),
        "env": [{"name": f"X_{name}", "value": draw(_KEYS)} for name in names],
    }
    role = {
        "nodeSelector": draw(st.dictionaries(_KEYS, _KEYS, max_size=4)),
        "template": {
            "metadata": {"annotations": draw(st.dictionaries(_KEYS, _KEYS, max_size=4))},
            "spec": {"volumes": [{"name": name, "emptyDir": {}} for name in names]},
        },
    }
    spec = {"model": {"uri": "hf://a/b"}, "engine": engine, "decode": role}
    return {**minimal(), "spec": spec}


def _shuffled(value: Any, rng: random.Random) -> Any:
    """The same document with its maps, and the lists whose order means nothing, in another order."""
    if isinstance(value, dict):
        items = [
            (key, rng.sample(item, len(item)) if key in ("env", "volumes") else item) for key, item in value.items()
        ]
        rng.shuffle(items)
        return {key: _shuffled(item, rng) for key, item in items}
    return [_shuffled(item, rng) for item in value] if isinstance(value, list) else value


@settings(deadline=None)
@given(documents(), st.randoms(use_true_random=False))
def test_order_of_maps_and_named_lists_means_nothing(document: dict[str, Any], rng: random.Random) -> None:
    assert digest(_shuffled(document, rng)) == digest(document)


@settings(deadline=None)
@given(documents())
def test_a_model_read_back_from_its_wire_form_has_the_same_revision(document: dict[str, Any]) -> None:
    model = load(document)
    assert revision_of(load(model.to_wire())) == revision_of(model)


@settings(deadline=None)
@given(documents(), documents())
def test_revisions_are_equal_exactly_when_the_canonical_texts_are(one: dict[str, Any], two: dict[str, Any]) -> None:
    same_text = canonical_text(load(one)) == canonical_text(load(two))
    assert (digest(one) == digest(two)) == same_text


@settings(deadline=None)
@given(_AMOUNTS)
def test_quantities_are_compared_by_value(spellings: tuple[str, ...]) -> None:
    assert len({digest(changed(minimal(), {"spec/engine/sharedMemory": text})) for text in spellings}) == 1


@settings(deadline=None)
@given(documents(), _KEYS)
def test_an_argument_more_is_another_revision(document: dict[str, Any], word: str) -> None:
    args = [*document["spec"]["engine"]["args"], f"--seed={word}"]
    assert digest(changed(document, {"spec/engine/args": args})) != digest(document)
