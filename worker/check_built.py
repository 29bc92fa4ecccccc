"""``ringserve check --backend tensorrt`` where models can be built and not run: TensorRT-RTX without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from engines.bundle.manifest import Manifest
from engines.device.opening import gpu_is_present
from engines.tensorrt.builder import BuildOptions
from engines.tensorrt.names import Api
from engines.tensorrt.plan_cache import PlanCache
from engines.tensorrt.planning import Planner
from engines.tensorrt.profiles import profiles_of

ENGINE: Final = "tensorrt, built and not run"


def planner_without_device(numerics: str) -> Planner | None:
    """Return what builds models here; None if they can be run as well, or if building needs a GPU too.

    Raises:
        NotReady: TensorRT is not installed.
    """
    api = Api.load()
    if gpu_is_present() or not api.is_rtx:
        return None
    return Planner(api, PlanCache(None), BuildOptions.of(numerics))


def build_note(planner: Planner, name: str, manifest: Manifest, model_file: Path) -> str:
    """Build a model and return what came of it, for people.

    Raises:
        NotReady: it does not build; says why.
    """
    planned, arrays = planner.plan(name, manifest, model_file, "")
    outside = f"{len(arrays)} weights outside it" if arrays else f"weights inside it: {planned.reason}"
    return (
        f"builds with {len(profiles_of(manifest))} profiles, plan of {len(planned.plan) / 1e6:.2f} MB, {outside}; not "
        "run, because there is no GPU"
    )
