"""Figures of every process as one Prometheus exposition: dead processes' counters stay, their gauges go.

Theory of operation
    A process sends whole snapshots. Its latest one is kept while it lives. When it ends, its counters and histograms
    are added to totals of the dead and its gauges are dropped, so a sum over a restart never decreases and no gauge
    of the dead remains. A counter that vanishes from a living process's snapshot (an unloaded model) is folded alike.
    Series with equal name and labels from several processes are added up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString

from worker.channel.series import Series

MAX_SERIES = 200_000
"""Different name-and-label pairs held for all processes; further ones are dropped and counted."""
_KINDS = ("counter", "gauge", "histogram")
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*\Z")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*\Z")

Key = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(slots=True)
class Sum:
    """Sum of the series with one name and one set of labels."""

    kind: str
    help: str
    bounds: tuple[float, ...]
    value: float = 0.0
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def fits(self, series: Series) -> bool:
        """Whether ``series`` can be added: buckets of different bounds have no sum."""
        return self.kind == series.kind and self.bounds == series.bounds

    def add(self, series: Series) -> None:
        self.value += series.value
        self.sum += series.sum
        for index, count in enumerate(series.counts):
            self.counts[index] += count


def _key(series: Series) -> Key:
    return series.name, tuple(sorted(series.labels.items()))


def _valid(series: Series) -> bool:
    """Whether a series can be exposed at all; one bad name must not cost a scrape every other figure."""
    if series.kind not in _KINDS or not _NAME.match(series.name):
        return False
    if not all(_LABEL.match(name) and name != "le" for name in series.labels):
        return False
    if (series.kind == "counter") is not series.name.endswith("_total"):
        return False
    if series.kind != "histogram":
        return not series.counts
    return len(series.counts) == len(series.bounds) + 1 and all(
        low < high for low, high in zip(series.bounds, series.bounds[1:], strict=False)
    )


def _add(sums: dict[Key, Sum], series: Series) -> bool:
    key = _key(series)
    found = sums.get(key)
    if found is None:
        if len(sums) >= MAX_SERIES:
            return False
        found = Sum(series.kind, series.help, series.bounds, counts=[0] * len(series.counts))
        sums[key] = found
    elif not found.fits(series):
        return False
    found.add(series)
    return True


class Figures:
    """The latest snapshot of every living process and the totals of the dead."""

    def __init__(self) -> None:
        self._living: dict[int, dict[Key, Series]] = {}
        self._dead: dict[Key, Sum] = {}
        self.dropped = 0

    def update(self, life: int, snapshot: Sequence[Series]) -> None:
        """Take a process's new snapshot; ``life`` is unique to one life of one process."""
        new = {_key(series): series for series in snapshot if _valid(series)}
        self.dropped += len(snapshot) - len(new)
        old = self._living.get(life, {})
        self._fold(series for key, series in old.items() if key not in new)
        self._living[life] = new

    def end(self, life: int) -> None:
        """Note that a process has ended."""
        self._fold(self._living.pop(life, {}).values())

    def sums(self) -> dict[Key, Sum]:
        """Return every series, added up over the living and the dead."""
        sums: dict[Key, Sum] = {}
        for key, dead in self._dead.items():
            sums[key] = Sum(dead.kind, dead.help, dead.bounds, dead.value, list(dead.counts), dead.sum)
        for snapshot in self._living.values():
            for series in snapshot.values():
                if not _add(sums, series):
                    self.dropped += 1
        return sums

    def _fold(self, ended: Iterable[Series]) -> None:
        for series in ended:
            if series.kind != "gauge" and not _add(self._dead, series):
                self.dropped += 1


class _Exposition(Collector):
    def __init__(self, figures: Figures, own: Sequence[Series]) -> None:
        self._figures = figures
        self._own = own

    def collect(self) -> Iterator[Metric]:
        sums = self._figures.sums()
        for series in self._own:
            _add(sums, series)
        families: dict[str, Metric] = {}
        for (name, labels), total in sums.items():
            family_name = name.removesuffix("_total") if total.kind == "counter" else name
            family = families.get(family_name)
            if family is None:
                family = families[family_name] = Metric(family_name, total.help, total.kind)
            elif family.type != total.kind:
                continue
            _add_samples(family, name, dict(labels), total)
        yield from families.values()


def _add_samples(family: Metric, name: str, labels: dict[str, str], total: Sum) -> None:
    if total.kind != "histogram":
        family.add_sample(name, labels, total.value)
        return
    cumulative = 0
    for bound, count in zip((*total.bounds, float("inf")), total.counts, strict=True):
        cumulative += count
        family.add_sample(f"{name}_bucket", {**labels, "le": _bound_text(bound)}, cumulative)
    family.add_sample(f"{name}_count", labels, cumulative)
    family.add_sample(f"{name}_sum", labels, total.sum)


def _bound_text(bound: float) -> str:
    text: str = floatToGoString(bound)  # type: ignore[no-untyped-call]
    return text


def registry_of(figures: Figures, own: Sequence[Series]) -> CollectorRegistry:
    """Return a registry that exposes the figures and the node's own series."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Exposition(figures, own))
    return registry


def render(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Return the exposition in the format a scraper accepts, and its content type."""
    from prometheus_client import exposition

    try:
        encoder, content_type = exposition.choose_encoder(accept)
        return encoder(registry), content_type
    except (ValueError, TypeError):
        # The chooser trips over a version or an escaping that nobody knows; the oldest format is understood by all.
        return exposition.generate_latest(registry), exposition.CONTENT_TYPE_PLAIN_0_0_4
