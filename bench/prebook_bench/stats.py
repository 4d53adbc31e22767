"""Summary statistics over small samples: order statistics and bootstrap confidence intervals. Pure, no NumPy."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def percentile(values: Sequence[float], *, p: float) -> float:
    """The p-th percentile (0 to 100) with linear interpolation between order statistics, NumPy's default method.

    Raises ValueError for an empty sample or a p outside 0..100.
    """
    if not values:
        raise ValueError("percentile of an empty sample")
    if not 0 <= p <= 100:
        raise ValueError(f"p must be between 0 and 100, not {p}")
    ordered = sorted(values)
    position = (len(ordered) - 1) * p / 100
    low = math.floor(position)
    high = math.ceil(position)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def median(values: Sequence[float]) -> float:
    """The 50th percentile."""
    return percentile(values, p=50)


def medians(items: Iterable[T], *, key: Callable[[T], K], value: Callable[[T], float]) -> dict[K, float]:
    """The median of ``value`` over the items with the same ``key``, by key, in the order in which keys appear."""
    groups: dict[K, list[float]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(value(item))
    return {found: median(values) for found, values in groups.items()}


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; raises ValueError for an empty sample."""
    if not values:
        raise ValueError("mean of an empty sample")
    return math.fsum(values) / len(values)


@dataclasses.dataclass(frozen=True)
class Interval:
    """A point estimate with a two-sided confidence interval."""

    value: float
    low: float
    high: float


def bootstrap(
    values: Sequence[float],
    *,
    statistic: Callable[[Sequence[float]], float],
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Interval:
    """Percentile-bootstrap interval of `statistic` (Efron 1979). The same seed gives the same interval.

    A sample of one gives an interval of no width. Raises ValueError for an empty sample.
    """
    if not values:
        raise ValueError("bootstrap of an empty sample")
    source = random.Random(seed)
    size = len(values)
    estimates = [statistic(source.choices(values, k=size)) for _ in range(resamples)]
    return _interval(statistic(values), estimates, confidence=confidence)


def bootstrap_groups(
    groups: Sequence[Sequence[float]], *, confidence: float = 0.95, resamples: int = 1000, seed: int = 0
) -> Interval:
    """Mean of the groups' medians; its interval comes from drawing groups, and then values in each.

    For values that belong together, as those of one process do: what differs from group to group is part of the noise,
    and more values in a group do not make it less. Raises ValueError when a group, or the lot, is empty.
    """
    if not groups or not all(groups):
        raise ValueError("bootstrap of an empty sample")
    source = random.Random(seed)
    estimates = [
        mean([median(source.choices(group, k=len(group))) for group in source.choices(groups, k=len(groups))])
        for _ in range(resamples)
    ]
    return _interval(mean([median(group) for group in groups]), estimates, confidence=confidence)


def _interval(value: float, estimates: Sequence[float], *, confidence: float) -> Interval:
    tail = (1 - confidence) / 2 * 100
    return Interval(value=value, low=percentile(estimates, p=tail), high=percentile(estimates, p=100 - tail))


def requests_needed(p: float, *, beyond: int = 5) -> int:
    """Smallest sample in which about `beyond` values lie above the p-th percentile; below it a tail is guesswork."""
    if not 0 <= p < 100:
        raise ValueError(f"p must be in 0..100, not {p}")
    return math.ceil(round(beyond / (1 - p / 100), 6))
