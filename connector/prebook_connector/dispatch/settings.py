"""What a pod's dispatcher was told, read once from the environment variable ``PREBOOK_DISPATCH`` (JSON).

The operator renders it; every field that a person may want to change has its default, and the reason for it, here.
Durations are seconds, sizes are bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from prebook_connector.dispatch.addresses import parse_source

VARIABLE = "PREBOOK_DISPATCH"


class SettingsError(ValueError):
    """The environment does not describe a dispatcher; the message names the field and what is expected."""


class Role(StrEnum):
    """Which half of a model this pod serves."""

    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def other(self) -> Role:
        """The role of this pod's peers."""
        return Role.DECODE if self is Role.PREFILL else Role.PREFILL


class Mode(StrEnum):
    """Which connector the engines were started with, and therefore how the two legs are driven."""

    PREBOOK = "prebook"
    NIXL_PUSH = "nixl-push"
    NIXL_PULL = "nixl-pull"


class Policy(StrEnum):
    """How a prefill peer is chosen."""

    LEAST_LOADED = "LeastLoaded"


class OnFailure(StrEnum):
    """What happens to a request whose prefill failed: decode computes the prompt, or the client gets an error."""

    RECOMPUTE = "recompute"
    FAIL = "fail"


class FirstToken(StrEnum):
    """Whose first token a client's stream starts with."""

    DECODE = "decode"
    PREFILL = "prefill"


class Timing(BaseModel):
    """Deadlines and intervals. None of them is sent to a peer; all are measured on the monotonic clock."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    connect: float = Field(default=2.0, gt=0)
    """Opening a connection to a prefill peer. Pods of one cluster connect within milliseconds or not at all."""
    prefill: float = Field(default=300.0, gt=0)
    """A whole prefill leg, queueing included. Generous: a leg of a live peer is only late, never lost."""
    first_byte: float = Field(default=600.0, gt=0)
    """From the request's arrival to the first byte of its answer while a remote attempt is under way."""
    body: float = Field(default=60.0, gt=0)
    """Receiving the client's request body."""
    poll: float = Field(default=1.0, gt=0)
    """Identity poll of a peer that is new, failing, or works for us right now."""
    poll_steady: float = Field(default=3.0, gt=0)
    """Identity poll of a peer about which nothing changes."""
    poll_timeout: float = Field(default=2.0, gt=0)
    """One identity poll. A busy API server answers within tens of milliseconds."""
    lost_after: float = Field(default=6.0, gt=0)
    """Polls that only time out for this long make a peer lost (a refused connection does so at once)."""
    resolve: float = Field(default=5.0, gt=0)
    """Interval between two look-ups of a DNS source."""
    forget_after: float = Field(default=30.0, gt=0)
    """How long the last known peers outlive a DNS source that fails or answers with nothing."""
    control: float = Field(default=2.0, gt=0)
    """One request on a control socket of this pod's connector."""
    abandoned: float = Field(default=30.0, gt=0)
    """How long an abandoned decode leg may take to notice that its client left before its task is cancelled."""


class Settings(BaseModel):
    """The dispatcher of one pod. ``from_environment`` is the only way the engine builds it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    role: Role
    mode: Mode = Mode.PREBOOK
    peers: str
    token_file: Path
    revision: str = ""
    control_dir: Path = Path("/run/prebook")
    local_prefill_max_tokens: int = Field(default=64, ge=0)
    policy: Policy = Policy.LEAST_LOADED
    on_failure: OnFailure = OnFailure.RECOMPUTE
    first_token: FirstToken = FirstToken.DECODE
    lease_seconds: float = Field(default=30.0, gt=0)
    side_channel_host: str
    side_channel_port: int = Field(default=5600, ge=1, le=65535)
    tp_size: int = Field(default=1, ge=1)
    pp_size: int = Field(default=1, ge=1)
    dp_size: int = Field(default=1, ge=1)
    served_model: str = ""
    bind: str
    max_body_bytes: int = Field(default=64 << 20, ge=1024)
    """A request body larger than this is refused with 413. Room for a few images; far above any text prompt."""
    max_retries: int = Field(default=1, ge=0, le=8)
    """How many further prefill peers are tried before decode computes the prompt itself."""
    timing: Timing = Timing()

    @field_validator("side_channel_host")
    @classmethod
    def _own_address(cls, value: str) -> str:
        if value in {"", "0.0.0.0", "::", "localhost"} or value.startswith("$("):
            raise ValueError(f"must be the pod's own IP address, not {value!r}")
        return value

    @field_validator("peers")
    @classmethod
    def _source_exists(cls, value: str) -> str:
        parse_source(value)
        return value

    @property
    def recompute(self) -> bool:
        """Whether this decode engine may compute a prompt whose prefill failed."""
        return self.on_failure is OnFailure.RECOMPUTE

    @property
    def prefill_opens(self) -> bool:
        """Whether streams may start with prefill's token: the stock connectors cannot make decode follow it."""
        return self.first_token is FirstToken.PREFILL and self.mode is Mode.PREBOOK

    @property
    def workers(self) -> int:
        """How many worker control sockets the connector of this pod opens."""
        return self.tp_size * self.pp_size * self.dp_size

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Reads ``PREBOOK_DISPATCH``. Raises :class:`SettingsError` with one line per wrong field."""
        source = os.environ if environment is None else environment
        text = source.get(VARIABLE)
        if not text:
            raise SettingsError(f"{VARIABLE} is not set; the operator renders it for every engine pod")
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            lines = [
                f"{'.'.join(str(part) for part in item['loc']) or VARIABLE}: {item['msg']}"
                for item in error.errors(include_url=False, include_input=False)
            ]
            raise SettingsError(f"{VARIABLE} is not valid: " + "; ".join(lines)) from None
