"""Where the test programs come from: the cache, or KUBEBUILDER_ASSETS, and when one has to be built again."""

from __future__ import annotations

from pathlib import Path

import pytest

from hack.kube import binaries
from hack.kube.binaries import BY_NAME, BinaryMissing, cache_dir, fingerprint, kubernetes_version, linker_flags, locate

GO = "go version go1.26.8 linux/amd64"


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_missing_program_names_the_remedy() -> None:
    with pytest.raises(BinaryMissing, match="make kube-binaries"):
        locate("kubectl")


def test_what_is_built_on_demand_names_its_own_remedy() -> None:
    assert all(program.name != "lws" for program in binaries.PROGRAMS), "nobody waits for it in the tests"
    with pytest.raises(BinaryMissing, match=r"hack/kube/binaries\.py lws"):
        locate("lws")


def test_prebuilt_program_wins_over_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = program(cache_dir() / "kubectl")
    assert locate("kubectl") == cached
    prebuilt = program(tmp_path / "assets" / "kubectl")
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(prebuilt.parent))
    assert locate("kubectl") == prebuilt


def test_assets_that_lack_a_program_leave_it_to_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = program(cache_dir() / "helm")
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))
    assert locate("helm") == cached


def test_cache_is_kept_by_kubernetes_version(tmp_path: Path) -> None:
    assert cache_dir() == tmp_path / "cache" / "prebook" / "kube" / kubernetes_version()


def test_servers_are_told_their_version() -> None:
    flags = linker_flags(BY_NAME["kube-apiserver"])
    assert f"k8s.io/component-base/version.gitVersion={kubernetes_version()}" in flags
    assert f"k8s.io/client-go/pkg/version.gitVersion={kubernetes_version()}" in flags


def test_kubernetes_and_its_staging_modules_are_of_one_release() -> None:
    """k8s.io/kubernetes v1.X.Y is built from staging modules v0.X.Y; another mixture may even compile."""
    lines = (binaries.HERE / "kubernetes" / "go.mod").read_text().splitlines()
    staging = {line.split()[-1] for line in lines if "=> k8s.io/" in line}
    assert staging == {kubernetes_version().replace("v1.", "v0.", 1)}


@pytest.mark.parametrize("change", ["go.mod", "main.go", "compiler"])
def test_fingerprint_changes_with_everything_that_decides_a_build(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binaries, "HERE", tmp_path)
    module = tmp_path / "pause"
    module.mkdir()
    (module / "go.mod").write_text("module a\n")
    (module / "main.go").write_text("package main\n")
    before = fingerprint(BY_NAME["pause"], GO)
    assert fingerprint(BY_NAME["pause"], GO) == before
    if change == "compiler":
        after = fingerprint(BY_NAME["pause"], GO.replace("1.26.8", "1.26.9"))
    else:
        (module / change).write_text("changed\n")
        after = fingerprint(BY_NAME["pause"], GO)
    assert after != before


def test_one_program_is_built_once_and_again_when_its_source_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With a stand-in for the compiler that writes down its calls and makes the file that it was asked for."""
    calls = tmp_path / "calls"
    go = tmp_path / "bin" / "go"
    go.parent.mkdir()
    go.write_text(f'''#!/bin/sh
[ "$1" = version ] && {{ echo "{GO}"; exit 0; }}
echo "$@" >> {calls}
for word in "$@"; do case $word in -o=*) echo program > "${{word#-o=}}"; chmod +x "${{word#-o=}}";; esac; done
''')
    go.chmod(0o755)
    monkeypatch.setenv("PATH", f"{go.parent}:/usr/bin:/bin")
    monkeypatch.setattr(binaries, "HERE", tmp_path)
    (tmp_path / "kubernetes").mkdir()
    (tmp_path / "kubernetes" / "go.mod").write_text("require k8s.io/kubernetes v1.37.2\n")
    (tmp_path / "pause").mkdir()
    (tmp_path / "pause" / "main.go").write_text("package main\n")
    for _ in range(2):
        assert binaries.main(["pause"]) == 0
    assert len(calls.read_text().splitlines()) == 1
    assert "up to date" in capfd.readouterr().out
    (tmp_path / "pause" / "main.go").write_text("package main // changed\n")
    assert binaries.main(["pause"]) == 0
    assert len(calls.read_text().splitlines()) == 2
