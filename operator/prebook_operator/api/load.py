"""From a document (text or dict) to a checked `DisaggregatedModel`, or to every fault in it by field path."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from prebook_operator.api.allow import NOTHING, Allow
from prebook_operator.api.base import API_VERSION
from prebook_operator.api.errors import FieldError, UserError
from prebook_operator.api.forms import form_of
from prebook_operator.api.resources import DisaggregatedModel
from prebook_operator.api.schema_walk import known_fields
from prebook_operator.api.validation import check

KIND: Final = "DisaggregatedModel"
_BOUNDS: Final = {
    "max_length": ("is too long", "Use at most {} characters or elements"),
    "min_length": ("is too short", "Use at least {} characters or elements"),
    "ge": ("is out of range", "Use at least {}"),
    "le": ("is out of range", "Use at most {}"),
}
"""pydantic's name of a bound → what is wrong, and what to do."""


def load(document: str | Mapping[str, Any], *, allow: Allow = NOTHING) -> DisaggregatedModel:
    """One checked DisaggregatedModel from YAML or JSON text, or from an object as the API server gives it.

    Raises UserError with one FieldError per fault. Text with several documents is accepted when exactly one of them
    is a DisaggregatedModel.
    """
    data = parse(document) if isinstance(document, str) else document
    subject = _subject(data)
    _check_kind(data, subject=subject)
    try:
        model = DisaggregatedModel.model_validate(dict(data))
    except ValidationError as error:
        raise UserError([_field_error(detail) for detail in error.errors()], subject=subject) from None
    faults = check(model, allow=allow)
    if faults:
        raise UserError(faults, subject=subject)
    return model


def parse(text: str) -> Mapping[str, Any]:
    """The one DisaggregatedModel in YAML or JSON text, not checked yet. Raises UserError."""
    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
        problem = getattr(error, "problem", None) or "cannot be read"
        raise UserError(
            [FieldError("", f"not valid YAML{where}: {problem}", "Correct the text at that place")], subject="the file"
        ) from None
    mine = [document for document in documents if isinstance(document, Mapping) and document.get("kind") == KIND]
    if len(mine) == 1:
        return mine[0]
    if len(mine) > 1:
        raise UserError(
            [FieldError("", f"holds {len(mine)} objects of kind {KIND}", "Put each into a file of its own")],
            subject="the file",
        )
    if len(documents) == 1 and isinstance(documents[0], Mapping):
        return documents[0]
    raise UserError(
        [FieldError("", f"holds no object of kind {KIND}", f"Start it with `kind: {KIND}`")], subject="the file"
    )


def _subject(data: Mapping[str, Any]) -> str:
    metadata = data.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    return f"{KIND} {name}" if isinstance(name, str) else KIND


def _check_kind(data: Mapping[str, Any], *, subject: str) -> None:
    faults = [
        FieldError(field, f"is {data.get(field)!r}" if field in data else "is missing", f"Use `{field}: {wanted}`")
        for field, wanted in (("apiVersion", API_VERSION), ("kind", KIND))
        if data.get(field) != wanted
    ]
    if faults:
        raise UserError(faults, subject=subject)


def field_path(location: Sequence[int | str]) -> str:
    """pydantic's location as a Kubernetes field path: `('spec', 'env', 0, 'name')` → `spec.env[0].name`."""
    text = ""
    for part in location:
        if part == "[key]":
            continue
        if isinstance(part, int) or "." in part or "/" in part:
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def _field_error(detail: ErrorDetails) -> FieldError:
    location = detail["loc"]
    message, remedy = _explain(detail)
    return FieldError(field_path(location), message, remedy or _description_of(location))


def _explain(detail: ErrorDetails) -> tuple[str, str]:
    """What is wrong with one value, and what to do; an empty remedy means that the field's description says it best."""
    context, given, kind = detail.get("ctx", {}), _shorten(detail.get("input")), detail["type"]
    if kind == "missing":
        return "is required", ""
    if kind == "extra_forbidden":
        return "is not a known field", _suggest(detail["loc"])
    if kind in ("enum", "literal_error"):
        return f"{given} is not allowed", f"Use one of {context['expected']}"
    if kind == "string_pattern_mismatch":
        return f"{given} does not have the right form", form_of(context["pattern"])
    bound = next((name for name in _BOUNDS if name in context), None)
    if bound is not None:
        fault, remedy = _BOUNDS[bound]
        return f"{given} {fault}", remedy.format(context[bound])
    return f"{given}: {detail['msg'][:1].lower()}{detail['msg'][1:]}", ""


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _suggest(location: Sequence[int | str]) -> str:
    known = known_fields(DisaggregatedModel, location[:-1])
    wrong = str(location[-1])
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(wrong.lower(), by_lower, n=1, cutoff=0.6)
    if close:
        return f"Did you mean `{by_lower[close[0]]}`?"
    return f"Known here: {', '.join(sorted(known))}" if known else "Remove it"


def _description_of(location: Sequence[int | str]) -> str:
    field = known_fields(DisaggregatedModel, location[:-1]).get(str(location[-1]))
    return field.split("\n", 1)[0] if field else ""
