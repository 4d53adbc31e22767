#!/usr/bin/env bash
# Sets up everything that `make demo` and `make test` need, in this checkout only (.venv), and nothing twice.
#
#   hack/setup.sh           Python environment for everything (operator, CPU engine, bench, tools)
#   hack/setup.sh --tests   the same, and the system packages that the network and cluster tests use
#
# Needs Python 3.11 to 3.13 and git. Every Python package is checked against a hash in constraints.txt. System packages
# are named with the command that installs them; on Debian and Ubuntu, as root, that command is run.
# Set PYTHON to choose an interpreter, PREBOOK_NO_SYSTEM=1 to leave the system packages alone.
set -euo pipefail
cd "$(dirname "$0")/.."

tests=0
for arg in "$@"; do
    case $arg in
        --tests) tests=1 ;;
        *) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2 ;;
    esac
done
venv=.venv
stamp=$venv/.prebook-setup
SECONDS=0
say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# What was installed is a function of these; the stamp is their hash. Settings of linters and tests are not part of it.
want=$({ cat constraints.txt hack/setup.sh && sed '/^\[tool\.ruff\]$/,$d' pyproject.toml; } | sha256sum | cut -d' ' -f1)

# --- Python --------------------------------------------------------------------------------------------------------
in_range() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' > /dev/null 2>&1; }

find_python() {
    local name
    for name in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if in_range "$name"; then
            "$name" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    die "needs Python 3.11, 3.12 or 3.13 (found: $(python3 --version 2>&1 || echo none)); set PYTHON to one of them"
}

# --- system packages: (what to look for, Debian package) ------------------------------------------------------------
has_library() {
    { ldconfig -p 2> /dev/null || /sbin/ldconfig -p 2> /dev/null || true; } | grep -qF "$1"
}
system_missing=()
need_command() { PATH=$PATH:/usr/sbin:/sbin command -v "$1" > /dev/null || system_missing+=("$2"); }
need_library() { has_library "$1" || system_missing+=("$2"); }

need_python_headers() {
    local python
    python=$(find_python)
    "$python" -c 'import pathlib, sys, sysconfig
sys.exit(not (pathlib.Path(sysconfig.get_paths()["include"]) / "Python.h").exists())' ||
        system_missing+=("python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-dev")
}

find_missing() {
    system_missing=()
    need_library libnuma.so.1 libnuma1 # vLLM's CPU kernels are linked against it
    if [ "$tests" = 1 ] && [ "$(uname -s)" = Linux ]; then
        need_command ip iproute2 # network namespaces and the shaped link
        need_command tc iproute2
        need_command iptables iptables # Service routing of the local cluster
        need_command containerd containerd # its one real node
        need_command runc runc
        need_command buildah buildah # the operator's image
        [ -x /usr/lib/cni/bridge ] || [ -x /opt/cni/bin/bridge ] || system_missing+=(containernetworking-plugins)
        # vLLM compiles a kernel on the CPU the first time that log probabilities are asked for
        need_command c++ g++
        need_python_headers
    fi
}

system_packages() {
    [ "${PREBOOK_NO_SYSTEM:-}" != 1 ] || return 0
    find_missing
    [ ${#system_missing[@]} -gt 0 ] || return 0
    local packages command
    packages=$(printf '%s\n' "${system_missing[@]}" | sort -u | tr '\n' ' ')
    command="apt-get install --yes --no-install-recommends ${packages% }"
    if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
        say "installing system packages: $packages"
        export DEBIAN_FRONTEND=noninteractive
        # shellcheck disable=SC2086
        apt-get install --quiet --quiet --yes --no-install-recommends $packages > /dev/null 2>&1 ||
            { apt-get update --quiet --quiet && $command --quiet; } ||
            say "could not install $packages; what needs them will say so"
    elif command -v apt-get > /dev/null; then
        say "system packages are missing; install them with: sudo $command"
        has_library libnuma.so.1 || die "the engine cannot start without libnuma1"
    else
        say "system packages are missing (Debian's names, yours may differ): $packages"
        has_library libnuma.so.1 || die "the engine cannot start without libnuma (libnuma.so.1)"
    fi
}

# --- the environment ------------------------------------------------------------------------------------------------

# uv installs 6 GB several times faster than pip, and checks hashes by default. If the machine has none, the pinned one
# goes into a small environment of its own: the big one is not touched by its own installer.
find_uv() {
    if command -v uv > /dev/null && uv --version > /dev/null 2>&1; then
        command -v uv
        return
    fi
    local home=$venv-uv
    if [ ! -x "$home/bin/uv" ]; then
        say "no uv on this machine: fetching the pinned one into $home" >&2
        "$1" -m venv "$home" > /dev/null 2>&1 || {
            rm -rf "$home"
            if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
                apt-get install --quiet --quiet --yes python3-venv > /dev/null 2>&1 || {
                    apt-get update --quiet --quiet && apt-get install --quiet --quiet --yes python3-venv
                } > /dev/null 2>&1
            fi
            "$1" -m venv "$home" > /dev/null 2>&1
        } || die "Python cannot make virtual environments here; on Debian and Ubuntu: sudo apt-get install python3-venv"
        sed -n '/^uv==/,/[^\\]$/p' constraints.txt > "$home/uv.txt"
        "$home/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps \
            --only-binary :all: --requirement "$home/uv.txt" >&2 || die "could not install uv"
    fi
    echo "$home/bin/uv"
}

# Where nobody sees a progress bar (CI, a log file): what has arrived, and a sign of life.
tick() {
    while sleep 15 > /dev/null 2>&1 9>&-; do
        say "… $SECONDS s"
    done
}
uv_install() {
    if [ -t 2 ]; then
        "$uv" pip install --python $venv/bin/python "$@"
        return
    fi
    tick &
    local ticker=$! status=0
    "$uv" pip install --python $venv/bin/python "$@" 2>&1 | sed -u -E '/^ *(\+|Downloading) /d' || status=1
    kill "$ticker" 2> /dev/null || true
    [ "$status" = 0 ] || die "the packages could not be installed; the lines above say why"
}

install_python() {
    local python uv
    python=$(find_python)
    uv=$(find_uv "$python")
    export UV_PYTHON_DOWNLOADS=never
    if [ -x $venv/bin/python ] && ! in_range $venv/bin/python; then
        die "$venv holds $($venv/bin/python --version 2>&1), which is not supported; remove it and repeat"
    fi
    if [ ! -x $venv/bin/python ]; then
        say "environment: $venv from $("$python" --version) ($python)"
        "$uv" venv --quiet --python "$python" $venv
    fi
    say "installing $(grep -c '==' constraints.txt) locked packages (the CPU engine is most of it: about 6 GB on disk)"
    # --no-deps: the list is complete, and vLLM's own demand for torch==…+cpu would make it unsolvable.
    uv_install --require-hashes --no-deps --only-binary :all: --requirement constraints.txt
    "$uv" pip install --python $venv/bin/python --quiet --no-deps --no-build-isolation --editable .
    "$venv/bin/python" -c 'import prebook_operator, prebook_connector, prebook_bench' ||
        die "the environment was installed, but the project cannot be imported"
    echo "$want" > "$stamp"
    say "environment ready after $SECONDS s"
}

system_packages
if [ "$(cat "$stamp" 2> /dev/null || true)" != "$want" ]; then
    # Two set-ups at once would install over each other.
    exec 9> .setup.lock
    command -v flock > /dev/null && { flock -n 9 || { say "waiting for another set-up of this checkout"; flock 9; }; }
    [ "$(cat "$stamp" 2> /dev/null || true)" = "$want" ] || install_python
fi
