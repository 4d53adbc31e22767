#!/usr/bin/env bash
# Regenerates constraints.txt: every package of every extra, with its version and hashes and nothing else.
#
# A lock file would also record where each file was downloaded from. This one must not: it has to work with whatever
# index or mirror the machine is set up for, and the hashes already say that the right file came.
#
# Each supported platform and Python is resolved on its own and the results are merged. One "universal" resolution
# reads the metadata of one wheel for all platforms, and so loses dependencies that only another wheel declares
# (intel-openmp's Linux wheel does).
#
#   hack/constraints.sh              keep the versions that are pinned, add and drop what pyproject.toml asks for
#   hack/constraints.sh --upgrade    move everything to the newest version that resolves
set -euo pipefail
cd "$(dirname "$0")/.."

uv=.venv/bin/uv
[ -x "$uv" ] || uv=$(command -v uv) || { echo "constraints: uv is missing; run hack/setup.sh first" >&2; exit 1; }
python=.venv/bin/python
[ -x "$python" ] || { echo "constraints: .venv is missing; run hack/setup.sh first" >&2; exit 1; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
seed=constraints.txt
for version in 3.11 3.12 3.13; do
    for machine in x86_64 aarch64; do
        out="$work/$version-$machine.txt"
        # An existing output file is the resolver's preference: this keeps pins, and keeps the six results alike.
        [ ! -f "$seed" ] || cp "$seed" "$out"
        "$uv" pip compile pyproject.toml --quiet --all-extras --python-version "$version" \
            --python-platform "$machine-manylinux_2_28" --generate-hashes --no-annotate --no-header \
            --no-emit-index-url --no-emit-find-links --output-file "$out" "$@" > /dev/null
        set --  # upgraded once; the other five follow the first
        seed=$out
    done
done

"$python" - "$work" > "$work/merged" <<'PY'
import pathlib
import sys

found: dict[str, dict[str, set[tuple[str, str]]]] = {}  # name -> version -> {(python, machine)}
hashes: dict[str, list[str]] = {}  # "name==version" -> its --hash lines
combinations = set()
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.txt")):
    where = tuple(path.stem.split("-", 1))
    combinations.add(where)
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            hashes.setdefault(pin, []).append(line.strip(" \\"))
        else:
            pin = line.partition(" ")[0]
            name, _, version = pin.partition("==")
            found.setdefault(name, {}).setdefault(version, set()).add(where)

pythons = {python for python, _ in combinations}
machines = {machine for _, machine in combinations}


def marker(wanted: set[tuple[str, str]]) -> str:
    """The shortest environment marker that holds for exactly these (Python, machine) pairs of those we support."""
    if wanted == combinations:
        return ""
    if {(p, m) for p, _ in wanted for m in machines} == wanted:
        return " or ".join(f'python_version == "{p}"' for p in sorted({p for p, _ in wanted}))
    if {(p, m) for _, m in wanted for p in pythons} == wanted:
        return " or ".join(f'platform_machine == "{m}"' for m in sorted({m for _, m in wanted}))
    return " or ".join(f'(python_version == "{p}" and platform_machine == "{m}")' for p, m in sorted(wanted))


print("# Names, versions and hashes of everything that hack/setup.sh installs. Made by hack/constraints.sh; do not edit.")
for name in sorted(found):
    for version, wanted in sorted(found[name].items()):
        pin = f"{name}=={version}"
        condition = marker(wanted)
        lines = sorted(set(hashes[pin]))
        print(" \\\n    ".join([f"{pin}; {condition}" if condition else pin, *lines]))
PY

if grep -nE '://|@ file' "$work/merged"; then
    echo "constraints: the lines above carry an address; only names, versions and hashes may be in the file" >&2
    exit 1
fi
mv "$work/merged" constraints.txt
echo "constraints.txt: $(grep -c '==' constraints.txt) pins"
