"""Argo CD's health of a model, for every shape of status that the operator writes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chart.argocd import SCRIPT, health


def model(*conditions: dict[str, Any], generation: int = 3, observed: int | None = 3) -> dict[str, Any]:
    status: dict[str, Any] = {"conditions": list(conditions)}
    if observed is not None:
        status["observedGeneration"] = observed
    return {"kind": "DisaggregatedModel", "metadata": {"name": "m", "generation": generation}, "status": status}


def condition(kind: str, status: str, reason: str = "Because", *, generation: int = 3) -> dict[str, Any]:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": f"{kind} is {status}",
        "observedGeneration": generation,
        "lastTransitionTime": "2026-11-29T12:00:00Z",
    }


def test_a_model_that_nobody_has_looked_at_is_progressing() -> None:
    assert health({"metadata": {"generation": 1}}).status == "Progressing"
    assert health({"metadata": {"generation": 1}, "status": {}}).status == "Progressing"
    assert health(model()).status == "Progressing"


def test_ready_is_healthy_and_shows_why() -> None:
    shown = health(
        model(condition("Ready", "True", "Serving"), condition("Reconciling", "False"), condition("Stalled", "False"))
    )
    assert (shown.status, shown.message) == ("Healthy", "Serving: Ready is True")


def test_a_rollout_in_progress_is_progressing_though_the_old_revision_serves() -> None:
    assert (
        health(model(condition("Ready", "True"), condition("Reconciling", "True", "RollingOut"))).status
        == "Progressing"
    )
    assert health(model(condition("Ready", "False", "Starting"))).status == "Progressing"
    assert health(model(condition("Ready", "Unknown"))).status == "Progressing"


def test_a_mistake_of_the_users_is_degraded_with_its_message() -> None:
    shown = health(model(condition("Ready", "False", "InvalidSpec"), condition("Stalled", "True", "InvalidSpec")))
    assert (shown.status, shown.message) == ("Degraded", "InvalidSpec: Stalled is True")


@pytest.mark.parametrize("reason", ["ScaledToZero", "Paused"])
def test_what_a_person_stopped_is_suspended(reason: str) -> None:
    assert health(model(condition("Ready", "False", reason))).status == "Suspended"


def test_words_about_an_older_generation_count_for_nothing() -> None:
    assert health(model(condition("Ready", "True", generation=2), observed=2)).status == "Progressing"
    assert health(model(condition("Stalled", "True", generation=2), observed=2)).status == "Progressing"
    assert health(model(condition("Ready", "True"), observed=2)).status == "Progressing"
    # A mistake is known to be one from its own condition, also before the rest of the status has caught up.
    assert health(model(condition("Stalled", "True"), observed=2)).status == "Degraded"


def test_guide_shows_the_script_as_it_is() -> None:
    guide = (SCRIPT.parents[3] / "docs" / "guide" / "gitops.md").read_text()
    indented = "".join(f"    {line}" if line.strip() else line for line in SCRIPT.read_text().splitlines(keepends=True))
    assert indented in guide
