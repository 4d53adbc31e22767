"""How many engines: what is asked for, within the ratio bounds."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prebook_operator.api import DisaggregatedModelSpec, Reason, load
from prebook_operator.plan import DesiredReplicas, desired_replicas
from tests.model_documents import changed, minimal


def spec(**changes: object) -> DisaggregatedModelSpec:
    return load(changed(minimal(), {f"spec/{path}": value for path, value in changes.items()})).spec


def desired(asked: DisaggregatedModelSpec, prefill: int | None, decode: int | None) -> DesiredReplicas:
    return desired_replicas(asked, prefill_scale=prefill, decode_scale=decode)


@pytest.mark.parametrize(
    ("ratio", "asked", "wanted"),
    [
        ({}, (9, 1), (9, 1)),
        ({"min": "1:4"}, (1, 4), (1, 4)),
        ({"min": "1:4"}, (1, 5), (2, 5)),
        ({"max": "4:1"}, (9, 2), (9, 3)),
        ({"min": "1:4", "max": "4:1"}, (3, 3), (3, 3)),
        ({"min": "1:4"}, (0, 9), (0, 9)),
        ({"max": "4:1"}, (9, 0), (9, 0)),
        ({}, (None, None), (1, 1)),
    ],
)
def test_the_smaller_role_is_raised(
    ratio: dict[str, str], asked: tuple[int | None, int | None], wanted: tuple[int, int]
) -> None:
    found = desired(spec(scaling={"ratio": ratio}), *asked)
    assert (found.prefill, found.decode) == wanted
    clamped = asked not in ((None, None), wanted)
    assert found.reason is (Reason.CLAMPED_TO_RATIO if clamped else Reason.WITHIN_RATIO)
    assert bool(found.message) == clamped


def test_the_other_role_gives_way_when_the_smaller_one_is_pinned() -> None:
    found = desired(spec(scaling={"ratio": {"min": "1:4"}}, prefill={"replicas": 1}), 7, 10)
    assert (found.prefill, found.decode) == (1, 4)
    assert found.message == "decode was asked for 10 and runs 4, because spec.scaling.ratio has min 1:4"


def test_the_spec_wins_over_the_role() -> None:
    found = desired(spec(prefill={"replicas": 3}, decode={"replicas": 2}), 7, 8)
    assert (found.prefill, found.decode) == (3, 2)


@given(
    prefill=st.integers(1, 256),
    decode=st.integers(1, 256),
    low=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    wider=st.integers(2, 9),
)
def test_a_range_that_can_be_met_is_met_and_nothing_is_taken_away(
    prefill: int, decode: int, low: tuple[int, int], wider: int
) -> None:
    """Rounding up cannot leave a range whose upper bound is at least twice the lower one, once either role has 2
    engines or more."""
    least, most = Fraction(*low), Fraction(*low) * wider
    ratio = {"min": f"{low[0]}:{low[1]}", "max": f"{low[0] * wider}:{low[1]}"}
    found = desired(spec(scaling={"ratio": ratio}), prefill, decode)
    assert found.prefill >= prefill
    assert found.decode >= decode
    if found.reason is Reason.CLAMPED_TO_RATIO and decode > least.denominator and prefill > least.numerator:
        assert least <= Fraction(found.prefill, found.decode) <= most
