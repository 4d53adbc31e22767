"""The model under test as its config.json describes it, and prompts of an exact number of tokens."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """What prompts and line times need to know of a model."""

    vocabulary: int
    kv_bytes_per_token: int
    dtype: str

    @classmethod
    def of(cls, folder: Path) -> ModelShape:
        """Reads `folder`/config.json. Raises ValueError when a field that is needed is missing."""
        return cls.from_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ModelShape:
        """From the parsed config.json of a model with ordinary attention in every layer."""
        try:
            heads = int(config["num_attention_heads"])
            head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
            kv_heads = int(config.get("num_key_value_heads") or heads)
            layers = int(config["num_hidden_layers"])
            vocabulary = int(config["vocab_size"])
        except KeyError as error:
            raise ValueError(f"config.json has no {error}") from error
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        width = 4 if dtype == "float32" else 2
        return cls(vocabulary=vocabulary, kv_bytes_per_token=2 * layers * kv_heads * head_dim * width, dtype=dtype)


def token_prompt(count: int, *, vocabulary: int, seed: str) -> list[int]:
    """`count` token ids, random but the same for the same seed; the first ids are left out as special tokens."""
    source = random.Random(seed)
    first = min(16, vocabulary // 2)
    return [source.randrange(first, vocabulary) for _ in range(count)]


def line_time(tokens: int, *, kv_bytes_per_token: int, bits_per_second: float) -> float:
    """Seconds that the KV of `tokens` tokens takes on a link, without any overhead."""
    return tokens * kv_bytes_per_token * 8 / bits_per_second
