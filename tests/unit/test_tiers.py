"""The tier plugin: order, skip with a reason, failure where a tier is required, and an honest summary."""

from __future__ import annotations

import dataclasses

import pytest

from tests import tiers

PLUGINS = ("-p", "tests.tiers", "-p", "no:asyncio")
TESTS = """
    import pytest

    @pytest.mark.tier("node")
    def test_last(): pass

    @pytest.mark.tier("engine")
    def test_middle(): pass

    @pytest.mark.tier("unit")
    def test_first(): pass
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Run three tests of three tiers, where the engine tier lacks something and the node tier does not."""

    def run_with(*args: str) -> pytest.RunResult:
        lacks = {"engine": lambda: "no accelerator of any kind"}
        known = {
            name: dataclasses.replace(tier, lacks=lacks.get(name, lambda: None)) for name, tier in tiers.TIERS.items()
        }
        monkeypatch.setattr(tiers, "TIERS", known)
        monkeypatch.delenv("CI", raising=False)
        pytester.makepyfile(TESTS)
        return pytester.runpytest_inprocess(*PLUGINS, "-v", *args)

    return run_with


def test_tiers_run_in_their_order(run) -> None:
    run().stdout.fnmatch_lines(["*test_first PASSED*", "*test_middle SKIPPED*", "*test_last PASSED*"])


def test_missing_tier_is_skipped_loudly(run) -> None:
    result = run()
    result.assert_outcomes(passed=2, skipped=1)
    result.stdout.fnmatch_lines(["unit * 1 passed*", "engine *NOT RUN: 1 skipped", "*no accelerator of any kind"])
    result.stdout.fnmatch_lines(["apiserver * not selected"])


def test_required_tier_fails_instead(run) -> None:
    result = run("--require-tiers", "unit,engine")
    result.assert_outcomes(passed=2, errors=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*the engine tier is required here but cannot run: no accelerator of any kind"])


def test_ci_requires_every_tier(run, monkeypatch: pytest.MonkeyPatch, pytester: pytest.Pytester) -> None:
    run()  # lays out the files and drops CI from the environment
    monkeypatch.setenv("CI", "true")
    result = pytester.runpytest_inprocess(*PLUGINS)
    result.assert_outcomes(passed=2, errors=1)


def test_two_processes_report_as_one(run) -> None:
    run()  # lays out the files
    result = run("-n", "2")
    assert sum(result.parseoutcomes().get(outcome, 0) for outcome in ("passed", "skipped")) == 3
    # Which of the others can run is this machine's affair; that each is accounted for under its name is not.
    result.stdout.fnmatch_lines(["unit * 1 passed*", "engine * 1 *", "node * 1 *"])
    result.stdout.no_fnmatch_line("crashed*")


def test_a_test_that_kills_its_process_is_accounted_for(pytester: pytest.Pytester) -> None:
    """It is tried again in a new process, so it may be counted several times."""
    pytester.makepyfile("import os, pytest\n@pytest.mark.tier('unit')\ndef test_x(): os._exit(1)")
    result = pytester.runpytest_inprocess(*PLUGINS, "-n", "1")
    assert result.ret != pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["crashed * failed*"])


def test_tiers_that_compute_share_a_lane_and_those_that_wait_another(request: pytest.FixtureRequest) -> None:
    root = request.config.rootpath
    lanes = {name: tiers.lane_of(f"tests/{name}/test_x.py::test_y[a::b]", root=root) for name in tiers.TIERS}
    assert {name for name, lane in lanes.items() if lane == lanes["unit"]} == {"unit", "chart", "apiserver"}
    assert len(set(lanes.values())) == 2


def test_unknown_tier_is_refused(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import pytest\n@pytest.mark.tier('moon')\ndef test_x(): pass")
    result = pytester.runpytest_inprocess(*PLUGINS)
    assert result.ret == pytest.ExitCode.USAGE_ERROR


def test_unknown_required_tier_is_refused(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_inprocess(*PLUGINS, "--require-tiers", "moon")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*unknown moon*"])
