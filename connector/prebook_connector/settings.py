"""The connector's settings, read from ``kv_connector_extra_config["prebook"]`` of vLLM's ``--kv-transfer-config``.

The operator renders them; a hand-written config gets an error that names the key, what was given and what is allowed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class SettingsError(ValueError):
    """The connector's configuration cannot be used; the text names each key and the remedy."""


class ConnectorSettings(BaseModel):
    """Settings of one engine; times in seconds, sizes in bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    control_dir: Path | None = Field(default=None, description="Folder of the control sockets; none: no sockets.")
    lease_seconds: float = Field(
        default=30.0, ge=1.0, le=3600.0, description="How long P may write without hearing from D."
    )
    progressive: bool = Field(default=True, description="Push blocks as chunks settle, not only at the end of prefill.")
    by_layer: bool = Field(
        default=True, description="Push the prompt's last chunk layer by layer while it is computed."
    )
    min_bytes: int = Field(default=4 * 1024 * 1024, ge=0, description="Smallest WRITE before the prompt is complete.")
    max_in_flight: int = Field(default=2, ge=1, le=64, description="Open WRITEs per decode engine.")
    verify: Literal["off", "sample", "all"] = Field(
        default="off", description="Compare checksums of the KV on both sides."
    )
    model_revision: str = Field(default="", description="Part of the compatibility hash: pairs never mix revisions.")
    timeline_dir: Path | None = Field(default=None, description="Folder for per-transfer timelines; none: off.")
    flight_seconds: float = Field(
        default=1.0,
        ge=0.0,
        le=60.0,
        description="How long a WRITE of a dead peer may still be under way in the network.",
    )
    active_poll_seconds: float = Field(
        default=0.0005, ge=0.0, le=0.1, description="Polling interval while a request waits for a transfer's end."
    )
    waiting_poll_seconds: float = Field(
        default=0.02, gt=0.0, le=0.1, description="Longest polling interval of WRITEs that prefill computes behind."
    )
    idle_poll_seconds: float = Field(
        default=0.25, gt=0.0, le=1.0, description="Longest polling interval while nothing moves."
    )


def parse(extra_config: dict[str, Any]) -> ConnectorSettings:
    """Settings out of ``kv_connector_extra_config``. Raises :class:`SettingsError`."""
    raw = extra_config.get("prebook", {})
    if not isinstance(raw, dict):
        raise SettingsError(
            f'kv_connector_extra_config.prebook must be an object, not {type(raw).__name__}; use {{"prebook": {{}}}}'
        )
    try:
        return ConnectorSettings.model_validate(raw)
    except ValidationError as error:
        lines = [
            f"kv_connector_extra_config.prebook.{'.'.join(map(str, item['loc']))}: {item['msg']} "
            f"(given: {item['input']!r:.60})"
            for item in error.errors()
        ]
        allowed = ", ".join(ConnectorSettings.model_fields)
        raise SettingsError("\n".join(lines) + f"\nallowed keys: {allowed}") from error
