"""A strict TensorRT whose engines compute: ``fake_library("11.4", world)``."""

from __future__ import annotations

from typing import Any

from engines.tensorrt.names import Api
from tensorrt_fake.building import Builder, Parser, World
from tensorrt_fake.running import Runtime
from tensorrt_fake.strict import VERSIONS, Library


def fake_library(version: str, world: World) -> Library:
    """Return the library of one version on one machine."""

    def made(behaviour: Any) -> Any:
        return lambda library, *args: behaviour(library, world, *args)

    return Library(version, {"Builder": made(Builder), "OnnxParser": made(Parser), "Runtime": made(Runtime)})


def fake_api(version: str, world: World) -> Api:
    """Return the engine's view of it."""
    library = fake_library(version, world)
    return Api(library.module, "tensorrt_rtx" if library.is_rtx else "tensorrt").checked()


__all__ = ["VERSIONS", "World", "fake_api", "fake_library"]
