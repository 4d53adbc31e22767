"""What the patterns of the API mean, for people."""

from __future__ import annotations

from typing import Final

from prebook_operator.api.base import BYTES, DNS_LABEL, DNS_NAME, QUANTITY
from prebook_operator.api.spec import IMAGE, MODEL_URI, RATIO

_FORMS: Final = {
    MODEL_URI: "Use hf://org/name, s3://bucket/path, pvc://claim/path or file:///path",
    QUANTITY: "Use a quantity such as 4, 500m or 16Gi",
    BYTES: "Use a whole number of bytes such as 4Mi",
    DNS_LABEL: "Use lower-case letters, digits and '-', at most 63",
    DNS_NAME: "Use the name of an object: lower-case letters, digits, '-' and '.'",
    RATIO: "Use prefill:decode, such as 1:4",
    IMAGE: "Use an image such as vllm/vllm-openai:v0.32.0",
}


def form_of(pattern: str) -> str:
    """How a value that does not match `pattern` must look."""
    return _FORMS.get(pattern, f"It must match {pattern}")
