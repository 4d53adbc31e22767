#!/usr/bin/env bash
# All test tiers that this machine can run, as one pytest run in two lanes side by side: unit → chart → API server, and
# engine → rig → node (tests/tiers.py).
# Arguments go to pytest. In CI (CI=true) a tier that cannot run is a failure; see tests/tiers.py.
set -euo pipefail
cd "$(dirname "$0")/.."

hack/setup.sh --tests

# Without Go the tiers that need these programs are skipped with the reason (or fail, where they are required).
if [ -n "${KUBEBUILDER_ASSETS:-}" ] || command -v go > /dev/null; then
    python3 hack/kube/binaries.py || echo "test: the Kubernetes programs could not be built; see above" >&2
else
    echo "test: Go is not installed, so the Kubernetes programs of the API-server and node tiers are not built" >&2
fi

# A program that is missing must not turn into a skip there either (tests/kube/fixtures.py).
if [ "${CI:-}" = true ]; then
    export PREBOOK_REQUIRE_KUBE=1
fi

exec .venv/bin/pytest -n 2 --durations=15 --durations-min=5 "$@"
