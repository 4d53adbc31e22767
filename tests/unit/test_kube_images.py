"""Images without a registry: archives that say the truth about their layer, and linked trees that share files."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path

from tests.kube.images import ImageConfig, Tree, link_tree, skeleton_image


def test_archive_describes_its_layer(tmp_path: Path) -> None:
    config = ImageConfig("test/skeleton:1", command=["python3"], env={"PATH": "/opt/bin"})
    with tarfile.open(skeleton_image(tmp_path / "image.tar", config)) as archive:
        files = {member.name: archive.extractfile(member) for member in archive.getmembers()}
        contents = {name: file.read() for name, file in files.items() if file is not None}
    (manifest,) = json.loads(contents["manifest.json"])
    description = json.loads(contents[manifest["Config"]])
    digest = hashlib.sha256(contents[manifest["Layers"][0]]).hexdigest()
    assert manifest["RepoTags"] == ["test/skeleton:1"]
    assert description["rootfs"]["diff_ids"] == [f"sha256:{digest}"]
    assert description["config"]["User"] == "65532"
    assert description["config"]["Env"] == ["PATH=/opt/bin"]
    assert list(tmp_path.iterdir()) == [tmp_path / "image.tar"]


def test_linked_tree_shares_files_and_leaves_out_what_is_skipped(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "package" / "test").mkdir(parents=True)
    (source / "package" / "code.py").write_text("x = 1\n")
    (source / "package" / "test" / "big.bin").write_text("not wanted\n")
    (source / "link").symlink_to("/somewhere/else")
    root = tmp_path / "root"
    link_tree(Tree(source, Path("/opt/engine"), skip=frozenset({"test"})), root)
    linked = root / "opt" / "engine"
    assert (linked / "package" / "code.py").samefile(source / "package" / "code.py")
    assert (linked / "link").readlink() == Path("/somewhere/else")
    assert not (linked / "package" / "test").exists()


def test_trees_may_overlap(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same").write_text(name)
        (tmp_path / name / name).write_text(name)
        link_tree(Tree(tmp_path / name, Path("/usr")), tmp_path / "root")
    assert {path.name: path.read_text() for path in (tmp_path / "root" / "usr").iterdir()} == {
        "same": "a",
        "a": "a",
        "b": "b",
    }
