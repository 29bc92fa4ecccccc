"""The fake's descriptions are those of the real bindings.

Opt-in, since it downloads the bindings: ``RINGSERVE_TENSORRT_API=1``. Otherwise only what needs no download is checked.
"""

from __future__ import annotations

import os

import pytest

from tensorrt_fake.regenerate import SOURCES, fresh, stored
from tensorrt_fake.strict import VERSIONS


@pytest.mark.skipif("RINGSERVE_TENSORRT_API" not in os.environ, reason="opt-in: RINGSERVE_TENSORRT_API=1 downloads")
@pytest.mark.parametrize("version", sorted(SOURCES))
def test_descriptions_equal_the_real_bindings(version: str) -> None:
    assert fresh(version) == stored(version)


def test_every_version_has_a_source_and_its_description_that_version() -> None:
    assert SOURCES.keys() == VERSIONS.keys()
    for version, source in SOURCES.items():
        described = stored(version)
        assert described["module"] == source.module
        assert source.requirements[0].endswith(f"=={described['version']}")


def test_what_11_removed_is_what_10_16_had() -> None:
    """The descriptions differ where the research says so; equal ones would mean one was written over the other."""
    old, new = stored("10.16")["classes"], stored("11.4")["classes"]
    gone = {name for name in old["ICudaEngine"]["methods"] if name not in new["ICudaEngine"]["methods"]}
    assert "create_execution_context_without_device_memory" in gone
    assert "get_device_memory_size_for_profile" in gone
    assert "FP16" in stored("10.16")["enums"]["BuilderFlag"]
    assert "FP16" not in stored("11.4")["enums"]["BuilderFlag"]
    assert "load_weights" in stored("rtx-1.7")["classes"]["ICudaEngine"]["methods"]
