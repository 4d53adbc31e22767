"""The operator's benchmark end to end, with few models (for many: docs/guide/operator-performance.md)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kube.release import ROOT

MODELS = 3


@pytest.mark.timeout(300)
def test_a_few_models_are_measured_from_creation_to_ready(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    ran = subprocess.run(
        [sys.executable, "-m", "prebook_bench", "operator", "--models", str(MODELS), "--steady", "3", "--json",
         str(report)],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    (run,) = json.loads(report.read_text())["runs"]
    creation = run["creation"]
    assert 0 < creation["all_statefulsets_seconds"] <= creation["all_children_seconds"]
    assert creation["all_children_seconds"] <= creation["all_statuses_current_seconds"]
    assert 10 < creation["requests_per_model"] < 30
    assert run["steady"]["writes"] == run["restart"]["writes_to_unchanged_objects"] == 0
    assert run["steady"]["memory_bytes"]["now"] > 20e6
    assert 0 < run["hand_over_seconds"] < run["take_over_seconds"], "a lease that was not released has to run out"
    assert run["pod_ready_to_model_ready_seconds"] > 0
    assert "all children" in ran.stdout
