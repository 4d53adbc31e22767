"""The generated CRDs: structural, bounded, small, and the same every time. What the server makes of them is in
tests/apiserver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from prebook_operator.api.base import ApiModel
from prebook_operator.api.crd import MAX_BYTES, crd_files, crds, structural
from prebook_operator.api.crd_rules import Rule

CRDS = Path(__file__).resolve().parents[2] / "crds"
NAMES = sorted(crds())


def schema_of(name: str) -> dict[str, Any]:
    schema: dict[str, Any] = crds()[name]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def walk(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, value in schema.get("properties", {}).items():
        yield from walk(value, f"{path}.{name}")
    if "items" in schema:
        yield from walk(schema["items"], f"{path}[]")
    if isinstance(schema.get("additionalProperties"), dict):
        yield from walk(schema["additionalProperties"], f"{path}{{}}")


def fields(name: str) -> list[tuple[str, dict[str, Any]]]:
    own = (".apiVersion", ".kind", ".metadata")
    return [(path, schema) for path, schema in walk(schema_of(name)) if not path.startswith(own)]


@pytest.mark.parametrize("name", NAMES)
def test_the_files_in_the_repository_are_current(name: str) -> None:
    assert (CRDS / name).read_text() == crd_files()[name]


@pytest.mark.parametrize("name", NAMES)
def test_small_enough_for_every_way_of_applying(name: str) -> None:
    assert len(crd_files()[name].encode()) < MAX_BYTES
    assert yaml.safe_load(crd_files()[name]) == crds()[name]


@pytest.mark.parametrize("name", NAMES)
def test_structural(name: str) -> None:
    for path, schema in walk(schema_of(name)):
        assert (
            not {"anyOf", "oneOf", "allOf", "$ref", "$defs", "const", "title", "patternProperties"} & schema.keys()
        ), path
        assert "type" in schema or schema.get("x-kubernetes-int-or-string"), path
        assert schema.get("default", 0) is not None, path


@pytest.mark.parametrize("name", NAMES)
def test_everything_is_bounded(name: str) -> None:
    for path, schema in fields(name):
        kind = schema.get("type")
        if kind == "string":
            assert "maxLength" in schema, path
        if kind == "array":
            assert "maxItems" in schema, path
            assert "x-kubernetes-list-type" in schema, path
        if "additionalProperties" in schema:
            assert "maxProperties" in schema, path
        if kind == "integer":
            assert "minimum" in schema, path


@pytest.mark.parametrize("name", NAMES)
def test_everything_is_explained(name: str) -> None:
    for path, schema in fields(name):
        if not path.endswith(("[]", "{}")):
            assert schema.get("description"), path


@pytest.mark.parametrize("name", NAMES)
def test_map_lists_have_their_keys(name: str) -> None:
    for path, schema in fields(name):
        for key in schema.get("x-kubernetes-list-map-keys", []):
            item = schema["items"]
            assert key in item.get("required", []) or "default" in item["properties"][key], path


def test_every_rule_has_a_message_and_a_field_that_exists() -> None:
    for name in NAMES:
        for path, schema in walk(schema_of(name)):
            for rule in schema.get("x-kubernetes-validations", []):
                assert rule["message"], path
                place = schema
                for step in rule.get("fieldPath", "").split(".")[1:]:
                    place = place["properties"][step]


def test_a_rule_for_a_field_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no field spec\.nothing"):
        structural(_Tiny, {("spec", "nothing"): (Rule(rule="true", message="m"),)})


def test_a_union_of_types_is_an_error() -> None:
    with pytest.raises(ValueError, match="union of 2 types"):
        structural(_Union, {})


class _Spec(ApiModel):
    """A spec."""

    size: int = 1
    """How many."""


class _Tiny(BaseModel):
    """An object."""

    spec: _Spec
    """What is asked for."""


class _Union(BaseModel):
    """An object."""

    spec: int | str
    """What is asked for."""
