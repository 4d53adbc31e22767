"""`prebook bench` and `prebook trace` as a user calls them, and the exit statuses of the benchmarks."""

from pathlib import Path

import pytest

from prebook_bench import cli as bench
from prebook_bench.modes import Mode
from prebook_operator.cli.main import main


def test_bench_hands_everything_over(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "exposed", "--help"])
    assert ended.value.code == 0
    assert "median(bare prefill leg)" in capsys.readouterr().out


def test_bench_alone_lists_the_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("exposed", "idle", "ab", "report"))


def test_a_shaped_link_without_root_is_status_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert bench.main(["exposed", "--model", str(tmp_path)]) == 3
    assert "--rate none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["exposed", "--modes", "none", "--model", "/m"], "nothing is transferred"),
        (["exposed", "--modes", "aggregated", "--model", "/m"], "nothing is transferred"),
        (["idle", "--modes", "aggregated", "--model", "/m"], "no pair"),
        (["ab", "--modes", "none", "--model", "/m"], "for `idle` only"),
        (["quick", "--modes", "none", "--model", "/m"], "for `idle` only"),
        (["short-prompts", "--tokens", "65", "--model", "/m"], "more than 64 tokens"),
        (["ab", "--endpoints", "a=http://127.0.0.1:9", "--generator", "vllm"], "--tokenizer"),
        (["ab", "--file", "/nowhere.yaml"], "nowhere.yaml"),
        (["report", "/nowhere.json"], "nowhere.json"),
    ],
)
def test_what_cannot_be_measured_is_said(argv: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(argv) == 1
    assert word in capsys.readouterr().err


def test_lws_that_is_not_built_is_said_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    assert bench.main(["operator", "--models", "1", "--beside-lws"]) == 3
    assert "hack/kube/binaries.py lws" in capsys.readouterr().err


def test_trace_of_an_empty_folder_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(tmp_path), "--out", str(tmp_path / "x.svg")]) == 1
    assert "timeline_dir" in capsys.readouterr().err


def test_modes_that_transfer() -> None:
    assert [mode for mode in Mode if mode.transfers] == [Mode.PULL, Mode.PUSH, Mode.PREBOOK, Mode.PREBOOK_FIRST]
    assert [mode for mode in Mode if mode.ours] == [Mode.PREBOOK, Mode.PREBOOK_FIRST]
