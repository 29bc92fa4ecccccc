"""The TensorRT engine over the strict fake and the host device, as one thing to open models with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engines.bundle.manifest import Manifest
from engines.device.base import Capabilities
from engines.device.host import HostDevice
from engines.device.shared import SharedDevice
from engines.tensorrt.builder import BuildOptions
from engines.tensorrt.engine import TensorRTEngine
from engines.tensorrt.model import TensorRTModel
from engines.tensorrt.plan_cache import PlanCache
from engines.tensorrt.planning import Planner
from tensorrt_fake.library import World, fake_api

ARENA_BYTES = 40 << 20
"""Room for one model of the contract tests; the host device fills all of it with a pattern."""
EVERYTHING = Capabilities(overlaps=True, graphs=True, registers=True)


class FakeTensorRT:
    """An engine with everything under it; ``close`` raises the first broken rule of the device.

    Args:
        cache: directory of plans; None caches nothing.
    """

    name = "tensorrt"

    def __init__(
        self,
        version: str = "11.4",
        *,
        numerics: str = "auto",
        cache: Path | None = None,
        arena_bytes: int = ARENA_BYTES,
        capabilities: Capabilities = EVERYTHING,
        **world: Any,
    ) -> None:
        self.device = HostDevice(total_bytes=1 << 30, capabilities=capabilities)
        self.world = World(self.device, **world)
        self.api = fake_api(version, self.world)
        self.shared = SharedDevice(self.device, arena_bytes)
        self.shared.start()
        self.planner = Planner(self.api, PlanCache(cache), BuildOptions.of(numerics))
        self.engine = TensorRTEngine(self.api, self.shared, self.planner)
        self.engine.start()

    def open(self, manifest: Manifest, model_file: Path) -> TensorRTModel:
        return self.engine.open(manifest, model_file)

    def close(self) -> None:
        self.engine.close()
        self.shared.close()
        self.device.close()
