"""Errors of `load`: each names the field and says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from prebook_operator.api import Allow, UserError, load
from tests.model_cases import GOOD, WRONG, Good, Wrong
from tests.model_documents import changed, minimal


def faults(document: Any, **options: Any) -> dict[str, str]:
    with pytest.raises(UserError) as caught:
        load(document, **options)
    return {error.path: f"{error.message}. {error.remedy}" for error in caught.value.errors}


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.id)
def test_good_documents_load(case: Good) -> None:
    assert load(case.document).name == case.document["metadata"]["name"]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.id)
def test_wrong_documents_name_the_one_field_at_fault(case: Wrong) -> None:
    found = faults(case.document)
    assert list(found) == [case.path]
    assert case.says in found[case.path]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.id)
def test_every_fault_has_a_remedy(case: Wrong) -> None:
    with pytest.raises(UserError) as caught:
        load(case.document)
    assert all(error.remedy for error in caught.value.errors)


def test_all_faults_are_told_at_once() -> None:
    document = changed(
        minimal(), {"metadata/name": "Demo", "spec/engine/args": ["--port=1"], "spec/hardware/efaPerGPU": 1}
    )
    assert list(faults(document)) == ["metadata.name", "spec.engine.args[0]", "spec.hardware.efaPerGPU"]


def test_text_and_object_load_alike() -> None:
    assert load(yaml.safe_dump(minimal())) == load(minimal())


def test_a_misspelt_field_gets_a_suggestion() -> None:
    found = faults(changed(minimal(), {"spec/transfer": {"leaseSecond": 3}}))
    assert found == {"spec.transfer.leaseSecond": "is not a known field. Did you mean `leaseSeconds`?"}


def test_an_unknown_field_lists_the_known_ones() -> None:
    found = faults(changed(minimal(), {"spec/routing": {"qqq": 3}}))
    assert found == {"spec.routing.qqq": "is not a known field. Known here: localPrefillMaxTokens, policy"}


def test_a_field_in_a_list_element_gets_a_suggestion() -> None:
    found = faults(changed(minimal(), {"spec/engine/env": [{"name": "A", "valu": "1"}]}))
    assert found == {"spec.engine.env[0].valu": "is not a known field. Did you mean `value`?"}


def test_float_quantities_are_refused_where_kubernetes_refuses_them() -> None:
    overlay = [{"name": "engine", "resources": {"limits": {"cpu": 0.5}}}]
    found = faults(changed(minimal(), {"spec/decode/template/spec/containers": overlay}))
    assert list(found) == ["spec.decode.template.spec.containers[0].resources.limits.cpu"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "not valid YAML (line 1"),
        ("", "holds no object of kind DisaggregatedModel"),
        ("- 1\n", "holds no object of kind DisaggregatedModel"),
        ("kind: Pod\napiVersion: v1\n---\nkind: Service\n", "holds no object of kind DisaggregatedModel"),
    ],
)
def test_text_that_holds_no_model(text: str, says: str) -> None:
    assert says in faults(text)[""]


def test_two_models_in_one_file() -> None:
    text = yaml.safe_dump_all([minimal("a"), minimal("b")])
    assert "holds 2 objects" in faults(text)[""]


def test_other_objects_beside_the_model_are_passed_over() -> None:
    text = yaml.safe_dump_all([{"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "x"}}, minimal()])
    assert load(text).name == "demo"


def test_wrong_kind_and_version() -> None:
    document = changed(minimal(), {"apiVersion": "prebook.dev/v1", "kind": "Model"})
    assert faults(document) == {
        "apiVersion": "is 'prebook.dev/v1'. Use `apiVersion: prebook.dev/v1alpha1`",
        "kind": "is 'Model'. Use `kind: DisaggregatedModel`",
    }


def test_what_the_operator_allows_is_accepted() -> None:
    allow = Allow(
        host_path=True,
        host_namespaces=True,
        privileged=True,
        capabilities=frozenset({"SYS_ADMIN"}),
        service_accounts=frozenset({"admin"}),
    )
    refused_by_operator = [case for case in WRONG if not case.cel]
    assert refused_by_operator
    for case in refused_by_operator:
        load(case.document, allow=allow)


def test_other_service_accounts_stay_refused() -> None:
    document = changed(minimal(), {"spec/decode/template/spec/serviceAccountName": "root"})
    found = faults(document, allow=Allow(service_accounts=frozenset({"admin"})))
    assert list(found) == ["spec.decode.template.spec.serviceAccountName"]


def test_objects_from_the_api_server_load_with_their_metadata_and_status() -> None:
    document = changed(
        minimal(),
        {
            "metadata/uid": "u-1",
            "metadata/generation": 7,
            "metadata/managedFields": [{"manager": "kubectl"}],
            "metadata/resourceVersion": "5",
            "status": {
                "observedGeneration": 6,
                "fieldOfALaterVersion": 1,
                "pairs": {"ready": 1, "possible": 2, "new": 3},
            },
        },
    )
    model = load(document)
    assert (model.metadata.uid, model.metadata.generation) == ("u-1", 7)
    assert model.status is not None
    assert model.status.pairs.possible == 2


def test_the_message_reads_as_a_list() -> None:
    with pytest.raises(UserError) as caught:
        load(changed(minimal(), {"spec/model/uri": "nope://x"}))
    assert str(caught.value) == (
        "DisaggregatedModel demo has 1 error:\n"
        "  spec.model.uri: 'nope://x' does not have the right form. "
        "Use hf://org/name, s3://bucket/path, pvc://claim/path or file:///path"
    )
