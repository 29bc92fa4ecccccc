"""Order of the whole run: rules about the code first, tests that start processes last."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes says how busy the machine is.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

_FIRST = Path(__file__).parent / "arch"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by cost; the order within a layer stays as it was drawn."""
    items.sort(key=_cost)


def _cost(item: pytest.Item) -> int:
    if item.get_closest_marker("slow"):
        return 3
    if item.get_closest_marker("process"):
        return 2
    return 0 if item.path.is_relative_to(_FIRST) else 1
