"""The flags that Prebook renders and refuses, against the parser of the vLLM that is installed."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest

from prebook_operator.api import Role, load
from prebook_operator.api.owned import OWNED_FLAG_FAMILIES, OWNED_FLAGS, owned_flag
from prebook_operator.render import cluster_context
from prebook_operator.render.engine import engine_args
from tests.model_documents import changed, minimal, p5en


@pytest.fixture(scope="module")
def parser() -> Any:
    """vLLM's own parser of the API server's arguments."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


def options(parser: argparse.ArgumentParser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings}


def test_every_owned_flag_exists(parser: argparse.ArgumentParser) -> None:
    assert set(OWNED_FLAGS) - options(parser) == set()


def test_no_other_flag_is_refused(parser: argparse.ArgumentParser) -> None:
    refused = {option for option in options(parser) if owned_flag(option) is not None}
    families = {option for option in refused if option.startswith(tuple(OWNED_FLAG_FAMILIES))}
    assert refused - families - set(OWNED_FLAGS) == set()


def test_every_spelling_that_the_parser_takes_for_an_owned_flag_is_refused(parser: argparse.ArgumentParser) -> None:
    """argparse accepts any unambiguous beginning of a flag."""
    for flag in OWNED_FLAGS:
        for length in range(3, len(flag)):
            beginning = flag[:length]
            if beginning not in options(parser):
                assert owned_flag(f"{beginning}=x") is not None, beginning


@pytest.mark.parametrize("connector", ["Prebook", "NixlPush", "NixlPull"])
@pytest.mark.parametrize("role", list(Role))
def test_rendered_arguments_are_accepted(parser: Any, connector: str, role: Role) -> None:
    document = changed(p5en(), {"spec/transfer/connector": connector, "spec/engine/args": ["--max-model-len=32768"]})
    args = engine_args(load(document), cluster_context("x", operator_image="i"), role, "0123abcd")
    parsed = parser.parse_args(args)
    assert parsed.model == "Qwen/Qwen3-32B"
    assert parsed.served_model_name == ["qwen3-32b"]
    assert parsed.tensor_parallel_size == 4
    assert parsed.middleware == ["prebook_connector.dispatch.DispatchMiddleware"]
    assert parsed.max_model_len == 32768
    assert parsed.block_size == 128
    assert parsed.shutdown_timeout == 60


@pytest.mark.parametrize("connector", ["Prebook", "NixlPush", "NixlPull"])
def test_the_transfer_configuration_is_one_that_vllm_knows(connector: str) -> None:
    from vllm.config import KVTransferConfig

    document = changed(minimal(), {"spec/transfer/connector": connector})
    args = engine_args(load(document), cluster_context("x", operator_image="i"), Role.DECODE, "0123abcd")
    text = next(arg.split("=", 1)[1] for arg in args if arg.startswith("--kv-transfer-config="))
    config = KVTransferConfig(**json.loads(text))
    assert config.kv_role == "kv_consumer"
    assert config.kv_load_failure_policy == "recompute"
    assert config.kv_buffer_device == "cpu"
