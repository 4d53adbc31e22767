#!/bin/sh
# Renders the chart into the manifests for an installation without Helm.
#
#   hack/install.sh            write deploy/install.yaml (one namespace) and deploy/cluster/install.yaml (all namespaces)
#   hack/install.sh --check    exit 1 with a diff when they are not what the chart gives
#
# HELM names the Helm 4 program; default: the one in PATH, else the one that `make kube-binaries` built.
set -eu
cd "$(dirname "$0")/.."

helm=${HELM:-$(command -v helm || true)}
if [ -z "$helm" ]; then
    # Two steps: in a pipeline the failure of the first command would go unseen, and nothing be rendered.
    found=$(python3 hack/kube/binaries.py --where helm)
    helm=$(printf '%s\n' "$found" | cut -f2)
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# render SCOPE FILE: the chart for one scope, without what only Helm understands (its labels, hooks and the keep annotation).
render() {
    "$helm" template prebook charts/prebook --namespace prebook-system --no-hooks --set "scope=$1" --set crds.keep=false \
        >"$scratch/chart.yaml"
    {
        echo "# Generated from charts/prebook by hack/install.sh; do not edit."
        echo "#"
        echo "#   kubectl apply --server-side -f $2"
        echo "---"
        printf 'apiVersion: v1\nkind: Namespace\nmetadata:\n  name: prebook-system\n  labels:\n    app.kubernetes.io/part-of: prebook\n'
        # With models in the same namespace this would refuse IPC_LOCK, which EFA needs.
        if [ "$1" = Cluster ]; then printf '    pod-security.kubernetes.io/enforce: restricted\n'; fi
        sed -e '/app.kubernetes.io\/managed-by: Helm/d' -e '/helm.sh\/chart:/d' -e '/^# Source:/d' "$scratch/chart.yaml"
    } >"$scratch/out.yaml"
    if [ "$check" = yes ]; then
        diff -u "$2" "$scratch/out.yaml" || differs=yes
    else
        mkdir -p "$(dirname "$2")"
        cp "$scratch/out.yaml" "$2"
    fi
}

check=no
differs=no
case ${1:-} in
    "") ;;
    --check) check=yes ;;
    *) echo "usage: hack/install.sh [--check]" >&2; exit 2 ;;
esac

render Namespaced deploy/install.yaml
render Cluster deploy/cluster/install.yaml

if [ "$differs" = yes ]; then
    echo "deploy/ is out of date: run hack/install.sh" >&2
    exit 1
fi
