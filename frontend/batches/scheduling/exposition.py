"""The load of a vLLM-compatible server, read from what its ``/metrics`` says. Pure.

Summed over all samples, whatever their labels: what counts is the load of the server, not of one model on it.

Source: batches.md 1.6, rule 28; the text exposition format of Prometheus.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

WAITING: Final = "vllm:num_requests_waiting"
RUNNING: Final = "vllm:num_requests_running"
KV_CACHE: Final = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
"""The present name and the one of older servers; fractions from 0 to 1 in spite of it."""
MAX_COUNT: Final = 2**31 - 1
"""Larger sums are told as this."""

_NAMES: Final = "|".join(map(re.escape, (WAITING, RUNNING, *KV_CACHE)))
# One pass of the regular expression engine over the text instead of a loop over its lines: a page of 1 MiB has tens of
# thousands of them, four of which matter. Possessive, so that no line makes it try again and again.
_SAMPLE: Final = re.compile(
    rf"^[ \t]*+({_NAMES})"
    r'(?:[ \t]*+\{(?:[^"}\n]++|"(?:[^"\\\n]++|\\.)*+")*+\}[ \t]*+|[ \t]++)'
    r"([^ \t\r\n]++)",
    re.MULTILINE,
)
_NUMBER: Final = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


@dataclass(frozen=True, slots=True)
class Load:
    """What a server says of itself; None: the gauge has no usable sample.

    Attributes:
        waiting, running: requests, over all engines.
        kv_cache_permille: use of the KV cache by the engine that uses most of it, 0 to 1000.
    """

    waiting: int | None = None
    running: int | None = None
    kv_cache_permille: int | None = None


def read_load(text: str) -> Load:
    """Return the load in a page; lines that cannot be read and samples that cannot be counts are passed over."""
    samples: dict[str, list[float]] = {}
    for match in _SAMPLE.finditer(text):
        value = _value(match[2])
        if value is not None:
            samples.setdefault(match[1], []).append(value)
    used = [value for name in KV_CACHE for value in samples.get(name, ())]
    return Load(
        _count(samples.get(WAITING, ())),
        _count(samples.get(RUNNING, ())),
        _rounded(min(max(used), 1.0) * 1000) if used else None,
    )


def _value(text: str) -> float | None:
    if not _NUMBER.fullmatch(text):
        # NaN and infinities among them.
        return None
    value = float(text)
    return value if math.isfinite(value) and value >= 0 else None


def _count(values: Iterable[float]) -> int | None:
    values = list(values)
    return _rounded(min(math.fsum(min(value, MAX_COUNT) for value in values), MAX_COUNT)) if values else None


def _rounded(value: float) -> int:
    """Round half up: 0.5 waiting requests, summed over engines, are one and not none."""
    # The nearest decimal first: 0.9005 * 1000 is a hair below 900.5 in binary.
    return math.floor(round(value, 9) + 0.5)
