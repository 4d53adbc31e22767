"""Which fields exist at a place of an API type, for messages that suggest the right name."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel


def known_fields(root: type[BaseModel], location: Sequence[int | str]) -> dict[str, str]:
    """Wire names → descriptions of the fields at `location` below `root`; empty when no object type is there."""
    current: Any = root
    for part in location:
        current = _step(current, part)
        if current is None:
            return {}
    current = _object_type(current)
    if current is None:
        return {}
    return {info.alias or name: info.description or "" for name, info in current.model_fields.items()}


def _step(annotation: Any, part: int | str) -> Any:
    if isinstance(part, int):
        return _element(annotation)
    model = _object_type(annotation)
    if model is None:
        return _element(annotation)
    return next((info.annotation for name, info in model.model_fields.items() if part in (info.alias, name)), None)


def _object_type(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        candidates = (_object_type(argument) for argument in get_args(annotation))
        return next((candidate for candidate in candidates if candidate is not None), None)
    return None


def _element(annotation: Any) -> Any:
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType, Annotated):
        candidates = (_element(argument) for argument in get_args(annotation))
        return next((candidate for candidate in candidates if candidate is not None), None)
    if origin is list:
        return get_args(annotation)[0]
    if origin is dict:
        return get_args(annotation)[1]
    return None
