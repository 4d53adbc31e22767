"""What is rendered, read by those that it is rendered for: dispatch and the connector."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest

from prebook_connector.dispatch.settings import Settings
from prebook_connector.settings import parse
from prebook_operator.api import Connector, OnFailure, Role, load
from prebook_operator.api.spec import FirstToken, Verify
from prebook_operator.local.expand import expand_references
from prebook_operator.plan import revision_of
from prebook_operator.render import cluster_context
from prebook_operator.render.engine import FIRST_TOKEN_PROCESSOR, dispatch_settings, engine_args, kv_transfer_config
from tests.model_documents import changed, minimal, p5en

CTX = cluster_context("team-a", operator_image="i")


def dispatch(document: dict[str, Any], role: Role) -> Settings:
    model = load(document)
    text = json.dumps(dispatch_settings(model, CTX, role, revision_of(model).rev8))
    return Settings.from_environment({"PREBOOK_DISPATCH": expand_references(text, variables={"POD_IP": "10.0.0.7"})})


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("connector", list(Connector))
@pytest.mark.parametrize("on_failure", list(OnFailure))
def test_dispatch_reads_every_choice(role: Role, connector: Connector, on_failure: OnFailure) -> None:
    document = changed(p5en(), {"spec/transfer": {"connector": connector.value, "onFailure": on_failure.value}})
    settings = dispatch(document, role)
    assert settings.role.value == role.value
    assert settings.tp_size == 4
    assert settings.side_channel_host == "10.0.0.7"
    assert settings.bind == "10.0.0.7:8000"
    assert settings.recompute == (on_failure is OnFailure.RECOMPUTE)
    assert settings.mode.value == {"Prebook": "prebook", "NixlPush": "nixl-push", "NixlPull": "nixl-pull"}[connector]


def test_dispatch_ignores_nothing_that_is_rendered() -> None:
    model = load(minimal())
    assert dispatch_settings(model, CTX, Role.DECODE, "0123abcd").keys() <= Settings.model_fields.keys()


@pytest.mark.parametrize("first_token", list(FirstToken))
def test_whose_first_token_reaches_dispatch_and_the_sampler(first_token: FirstToken) -> None:
    document = changed(minimal(), {"spec/transfer/firstToken": first_token.value})
    model, opens = load(document), first_token is FirstToken.PREFILL
    for role in Role:
        assert dispatch(document, role).prefill_opens is opens
        flags = [arg for arg in engine_args(model, CTX, role, "0123abcd") if arg.startswith("--logits-processors")]
        assert flags == ([f"--logits-processors={FIRST_TOKEN_PROCESSOR}"] if opens and role is Role.DECODE else [])
    module, _, name = FIRST_TOKEN_PROCESSOR.partition(":")
    assert hasattr(importlib.import_module(module), name)


@pytest.mark.parametrize("verify", list(Verify))
def test_the_connector_reads_every_choice(verify: Verify) -> None:
    document = changed(minimal(), {"spec/transfer": {"verify": verify.value}})
    settings = parse(kv_transfer_config(load(document), CTX, Role.DECODE, "0123abcd")["kv_connector_extra_config"])
    assert settings.model_revision == "0123abcd"
    assert settings.verify == verify.value.lower()


@pytest.mark.parametrize(
    "transfer",
    [
        {"leaseSeconds": 2, "progressive": {"minBytes": 0, "maxInFlight": 1}},
        {"leaseSeconds": 600, "progressive": {"minBytes": "1Ti", "maxInFlight": 64}},
    ],
)
def test_the_connector_takes_every_number_that_the_api_takes(transfer: dict[str, Any]) -> None:
    document = changed(minimal(), {"spec/transfer": transfer})
    settings = parse(kv_transfer_config(load(document), CTX, Role.PREFILL, "0123abcd")["kv_connector_extra_config"])
    assert settings.lease_seconds == transfer["leaseSeconds"]
    assert settings.max_in_flight == transfer["progressive"]["maxInFlight"]
