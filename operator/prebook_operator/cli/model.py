"""``prebook model``: prepares the models that the demo, the tests and the benchmarks use."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from prebook_operator.local.model_recipes import TinySpec
from prebook_operator.local.models import ModelError, ensure_model


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to `prebook`'s parser."""
    parser = subparsers.add_parser(
        "model",
        help="prepare a small model in the cache",
        description="Prepares a model as an ordinary Hugging Face folder and prints where it is. "
        "Models are kept in $XDG_CACHE_HOME/prebook/models (~/.cache/prebook/models); one that is there already costs "
        "nothing.",
    )
    kinds = parser.add_subparsers(dest="model", metavar="MODEL", required=True)
    smollm2 = kinds.add_parser("smollm2", help="SmolLM2-135M-Instruct, a real chat model (270 MB)")
    tiny = kinds.add_parser(
        "tiny",
        help="a random Qwen3 for tests and measurements",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default = TinySpec()
    tiny.add_argument("--layers", type=int, default=default.layers, help="number of layers")
    tiny.add_argument("--kv-heads", type=int, default=default.kv_heads, help="KV heads (and attention heads)")
    tiny.add_argument("--hidden", type=int, default=default.hidden, help="hidden size")
    tiny.add_argument("--head-dim", type=int, default=default.head_dim, help="size of one head")
    tiny.add_argument("--window", type=int, default=default.window, help="sliding window of every other layer; 0: none")
    tiny.add_argument("--dtype", choices=["bfloat16", "float32"], default=default.dtype, help="type of weights and KV")
    tiny.add_argument("--seed", type=int, default=default.seed, help="seed of the random weights")
    for kind in (smollm2, tiny):
        kind.add_argument("--out", type=Path, default=None, help="folder to write instead of the one in the cache")
        kind.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Progress goes to stderr, the folder alone to stdout, so that a script can use it."""
    try:
        name = args.model
        if name == "tiny":
            fields = {field.name: getattr(args, field.name) for field in dataclasses.fields(TinySpec)}
            name = TinySpec(**fields).name
        print(ensure_model(name, progress=_to_stderr, folder=args.out))
    except (ModelError, ValueError) as error:
        print(f"prebook model: {error}", file=sys.stderr)
        return 1
    return 0


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
