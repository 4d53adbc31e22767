"""Models that tests start from, and a way to change them."""

from __future__ import annotations

import copy
from typing import Any

Document = dict[str, Any]


def minimal(name: str = "demo") -> Document:
    """The smallest model that is accepted: two CPU engines."""
    return {
        "apiVersion": "prebook.dev/v1alpha1",
        "kind": "DisaggregatedModel",
        "metadata": {"name": name},
        "spec": {"model": {"uri": "file:///models/tiny"}, "engine": {"image": "vllm/vllm-openai:v0.32.0"}},
    }


def p5en(name: str = "qwen3-32b") -> Document:
    """One prefill and one decode engine on P5en with EFA."""
    document = minimal(name)
    spec = document["spec"]
    spec["model"] = {"uri": "hf://Qwen/Qwen3-32B", "revision": "9216db5"}
    spec["hardware"] = {"profile": "p5en.48xlarge", "efaPerGPU": 2}
    spec["prefill"] = {"replicas": 1, "tensorParallelSize": 4, "gpus": 4}
    spec["decode"] = {"replicas": 1, "tensorParallelSize": 4, "gpus": 4}
    return document


def changed(document: Document, changes: dict[str, Any]) -> Document:
    """A copy of `document` with values set at dotted paths; None removes."""
    made = copy.deepcopy(document)
    for path, value in changes.items():
        *parents, last = path.split("/")
        place = made
        for parent in parents:
            place = place.setdefault(parent, {})
        if value is None:
            place.pop(last, None)
        else:
            place[last] = copy.deepcopy(value)
    return made
