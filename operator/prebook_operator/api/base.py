"""Foundations of the API types: naming, strictness, and the bounded scalar types that the schema is made of.

Every string, list and map of the API is bounded. The API server prices CEL rules by the largest value that a field
can hold, and an unbounded field makes a rule unaffordable (kubernetes#121162).
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, WithJsonSchema
from pydantic.alias_generators import to_camel

GROUP: Final = "prebook.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
SCHEMA_VERSION: Final = 1
"""Rises with every change of the schema that the operator depends on; CRDs carry it as an annotation, so an operator
can tell that the cluster's CRDs are older than itself."""


class ApiModel(BaseModel):
    """Base of every API type: camelCase on the wire, snake_case in Python, immutable, unknown fields refused."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )

    def to_wire(self) -> dict[str, Any]:
        """The object as Kubernetes sees it: camelCase keys, no nulls."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


DNS_LABEL: Final = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
DNS_NAME: Final = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
LABEL_KEY: Final = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
LABEL_VALUE: Final = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"
QUANTITY: Final = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
BYTES: Final = r"^[0-9]+(k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"

Label = Annotated[str, StringConstraints(min_length=1, max_length=63, pattern=DNS_LABEL)]
"""A DNS label: container and volume names."""
ObjectName = Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=DNS_NAME)]
"""Name of another object of the same namespace."""
LabelKey = Annotated[str, StringConstraints(min_length=1, max_length=317, pattern=LABEL_KEY)]
LabelValue = Annotated[str, StringConstraints(max_length=63, pattern=LABEL_VALUE)]
Labels = Annotated[dict[LabelKey, LabelValue], Field(max_length=64)]
Annotations = Annotated[dict[LabelKey, Annotated[str, StringConstraints(max_length=4096)]], Field(max_length=64)]
AbsolutePath = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=r"^/[^\x00]*$")]
EnvName = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$")]


def _number_to_text(value: Any) -> Any:
    # YAML reads `cpu: 4` as a number, and Kubernetes allows whole numbers as quantities. A float is left for the type
    # check to refuse.
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Quantity = Annotated[
    str,
    BeforeValidator(_number_to_text),
    StringConstraints(min_length=1, max_length=32, pattern=QUANTITY),
    WithJsonSchema({"x-kubernetes-int-or-string": True, "maxLength": 32, "pattern": QUANTITY}),
]
"""A Kubernetes quantity such as `4`, `500m` or `16Gi`; whole numbers may be written without quotes."""

Bytes = Annotated[
    str,
    BeforeValidator(_number_to_text),
    StringConstraints(min_length=1, max_length=32, pattern=BYTES),
    WithJsonSchema({"x-kubernetes-int-or-string": True, "maxLength": 32, "pattern": BYTES}),
]
"""A whole number of bytes, such as `4Mi`."""

_SUFFIXES: Final[dict[str, Decimal]] = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{name: Decimal(1000) ** power for power, name in enumerate(("k", "M", "G", "T", "P"), start=1)},
    **{name: Decimal(1024) ** power for power, name in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi"), start=1)},
}


def quantity_value(text: str) -> Decimal:
    """Value of a quantity in its base unit (bytes, cores). Raises ValueError for anything that is not a quantity."""
    if not re.match(QUANTITY, text):
        raise ValueError(f"not a quantity: {text!r}")
    digits = re.match(r"[0-9.]+", text)
    if digits is None:  # unreachable after the check above; kept so that the type is certain
        raise ValueError(f"not a quantity: {text!r}")
    return Decimal(digits.group()) * _SUFFIXES[text[digits.end() :]]
