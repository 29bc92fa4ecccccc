"""Deciding how a model is built, building it, and remembering both.

Weights go outside if there are any large ones and the library builds the network so. Otherwise they stay inside, which
is logged with the reason and remembered with the plan, so that a start does not try in vain again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import onnx

from engines.agreement import model_name, require_agreement, require_facts
from engines.bundle.manifest import Manifest
from engines.errors import NotReady
from engines.tensor import NDArray
from engines.tensorrt.builder import BuildFailed, BuildOptions, build
from engines.tensorrt.names import Api, Progress
from engines.tensorrt.network import ModelFile, Network, UnreadableModel
from engines.tensorrt.plan_cache import Cached, Facts, PlanCache
from engines.tensorrt.profiles import Profile, profiles_of

log = logging.getLogger("engines.tensorrt")

NO_WEIGHTS: Final = "it has no large weights"
ASKED_FOR: Final = "so it was asked for"


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and what belongs to it.

    Attributes:
        reason: why the weights are inside; empty if they are not.
        cached: whether it was taken from the cache.
    """

    plan: bytes
    reason: str
    cached: bool


class Planner:
    """Makes plans; needs the library, and for TensorRT proper a device.

    Args:
        progress: told how far a build is, for whoever waits for it.
        outside: False keeps all weights inside, to compare.
    """

    def __init__(
        self,
        api: Api,
        cache: PlanCache,
        options: BuildOptions,
        progress: Progress | None = None,
        *,
        outside: bool = True,
    ) -> None:
        self._api = api
        self._cache = cache
        self._options = options
        self._progress = progress
        self._outside = outside

    def plan(
        self, name: str, manifest: Manifest, model_file: Path, device_key: str, *, anew: bool = False
    ) -> tuple[Planned, Mapping[str, NDArray]]:
        """Return a plan and the values of the weights outside it, by name.

        Args:
            anew: build even if the cache has a plan.

        Raises:
            NotReady: the file contradicts the manifest, or TensorRT does not build it; the message says why.
        """
        file = _checked_file(name, manifest, model_file)
        profiles = profiles_of(manifest)
        try:
            network, arrays = file.outside() if self._outside else (file.inside(), {})
        except UnreadableModel as error:
            raise NotReady(f"{name}: {model_file}: {error}") from error
        if not network.outside:
            reason = NO_WEIGHTS if self._outside else ASKED_FOR
            return self._inside(name, network, profiles, device_key, reason, anew, model_file), {}
        facts = self._facts(network, profiles, device_key)
        found = None if anew else self._cache.load(name, facts)
        if found is not None and found.outside:
            return Planned(found.plan, "", cached=True), arrays
        reason = found.reason if found is not None else ""
        if not reason:
            try:
                plan = self._built(name, network, profiles, facts)
            except BuildFailed as error:
                reason = f"TensorRT does not take its weights as inputs: {error}"
                # As text: a record that is kept would keep the frames of this error, and with them the engine.
                log.warning("tensorrt.weights_inside model=%s reason=%s", name, str(error))
            else:
                self._cache.store(name, facts, Cached(plan, outside=True, reason=""))
                return Planned(plan, "", cached=False), arrays
        del file, arrays
        network = ModelFile(model_file, manifest).inside()
        planned = self._inside(name, network, profiles, device_key, reason, anew, model_file)
        # Kept only now: a model that builds in neither way may be tried again with a new library.
        self._cache.store(name, facts, Cached(b"", outside=False, reason=reason))
        return planned, {}

    def _inside(
        self,
        name: str,
        network: Network,
        profiles: tuple[Profile, ...],
        device_key: str,
        reason: str,
        anew: bool,
        model_file: Path,
    ) -> Planned:
        facts = self._facts(network, profiles, device_key)
        found = None if anew else self._cache.load(name, facts)
        if found is not None and found.plan:
            return Planned(found.plan, reason, cached=True)
        try:
            plan = self._built(name, network, profiles, facts)
        except BuildFailed as error:
            raise NotReady(
                f"{name}: {model_file}: TensorRT {self._api.version} does not build it: {error}; "
                "change the model, or write engine: onnxruntime"
            ) from error
        self._cache.store(name, facts, Cached(plan, outside=False, reason=reason))
        return Planned(plan, reason, cached=False)

    def _built(self, name: str, network: Network, profiles: tuple[Profile, ...], facts: Facts) -> bytes:
        started_ns = time.monotonic_ns()
        built = build(self._api, network, profiles, self._options, self._cache.load_timing(facts), self._progress)
        if built.timing_cache:
            self._cache.store_timing(facts, built.timing_cache)
        log.info(
            "tensorrt.built model=%s profiles=%d weights=%s plan_bytes=%d seconds=%.1f",
            name, len(profiles), "outside" if network.outside else "inside", len(built.plan),
            (time.monotonic_ns() - started_ns) / 1e9,
        )  # fmt: skip
        return built.plan

    def _facts(self, network: Network, profiles: tuple[Profile, ...], device_key: str) -> dict[str, str]:
        options = self._options
        shapes = [f"{name}{list(dims)}" for profile in profiles for name, dims in profile.shapes]
        return {
            "library": f"{self._api.name} {self._api.version}",
            # RTX plans hold no machine code: it is made on the device that loads them.
            "device": "any" if self._api.is_rtx else device_key,
            "network": network.digest,
            "weights": "outside" if network.outside else "inside",
            "shapes": " ".join(shapes),
            "numerics": "tf32" if options.tf32 else "f32",
            "optimization_level": str(options.optimization_level),
            "workspace_bytes": str(options.workspace_bytes),
        }


def _checked_file(name: str, manifest: Manifest, model_file: Path) -> ModelFile:
    """Return the file, compared with the manifest and with what TensorRT can carry."""
    facts = require_facts(model_file)
    newest = int(onnx.defs.onnx_opset_version())
    if facts.opset > newest:
        # The parser would take it and read newer meanings in the old way.
        raise NotReady(
            f"{name}: {model_file}: opset {facts.opset} is newer than what can be read here (up to {newest}); export "
            "the model with an older opset"
        )
    try:
        file = ModelFile(model_file, manifest)
    except UnreadableModel as error:
        raise NotReady(f"{name}: {model_file}: cannot be read as an ONNX model: {error}") from error
    require_agreement(manifest, file.inputs, file.outputs, model_file)
    assert name == model_name(model_file)
    for key, specs in (("executable_inputs", manifest.inputs), ("executable_outputs", manifest.outputs)):
        for index, spec in enumerate(specs):
            if not Api.carries(spec.dtype):
                raise NotReady(
                    f"{key}[{index}].dtype: TensorRT does not compute with {spec.dtype} ('{spec.name}'); convert the "
                    "model's inputs and outputs, or write engine: onnxruntime"
                )
    return file
