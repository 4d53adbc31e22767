#!/usr/bin/env bash
# The main job, end to end: one prefill and one decode engine (real vLLM on the CPU, a real small chat model, real KV
# transfers) start on this machine, answer a short and a long question, tell how each was served, and are ended again.
# A pair that `prebook up examples/smollm2-1p1d.yaml --detach` left running is used, and left running.
set -euo pipefail
cd "$(dirname "$0")/.."

hack/setup.sh

prebook=.venv/bin/prebook
model=examples/smollm2-1p1d.yaml
step() { printf '\n\033[1m%s\033[0m\n' "$*"; }

if ! $prebook ps --output json | grep -q '"name": *"smollm2"'; then
    trap 'echo; $prebook down smollm2' EXIT
    step "Starting one prefill and one decode engine (about a minute)"
    $prebook up $model --port 0 --detach
fi

step "A short question: What is the capital of France?"
$prebook up $model --port 0 --ask "What is the capital of France?"

step "A long one (examples/questions/long.txt): watch how early its destination was booked"
$prebook up $model --port 0 --ask-file examples/questions/long.txt --max-tokens 64
