#!/usr/bin/env bash
# What a change must pass besides its tests. Runs every check and names all that fail, not only the first.
set -uo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin
failed=()

check() {
    local name=$1
    shift
    if output=$("$@" 2>&1); then
        printf '  ok    %s\n' "$name"
    else
        printf '  FAIL  %s: %s\n' "$name" "$*"
        printf '%s\n' "$output" | sed 's/^/        /' | head -n 60
        failed+=("$name")
    fi
}

check format "$bin/ruff" format --check operator connector bench hack tests
check lint "$bin/ruff" check operator connector bench hack tests
check types "$bin/mypy"
check layers "$bin/lint-imports"
check spelling "$bin/codespell"
check crds "$bin/prebook" crds --check crds
check reference "$bin/python" hack/reference.py --check
check chart "$bin/python" hack/chart.py --check
if "$bin/python" hack/kube/binaries.py --where helm > /dev/null 2>&1; then
    check deploy hack/install.sh --check
else
    echo "  skip  deploy: helm is not built (make kube-binaries)"
fi

if [ ${#failed[@]} -gt 0 ]; then
    printf 'check: %d failed: %s\n' "${#failed[@]}" "${failed[*]}"
    exit 1
fi
