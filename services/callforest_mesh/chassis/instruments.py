"""Counts and measures of one service, kept in plain memory until they are exported.

Every label has a closed set of values, given when the instrument is made; what is not in it counts
as "other". So what is exported never grows with calls, tenants or what a peer says. An instrument
is used on one event loop; exports read it from a thread of their own.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

OTHER: Final = "other"
SECONDS: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 60.0, 600.0),
)
"""Upper bounds of the buckets of durations."""

Labels: TypeAlias = Mapping[str, Collection[str]]
"""The values that each label may have, in the order in which they are given."""
_Key: TypeAlias = tuple[str, tuple[tuple[str, str], ...]]
Read: TypeAlias = Callable[[], float | None]
"""Gives a present value; None when there is none."""


@dataclass(frozen=True, slots=True)
class Description:
    """What an instrument measures.

    Attributes:
        name: dotted and in lower case; several instruments may share one, under other constants.
        unit: as UCUM writes it: "s", "By", "{call}".
        text: for people.
        constants: labels with one value.
    """

    name: str
    unit: str
    text: str
    constants: Mapping[str, str] = field(default_factory=dict)


class Counter:
    """A sum that only grows."""

    def __init__(self, description: Description, labels: Labels) -> None:
        self.description = description
        self._labels = labels
        self._sums: dict[tuple[str, ...], float] = {}

    def add(self, amount: float, *values: str) -> None:
        """Add an amount under the values of the labels, in their order."""
        if values in self._sums:  # what is kept is bounded
            self._sums[values] += amount
            return
        key = bounded(self._labels, values)
        self._sums[key] = self._sums.get(key, 0) + amount

    def sums(self) -> list[tuple[dict[str, str], float]]:
        """Give each sum with its labels."""
        return [(_named(self, self._labels, key), one) for key, one in self._sums.copy().items()]


@dataclass(slots=True)
class Distribution:
    """What a histogram saw under one set of labels.

    Attributes:
        counts: values a bucket, the last without an upper bound.
        total: the sum of the values.
        least: the smallest value.
        most: the largest value.
    """

    counts: list[int]
    total: float = 0.0
    least: float = math.inf
    most: float = -math.inf


class Histogram:
    """How values are distributed over fixed buckets."""

    def __init__(self, description: Description, bounds: Sequence[float], labels: Labels) -> None:
        self.description = description
        self.bounds = tuple(bounds)
        self._labels = labels
        self._seen: dict[tuple[str, ...], Distribution] = {}

    def record(self, value: float, *values: str) -> None:
        """Note a value under the values of the labels, in their order."""
        seen = self._seen.get(values)  # what is kept is bounded
        if seen is None:
            seen = self._distribution(bounded(self._labels, values))
        seen.counts[bisect_left(self.bounds, value)] += 1
        seen.total += value
        if value < seen.least:
            seen.least = value
        if value > seen.most:
            seen.most = value

    def _distribution(self, key: tuple[str, ...]) -> Distribution:
        found = self._seen.get(key)
        if found is None:
            found = self._seen[key] = Distribution([0] * (len(self.bounds) + 1))
        return found

    def distributions(self) -> list[tuple[dict[str, str], Distribution]]:
        """Give each distribution with its labels."""
        return [(_named(self, self._labels, key), one) for key, one in self._seen.copy().items()]


@dataclass(frozen=True, slots=True)
class Gauge:
    """A value that is read when it is exported.

    Attributes:
        description: what it is.
        read: gives it, from the exporting thread.
        kind: "level" may fall; "total" only grows while the process lives.
    """

    description: Description
    read: Read
    kind: Literal["level", "total"] = "level"


class Metrics:
    """The instruments of one service, each by its name and constants.

    Who asks for one that is there gets it, and goes on counting; a gauge is read anew.
    """

    def __init__(self) -> None:
        self._counters: dict[_Key, Counter] = {}
        self._histograms: dict[_Key, Histogram] = {}
        self._gauges: dict[_Key, Gauge] = {}

    @property
    def counters(self) -> list[Counter]:
        """All counters."""
        return list(self._counters.values())

    @property
    def histograms(self) -> list[Histogram]:
        """All histograms."""
        return list(self._histograms.values())

    @property
    def gauges(self) -> list[Gauge]:
        """All gauges."""
        return list(self._gauges.values())

    def counter(self, description: Description, labels: Labels | None = None) -> Counter:
        """Make a counter."""
        new = Counter(description, labels or {})
        return self._counters.setdefault(_key(description), new)

    def histogram(
        self,
        description: Description,
        labels: Labels | None = None,
        *,
        bounds: Sequence[float] = SECONDS,
    ) -> Histogram:
        """Make a histogram; `bounds` are the upper bounds of its buckets, rising."""
        new = Histogram(description, bounds, labels or {})
        return self._histograms.setdefault(_key(description), new)

    def gauge(
        self, description: Description, read: Read, kind: Literal["level", "total"] = "level"
    ) -> None:
        """Have a value read at every export."""
        self._gauges[_key(description)] = Gauge(description, read, kind)

    def limit(self, name: str, value: float) -> None:
        """Export a bound of the service, under the word by which OVERLOADED names it."""
        text = "What a bound of the service is set to."
        self.gauge(Description("callforest.limit", "1", text, {"limit": name}), lambda: value)


class SilentMetrics(Metrics):
    """Instruments that keep nothing."""

    def counter(self, description: Description, labels: Labels | None = None) -> Counter:
        """Make a counter that counts nothing."""
        return _SilentCounter(description, labels or {})

    def histogram(
        self,
        description: Description,
        labels: Labels | None = None,
        *,
        bounds: Sequence[float] = SECONDS,
    ) -> Histogram:
        """Make a histogram that sees nothing."""
        return _SilentHistogram(description, bounds, labels or {})

    def gauge(
        self, description: Description, read: Read, kind: Literal["level", "total"] = "level"
    ) -> None:
        """Read nothing."""


class _SilentCounter(Counter):
    def add(self, amount: float, *values: str) -> None:
        """Count nothing."""


class _SilentHistogram(Histogram):
    def record(self, value: float, *values: str) -> None:
        """See nothing."""


def _key(description: Description) -> _Key:
    return description.name, tuple(sorted(description.constants.items()))


def bounded(labels: Labels, values: tuple[str, ...]) -> tuple[str, ...]:
    """Give the values, each that its label does not know as OTHER."""
    pairs = zip(labels.values(), values, strict=True)
    return tuple([value if value in known else OTHER for known, value in pairs])


def _named(instrument: Counter | Histogram, labels: Labels, key: tuple[str, ...]) -> dict[str, str]:
    return {**instrument.description.constants, **dict(zip(labels, key, strict=True))}
