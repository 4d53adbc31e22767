"""Shapes that pass through rendering."""

from __future__ import annotations

from typing import Any

Manifest = dict[str, Any]
"""A Kubernetes object, or a part of one, as plain data."""


def without_empty(**fields: Any) -> Manifest:
    """The fields that have a value: None, empty lists and empty maps are left out, zero and False stay."""
    return {key: value for key, value in fields.items() if value is not None and value not in ({}, [])}
