"""``gpus`` of the node file: which devices the worker may use, and what 0 means for ``runtime.backend``."""

from __future__ import annotations

import reprlib
from typing import Any, Final

NEEDS_GPU: Final = ("cuda", "tensorrt")
"""Values of ``runtime.backend`` that contradict ``gpus: 0``."""


def read_gpus(value: Any, backend: str) -> tuple[tuple[int, ...], str]:
    """Return device numbers, empty for any, and the backend, which is ``cpu`` where no device may be used.

    Args:
        value: ``auto``, a count, or a list of numbers; None as ``auto``.
        backend: ``runtime.backend`` as configured.

    Raises:
        ValueError: the text says what was expected, or that the two contradict each other.
    """
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if value is None or value == "auto":
        return (), backend
    counted = list(range(value)) if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else value
    numbers = isinstance(counted, list) and all(
        isinstance(gpu, int) and not isinstance(gpu, bool) and gpu >= 0 for gpu in counted
    )
    if not numbers:
        raise ValueError(f"expected auto, a count or a list of device numbers, got {reprlib.repr(value)}")
    if len(counted) > 1:
        raise ValueError(
            f"{reprlib.repr(value)}: a worker uses one GPU, and more than 1 worker is not available yet; write [0]"
        )
    if not counted and backend in NEEDS_GPU:
        raise ValueError(f"{value!r} means the CPU, but global.runtime.backend is {backend}; write auto or [0]")
    return tuple(counted), "cpu" if not counted and backend == "auto" else backend
