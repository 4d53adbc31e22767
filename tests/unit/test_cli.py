"""The `prebook` command: help that teaches, errors without tracebacks."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from prebook_operator.cli.main import build_parser, main
from tests.model_documents import changed, minimal


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump(minimal()))
    return path


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "examples:" in capsys.readouterr().out


def test_every_command_explains_itself() -> None:
    parser = build_parser()
    (commands,) = (action for action in parser._actions if action.dest == "command")
    assert commands.choices is not None
    assert {"render", "crds"} <= set(commands.choices)
    described = {action.dest for action in commands._choices_actions if action.help}  # type: ignore[attr-defined]
    assert described == set(commands.choices)
    for name in ("render", "crds"):
        assert "examples:" in dict(commands.choices)[name].format_help()  # type: ignore[call-overload]


def test_render_prints_manifests(model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", str(model_file), "-n", "team-a"]) == 0
    objects = list(yaml.safe_load_all(capsys.readouterr().out))
    assert {item["metadata"]["namespace"] for item in objects} == {"team-a"}
    assert [item["kind"] for item in objects].count("StatefulSet") == 2


def test_render_reads_standard_input(
    model_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with model_file.open() as stream:
        monkeypatch.setattr("sys.stdin", stream)
        assert main(["render", "-", "--revision"]) == 0
    assert len(capsys.readouterr().out.strip()) == 8


def test_a_packaged_model_becomes_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump(changed(minimal(), {"spec/model/uri": "pkg://smollm2"})))
    assert main(["render", str(path)]) == 0
    assert f"--model={tmp_path}/prebook/models/smollm2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kind: [", "not valid YAML"),
        (yaml.safe_dump(changed(minimal(), {"spec/model": None})), "spec.model: is required"),
    ],
)
def test_a_users_mistake_is_a_message_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    path = tmp_path / "model.yaml"
    path.write_text(text)
    assert main(["render", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert says in captured.err
    assert "Traceback" not in captured.err


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "/nowhere/model.yaml"]) == 2
    assert "/nowhere/model.yaml" in capsys.readouterr().err


def test_crds_written_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["crds", "--check", str(tmp_path)]) == 1
    assert "run `prebook crds --out" in capsys.readouterr().err
    assert main(["crds", "--out", str(tmp_path)]) == 0
    assert main(["crds", "--check", str(tmp_path)]) == 0


def test_crds_print_as_one_stream(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["crds"]) == 0
    names = [item["metadata"]["name"] for item in yaml.safe_load_all(capsys.readouterr().out)]
    assert names == ["disaggregatedmodels.prebook.dev", "modelroles.prebook.dev"]
