"""Kubernetes programs for the tests: built from pinned Go modules, cached, or taken from KUBEBUILDER_ASSETS.

Each folder beside this file is a Go module of its own, because the dependency graphs of Kubernetes, etcd, Helm and
CoreDNS do not agree. Only the standard library is used, so that `make kube-binaries` works before any Python
environment exists.

    python3 hack/kube/binaries.py              build whatever is missing or out of date
    python3 hack/kube/binaries.py helm kubectl build only these
    python3 hack/kube/binaries.py lws          build what is only made on demand
    python3 hack/kube/binaries.py --where      print where each program is
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPORT_EVERY = 20.0  # seconds between progress lines; a terminal's reader loses patience well before a minute


class BinaryMissing(RuntimeError):
    """A program is neither in KUBEBUILDER_ASSETS nor built."""


@dataclass(frozen=True)
class Program:
    """One program: its name, the folder of the Go module that pins it, and its main package."""

    name: str
    module: str
    package: str


def _kubernetes(name: str) -> Program:
    return Program(name, "kubernetes", f"k8s.io/kubernetes/cmd/{name}")


# In the order in which somebody waits for them: a control plane first, a node last.
PROGRAMS: tuple[Program, ...] = (
    Program("etcd", "etcd", "go.etcd.io/etcd/server/v3"),
    _kubernetes("kube-apiserver"),
    _kubernetes("kube-controller-manager"),
    _kubernetes("kube-scheduler"),
    _kubernetes("kubectl"),
    Program("helm", "helm", "helm.sh/helm/v4/cmd/helm"),
    _kubernetes("kubelet"),
    _kubernetes("kube-proxy"),
    Program("coredns", "coredns", "."),
    Program("pause", "pause", "."),
)
#: Built only when they are named: `python -m prebook_bench operator --beside-lws` measures this controller beside ours.
ON_DEMAND: tuple[Program, ...] = (Program("lws", "lws", "sigs.k8s.io/lws/cmd"),)
BY_NAME = {program.name: program for program in (*PROGRAMS, *ON_DEMAND)}


def pinned(module: str, path: str) -> str:
    """The version (`v1.2.3`) that the module in folder `module` requires of `path`."""
    text = (HERE / module / "go.mod").read_text()
    found = re.search(rf"^(?:require|\t)\s*{re.escape(path)} (v\S+)", text, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{HERE / module / 'go.mod'} does not require {path}")
    return found.group(1)


def kubernetes_version() -> str:
    """The pinned Kubernetes version, such as `v1.37.2`."""
    return pinned("kubernetes", "k8s.io/kubernetes")


def cache_dir() -> Path:
    """Where built programs are kept: $XDG_CACHE_HOME/prebook/kube/<Kubernetes version>."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "prebook" / "kube" / kubernetes_version()


def asset(name: str) -> Path | None:
    """The program in KUBEBUILDER_ASSETS (envtest's convention), if it is there."""
    folder = os.environ.get("KUBEBUILDER_ASSETS")
    if not folder:
        return None
    path = Path(folder) / name
    return path if os.access(path, os.X_OK) else None


def locate(name: str) -> Path:
    """Path of a program that is ready to run. Raises BinaryMissing with the remedy."""
    path = asset(name) or cache_dir() / name
    if not os.access(path, os.X_OK):
        command = "make kube-binaries" if BY_NAME[name] in PROGRAMS else f"python3 hack/kube/binaries.py {name}"
        raise BinaryMissing(f"{name} is not built ({path} is missing): run `{command}`, or set KUBEBUILDER_ASSETS")
    return path


def linker_flags(program: Program) -> str:
    """Linker flags with the version, or the servers call themselves v0.0.0 and clients refuse to believe them."""
    settings: dict[str, str] = {}
    if program.module == "kubernetes":
        version = kubernetes_version()
        major, minor, _ = version.lstrip("v").split(".", 2)
        for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version"):
            settings |= {
                f"{package}.gitVersion": version,
                f"{package}.gitMajor": major,
                f"{package}.gitMinor": minor,
                f"{package}.gitTreeState": "clean",
            }
    elif program.module == "helm":
        settings["helm.sh/helm/v4/internal/version.version"] = pinned("helm", "helm.sh/helm/v4")
    return " ".join(["-s -w", *(f"-X {key}={value}" for key, value in settings.items())])


def build_command(program: Program, target: Path) -> list[str]:
    """The `go build` call. Compiler flags are the same for all programs, so that they share Go's build cache."""
    return ["go", "build", "-v", "-trimpath", f"-ldflags={linker_flags(program)}", f"-o={target}", program.package]


def module_source(module: str, path: str) -> Path:
    """Folder of the sources of a module that the module in folder `module` requires. Raises CalledProcessError."""
    command = ["go", "list", "-m", "-f", "{{.Dir}}", path]
    found = subprocess.run(command, cwd=HERE / module, check=True, capture_output=True, text=True)
    return Path(found.stdout.strip())


def fingerprint(program: Program, go_version: str) -> str:
    """Hash of all that decides what a build makes: module files, sources, flags and compiler."""
    digest = hashlib.sha256()
    for path in sorted((HERE / program.module).glob("*")):
        if path.name in {"go.mod", "go.sum"} or path.suffix == ".go":
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(" ".join([go_version, *build_command(program, Path(program.name))]).encode())
    return digest.hexdigest()


def go_version() -> str:
    """What `go version` says. Raises BinaryMissing where there is no Go."""
    if shutil.which("go") is None:
        raise BinaryMissing(
            "Go 1.26 or newer is needed to build the test programs (or set KUBEBUILDER_ASSETS to prebuilt ones)"
        )
    return subprocess.run(["go", "version"], check=True, capture_output=True, text=True).stdout.strip()


def build(program: Program, stamp: str, label: str) -> None:
    """Build one program into the cache and stamp it. CalledProcessError comes with the compiler's last words."""
    folder = cache_dir()
    (folder / ".stamps").mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{program.name}.new"
    command = build_command(program, temporary)
    started = reported = time.monotonic()
    print(f"{label} building…", flush=True)
    process = subprocess.Popen(
        command, cwd=HERE / program.module, stderr=subprocess.PIPE, text=True, env=os.environ | {"CGO_ENABLED": "0"}
    )
    lines: list[str] = []
    if process.stderr is None:
        raise RuntimeError("go build was started without a pipe for its messages")
    for line in process.stderr:
        lines.append(line)
        if time.monotonic() - reported > REPORT_EVERY:
            reported = time.monotonic()
            print(f"{label} {len(lines)} packages compiled, {reported - started:.0f} s", flush=True)
    if process.wait() != 0:
        sys.stderr.writelines(lines[-40:])
        raise subprocess.CalledProcessError(process.returncode, command)
    temporary.replace(folder / program.name)
    (folder / ".stamps" / program.name).write_text(stamp)
    print(f"{label} built in {time.monotonic() - started:.0f} s", flush=True)


@contextmanager
def only_builder() -> Iterator[None]:
    """Hold the cache's lock: two builds at once would compile the same packages twice."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    with (cache_dir() / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another build is running: waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build_all(programs: Sequence[Program]) -> None:
    """Build the programs that are missing or out of date."""
    with only_builder():
        for number, program in enumerate(programs, 1):
            label = f"[{number}/{len(programs)}] {program.name}:"
            if (prebuilt := asset(program.name)) is not None:
                print(f"{label} from KUBEBUILDER_ASSETS ({prebuilt})", flush=True)
                continue
            stamp, stamp_file = fingerprint(program, go_version()), cache_dir() / ".stamps" / program.name
            if (cache_dir() / program.name).exists() and stamp_file.exists() and stamp_file.read_text() == stamp:
                print(f"{label} up to date", flush=True)
                continue
            build(program, stamp, label)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Build and cache the Kubernetes programs that the tests run.")
    parser.add_argument("names", nargs="*", help=f"programs (default: all of {', '.join(BY_NAME)})")
    parser.add_argument("--where", action="store_true", help="print where each program is, and build nothing")
    options = parser.parse_args(argv)
    if unknown := [name for name in options.names if name not in BY_NAME]:
        parser.error(f"unknown program: {', '.join(unknown)}")
    chosen = [BY_NAME[name] for name in options.names] or list(PROGRAMS)
    try:
        if options.where:
            for program in chosen:
                print(f"{program.name}\t{locate(program.name)}")
        else:
            build_all(chosen)
    except (BinaryMissing, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
