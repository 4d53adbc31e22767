"""Percentiles and bootstrap intervals against values worked out by hand and against the standard library."""

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prebook_bench import stats

samples = st.lists(st.floats(min_value=-1e6, max_value=1e6), min_size=1, max_size=60)


def test_percentile_interpolates_between_order_statistics() -> None:
    assert stats.percentile([40, 10, 20, 30], p=50) == 25
    assert stats.percentile([40, 10, 20, 30], p=0) == 10
    assert stats.percentile([40, 10, 20, 30], p=100) == 40
    assert stats.percentile([0, 10], p=90) == pytest.approx(9)


@given(samples)
def test_median_is_the_standard_librarys(values: list[float]) -> None:
    assert stats.median(values) == pytest.approx(statistics.median(values), rel=1e-9, abs=1e-9)


@given(samples, st.floats(min_value=0, max_value=100), st.floats(min_value=0, max_value=100))
def test_percentiles_are_monotonic_and_within_the_sample(values: list[float], p: float, q: float) -> None:
    low, high = stats.percentile(values, p=min(p, q)), stats.percentile(values, p=max(p, q))
    assert min(values) - 1e-6 <= low <= high + 1e-6
    assert high <= max(values) + 1e-6


@pytest.mark.parametrize("p", [-1, 101])
def test_percentile_refuses_what_is_no_percentage(p: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 100"):
        stats.percentile([1.0], p=p)


@pytest.mark.parametrize("call", [lambda: stats.percentile([], p=50), lambda: stats.mean([]),
                                  lambda: stats.bootstrap([], statistic=stats.mean)])  # fmt: skip
def test_empty_samples_are_refused(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="empty sample"):
        call()


def test_bootstrap_is_repeatable_and_covers_the_mean() -> None:
    source = random.Random(5)
    hits = 0
    for trial in range(60):
        values = [source.gauss(10, 2) for _ in range(40)]
        interval = stats.bootstrap(values, statistic=stats.mean, resamples=300, seed=trial)
        assert interval == stats.bootstrap(values, statistic=stats.mean, resamples=300, seed=trial)
        hits += interval.low <= 10 <= interval.high
    assert 51 <= hits <= 60  # 95 % of 60 is 57; the sample is small


def test_bootstrap_of_equal_values_has_no_width() -> None:
    interval = stats.bootstrap([3.0] * 9, statistic=stats.median)
    assert (interval.value, interval.low, interval.high) == (3.0, 3.0, 3.0)


def test_requests_needed_leaves_values_beyond_the_percentile() -> None:
    assert stats.requests_needed(50) == 10
    assert stats.requests_needed(90) == 50
    assert stats.requests_needed(99) == 500
