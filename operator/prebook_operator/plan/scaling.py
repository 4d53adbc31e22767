"""How many engines each role gets: what was asked for, within the ratio bounds of the model.

The bound limits prefill engines per decode engine. When the two numbers asked for lie outside, the smaller role is
raised to the nearest allowed number if an autoscaler owns it (taking engines away because the other role is small
would cost capacity); only when the spec pins that role is the larger one lowered. A number that the spec itself gives
is never changed. Zero on either side switches the role off on purpose and is left alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor

from prebook_operator.api import derived
from prebook_operator.api.reasons import Reason
from prebook_operator.api.spec import DisaggregatedModelSpec, Role
from prebook_operator.api.validation import ratio_value


@dataclass(frozen=True, kw_only=True)
class DesiredReplicas:
    """Engines wanted for each role, and why."""

    prefill: int
    decode: int
    reason: Reason = Reason.WITHIN_RATIO
    message: str = ""

    def of(self, role: Role) -> int:
        """Engines wanted for `role`."""
        return self.prefill if role is Role.PREFILL else self.decode


def desired_replicas(
    spec: DisaggregatedModelSpec, *, prefill_scale: int | None, decode_scale: int | None
) -> DesiredReplicas:
    """Engines wanted, from the spec and from the numbers in the two ModelRoles (None while they do not exist; 1 is
    assumed)."""
    prefill = _asked(spec, Role.PREFILL, prefill_scale)
    decode = _asked(spec, Role.DECODE, decode_scale)
    if prefill == 0 or decode == 0:
        return DesiredReplicas(prefill=prefill, decode=decode)
    ratio = spec.scaling.ratio
    lowest = ratio_value(ratio.min) if ratio.min is not None else None
    highest = ratio_value(ratio.max) if ratio.max is not None else None
    actual = Fraction(prefill, decode)
    if lowest is not None and actual < lowest:
        bound = f"min {ratio.min}"
        if spec.prefill.replicas is None:
            return _clamped(Role.PREFILL, asked=prefill, prefill=ceil(decode * lowest), decode=decode, bound=bound)
        if spec.decode.replicas is None:
            return _clamped(
                Role.DECODE, asked=decode, prefill=prefill, decode=max(1, floor(prefill / lowest)), bound=bound
            )
    if highest is not None and actual > highest:
        bound = f"max {ratio.max}"
        if spec.decode.replicas is None:
            return _clamped(Role.DECODE, asked=decode, prefill=prefill, decode=ceil(prefill / highest), bound=bound)
        if spec.prefill.replicas is None:
            return _clamped(
                Role.PREFILL, asked=prefill, prefill=max(1, floor(decode * highest)), decode=decode, bound=bound
            )
    return DesiredReplicas(prefill=prefill, decode=decode)


def _asked(spec: DisaggregatedModelSpec, role: Role, scale: int | None) -> int:
    pinned = derived.pinned_replicas(spec, role)
    if pinned is not None:
        return pinned
    return 1 if scale is None else scale


def _clamped(role: Role, *, asked: int, prefill: int, decode: int, bound: str) -> DesiredReplicas:
    wanted = prefill if role is Role.PREFILL else decode
    message = f"{role} was asked for {asked} and runs {wanted}, because spec.scaling.ratio has {bound}"
    return DesiredReplicas(prefill=prefill, decode=decode, reason=Reason.CLAMPED_TO_RATIO, message=message)
