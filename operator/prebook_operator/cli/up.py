"""``prebook up FILE``: the pods of a model as processes of this machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from prebook_operator.local.display import make_display
from prebook_operator.local.errors import UserError
from prebook_operator.local.session import Question, UpOptions, run_foreground
from prebook_operator.local.source import Source, read_source
from prebook_operator.local.state import RunState, StateFolder

if TYPE_CHECKING:
    from prebook_operator.cli.main import Subparsers

DESCRIPTION: Final = """\
Run the pods of a DisaggregatedModel on this machine: the same manifests that the operator renders, as local processes,
one loopback address per pod, and an OpenAI-compatible front door on 127.0.0.1. No cluster and no container is needed.

FILE holds one DisaggregatedModel, and any Secrets and ConfigMaps that it refers to. Ctrl-C drains and ends all."""

EXAMPLES: Final = """\
examples:
  prebook up examples/smollm2-1p1d.yaml --ask "What is the capital of France?"
  prebook up examples/smollm2-1p1d.yaml --ask-file prompt.txt --max-tokens 64
  prebook up examples/tiny-2p2d.yaml --detach          keep it running; then: prebook ps, prebook logs, prebook down

exit status: 0 done, 2 the file or an option is wrong, 3 this machine lacks something, 4 a pod cannot be brought up,
5 the question got no answer, 128 + signal when interrupted"""

DEFAULT_PORT: Final = 8000


def register(subparsers: Subparsers) -> None:
    """Adds `up`."""
    parser = subparsers.add_parser(
        "up",
        help="run a model's pods on this machine",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="file with a DisaggregatedModel")
    question = parser.add_mutually_exclusive_group()
    question.add_argument("--ask", metavar="TEXT", help="ask one question, print the answer and how it was served, end")
    question.add_argument("--ask-file", metavar="FILE", type=Path, help="like --ask, with the text of a file")
    parser.add_argument(
        "--max-tokens", type=_positive, default=128, help="longest answer, in tokens (default: %(default)s)"
    )
    parser.add_argument("--detach", "-d", action="store_true", help="keep it running in the background")
    parser.add_argument(
        "--port", type=_port, help=f"port of the front door on 127.0.0.1 (default: {DEFAULT_PORT}; 0: any)"
    )
    parser.add_argument(
        "--logs",
        action=argparse.BooleanOptionalAction,
        help="show the pods' output (default: only when nothing is asked)",
    )
    parser.add_argument("--force", action="store_true", help="start even when memory seems too small")
    parser.add_argument("--share-gpus", action="store_true", help="let several pods use the same GPU")
    parser.add_argument("--timeline", metavar="DIR", type=Path, help="write one timeline per request to DIR")
    parser.add_argument("--supervisor", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Starts, finds or asks a run; see the module's description for the exit status."""
    source = read_source(arguments.file)
    question = _question(arguments)
    state = StateFolder(source.name)
    if arguments.detach:
        return _detached(source, arguments=arguments, question=question, state=state)
    if not state.acquire():
        return _running(source, arguments=arguments, question=question, state=state)
    try:
        logs = (question is None and not arguments.supervisor) if arguments.logs is None else arguments.logs
        options = UpOptions(
            port=DEFAULT_PORT if arguments.port is None else arguments.port,
            question=question,
            force=arguments.force,
            share_gpus=arguments.share_gpus,
            timeline_dir=arguments.timeline,
        )
        return run_foreground(source, options=options, state=state, display=make_display(sys.stderr, logs=logs))
    finally:
        state.release()


def _detached(source: Source, *, arguments: argparse.Namespace, question: Question | None, state: StateFolder) -> int:
    from prebook_operator.local.detached import ask_running, start_detached

    if state.running:
        return _running(source, arguments=arguments, question=question, state=state)
    passed = ["--supervisor"]
    passed += [f"--port={arguments.port}"] if arguments.port is not None else []
    passed += [flag for flag, given in (("--force", arguments.force), ("--share-gpus", arguments.share_gpus)) if given]
    passed += [f"--timeline={arguments.timeline.absolute()}"] if arguments.timeline else []
    _tell(start_detached(source, state=state, arguments=passed, write=_progress))
    if question is not None:
        ask_running(question, state=state)
    return 0


def _running(source: Source, *, arguments: argparse.Namespace, question: Question | None, state: StateFolder) -> int:
    from prebook_operator.local.detached import ask_running, reuse

    found = reuse(source, state=state, port=arguments.port or None, write=_progress)
    _tell(found)
    if question is not None:
        ask_running(question, state=state)
    return 0


def _question(arguments: argparse.Namespace) -> Question | None:
    text = arguments.ask
    if arguments.ask_file is not None:
        try:
            text = arguments.ask_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--ask-file: {error}") from error
    if text is None:
        return None
    if not text.strip():
        raise UserError("the question is empty")
    return Question(text=text, max_tokens=arguments.max_tokens)


def _tell(state: RunState) -> None:
    print(
        f"{state.name} is running at {state.endpoint}/v1 (prebook ps, prebook logs {state.name}, "
        f"prebook down {state.name})",
        file=sys.stderr,
    )


def _progress(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value < 65536:
        raise argparse.ArgumentTypeError("must be between 0 and 65535")
    return value
