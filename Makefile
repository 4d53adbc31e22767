# Every target works from a clean clone: the set-up runs first and costs nothing when it is done.
# `make help` lists the targets; ARGS is passed on, for example: make test-unit ARGS="-k ledger -x"

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

BIN := .venv/bin
ARGS ?=
SOURCES := operator connector bench hack tests

##@ Start here

.PHONY: help
help: ## This list
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} \
		/^[a-z0-9-]+:.*## / {printf "  %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: ## Set-up, then the main job: a real prefill/decode pair answers questions, KV pushed
	@hack/demo.sh

.PHONY: test
test: ## Set-up, then every test tier that this machine can run (in CI: all of them, or it fails)
	@hack/test.sh $(ARGS)

.PHONY: setup
setup: ## The Python environment in .venv, from locked hashes
	@hack/setup.sh

##@ Tests by tier

.PHONY: test-unit
test-unit: setup ## Pure logic and property tests: seconds
	@$(BIN)/pytest tests/unit $(ARGS)

.PHONY: test-chart
test-chart: setup helm ## The Helm chart: lint, render, and a real API server
	@$(BIN)/pytest tests/chart $(ARGS)

.PHONY: test-apiserver
test-apiserver: setup kube-binaries ## The operator against a real Kubernetes control plane
	@$(BIN)/pytest tests/apiserver $(ARGS)

.PHONY: test-engine
test-engine: setup ## The connector and dispatch in real vLLM engines
	@$(BIN)/pytest tests/engine $(ARGS)

.PHONY: test-rig
test-rig: ## The shaped link between network namespaces (root)
	@hack/setup.sh --tests
	@$(BIN)/pytest tests/rig $(ARGS)

.PHONY: test-node
test-node: kube-binaries ## Everything in a real one-node cluster (root on Linux)
	@hack/setup.sh --tests
	@$(BIN)/pytest tests/node $(ARGS)

##@ Work on the code

.PHONY: check
check: setup ## What a change must pass: format, lint, types, layers, spelling, generated files
	@hack/check.sh

.PHONY: fmt
fmt: setup ## Format the code and mend what can be mended
	@$(BIN)/ruff check --fix-only --quiet $(SOURCES)
	@$(BIN)/ruff format $(SOURCES)

.PHONY: crds
crds: setup ## Generate crds/, the chart's copies and deploy/ from the models
	@$(BIN)/prebook crds --out crds
	@$(BIN)/python hack/chart.py
	@hack/install.sh

.PHONY: docs
docs: setup ## Generate docs/reference from the code
	@$(BIN)/python hack/reference.py

.PHONY: constraints
constraints: setup ## Resolve constraints.txt again (ARGS=--upgrade for the newest versions)
	@hack/constraints.sh $(ARGS)

##@ Measure

.PHONY: bench-quick
bench-quick: setup ## Pull, stock push, Prebook and one engine side by side on a shaped link (root): minutes, a page
	@mkdir -p build/bench
	@$(BIN)/python -m prebook_bench quick --modes pull,push,prebook,aggregated --front router --kv-cache-mib 192 \
		--json build/bench/quick.json --html build/bench/quick.html $(ARGS)

##@ A real Kubernetes on this machine

.PHONY: kube-binaries
kube-binaries: ## Build the Kubernetes programs that the tests run (needs Go; cached; KUBEBUILDER_ASSETS is used)
	@python3 hack/kube/binaries.py

.PHONY: cluster
cluster: ## A real one-node cluster with the chart installed (root on Linux); prints what to try
	@hack/setup.sh --tests
	@$(BIN)/python -m hack.cluster up

.PHONY: cluster-down
cluster-down: ## End that cluster and remove everything of it
	@$(BIN)/python -m hack.cluster down

.PHONY: helm
helm:
	@python3 hack/kube/binaries.py helm etcd kube-apiserver kube-controller-manager kube-scheduler kubectl

##@ House

.PHONY: clean
clean: ## Remove caches and build outputs (keeps .venv)
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: distclean
distclean: clean ## … and the environment
	@rm -rf .venv .venv-uv .setup.lock
