"""The benchmark end to end: a real pair, a measured request, its timeline and its picture."""

import json
import subprocess
import sys
from pathlib import Path

from prebook_bench.trace.events import group, read_folder
from prebook_bench.trace.spans import tell

TOKENS = 2000
CHUNK = 512


def test_exposed_measures_a_real_pair_and_its_timeline_can_be_drawn(tmp_path: Path) -> None:
    timelines, report, page = tmp_path / "timelines", tmp_path / "report.json", tmp_path / "report.html"
    ran = subprocess.run(
        [sys.executable, "-m", "prebook_bench", "exposed", "--modes", "prebook", "--rate", "none",
         "--tokens", str(TOKENS), "--repeats", "1", "--chunk", str(CHUNK), "--timelines", str(timelines),
         "--json", str(report), "--html", str(page)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    measured = json.loads(report.read_text())
    (row,) = measured["summary"]
    assert row["samples"] == 1
    assert row["ttft_s"] > row["exposed_in_request_s"]
    assert row["kv_bytes"] == TOKENS * 16384
    assert "<svg" in page.read_text()

    story = max((tell(transfer) for transfer in group(read_folder(timelines))), key=lambda one: one.tokens or 0)
    assert story.tokens == TOKENS
    # KV moves in whole blocks: at least the prompt's, at most one block of 128 tokens more.
    assert TOKENS * 16384 <= story.pushed_bytes <= (TOKENS + 128) * 16384
    assert story.lead is not None
    assert story.lead > 0  # booked before the payload existed
    writes = [span for span in story.spans if span.kind == "write"]
    finished = next(mark.at for mark in story.marks if mark.kind == "prefill_finished")
    assert min(span.end for span in writes) < finished  # pushed while prefill was still computing
    assert any(span.lane == "client" for span in story.spans)
    picture = tmp_path / "timeline.svg"
    drawn = subprocess.run(
        [sys.executable, "-m", "prebook_bench", "trace", str(timelines), "--transfer", "longest",
         "--out", str(picture)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "timeline.svg" in drawn.stdout
    assert f"{TOKENS} prompt tokens" in picture.read_text()


def test_ab_measures_one_engine_and_a_pair_behind_the_router(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    ran = subprocess.run(
        [sys.executable, "-m", "prebook_bench", "ab", "--modes", "aggregated,pull", "--front", "router",
         "--rate", "none", "--rates", "0.5", "--requests", "3", "--rounds", "1", "--workload", "1000:8",
         "--json", str(report)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    measured = json.loads(report.read_text())
    assert [(row["target"], row["answered"], row["errors"]) for row in measured["summary"]] == [
        ("aggregated", 3, {}), ("pull", 3, {}),
    ]  # fmt: skip
    assert measured["fronts"]["pull"].startswith("vllm-router")
    lengths = {(one["target"], one["at"]): one["output_tokens"] for one in measured["records"]}
    assert len(lengths) == 6
    assert set(lengths.values()) == {8}
