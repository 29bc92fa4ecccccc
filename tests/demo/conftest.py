"""Demo bundles, brought up to date once and shared by the tests."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from direct_bundle import DirectBundle, load_bundle

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def demo_bundle() -> Callable[[str], DirectBundle]:
    """Return a function from a demo bundle's name to it, brought up to date."""
    loaded: dict[str, DirectBundle] = {}

    def get(name: str) -> DirectBundle:
        if name not in loaded:
            subprocess.run([ROOT / "scripts" / "demo_bundles", name], check=True)
            loaded[name] = load_bundle(ROOT / "demo" / "models" / name)
        return loaded[name]

    return get
