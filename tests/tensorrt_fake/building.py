"""Behaviours of the building half: parser, configuration, profiles, and plans that hold the network itself."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import onnx

from engines.array.interpreter import OPERATORS
from tensorrt_fake.computation import FROM_ONNX, Computation, NodeFailed, Tensor, UnusableGraph, tensor_of
from tensorrt_fake.strict import EnumMember, Library

MAGIC = b"fake plan\n"
SCRATCH_ALIGNMENT = 256


class FakeCrash(BaseException):
    """What would have been a segmentation fault. No ``Exception``: nothing may survive it."""


@dataclass
class World:
    """What a test decides about the machine and the library's tempers.

    Attributes:
        device: the host device that executions run on; None for a machine without a GPU.
        device_key: what plans are built for.
        constant_operands: per operator, operands that this library wants as constants.
        unbuildable: operators that parse and cannot be built.
        builds: how many plans were built.
    """

    device: Any = None
    device_key: str = "host"
    constant_operands: dict[str, tuple[int, ...]] = field(default_factory=dict)
    unbuildable: frozenset[str] = frozenset()
    builds: int = 0
    configs: list[Config] = field(default_factory=list)


class HostMemory:
    def __init__(self, data: bytes) -> None:
        self.data = data

    @property
    def nbytes(self) -> int:
        return len(self.data)


class Log:
    """Speaks to the application's logger as the library does."""

    def __init__(self, library: Library, logger: Any) -> None:
        self._library, self._logger = library, logger

    def error(self, message: str) -> None:
        severity = type(self._logger).ERROR
        self._logger.log(severity, message)

    def info(self, message: str) -> None:
        self._logger.log(type(self._logger).INFO, message)


class Builder:
    def __init__(self, library: Library, world: World, logger: Any) -> None:
        if world.device is None and not library.is_rtx:
            raise TypeError("pybind11::init(): factory function returned nullptr")
        self._library, self._world = library, world
        self._log = Log(library, logger)
        self._log.info("a builder was made")

    def create_network(self, flags: int = 0) -> Any:
        creation = self._library.enums["NetworkDefinitionCreationFlag"]
        strong = 1 << int(creation.STRONGLY_TYPED)  # type: ignore[attr-defined]
        if self._library.description["version"].startswith("10.") and not flags & strong:
            raise AssertionError("a weakly typed network computes in types that the file does not name")
        return self._library.wrap("INetworkDefinition", Network(self._library, flags))

    def create_builder_config(self) -> Any:
        config = Config(self._library, self._world)
        self._world.configs.append(config)
        return self._library.wrap("IBuilderConfig", config)

    def create_optimization_profile(self) -> Any:
        return self._library.wrap("IOptimizationProfile", Profile())

    def build_serialized_network(self, network: Any, config: Any) -> Any:
        definition: Network = network._do
        settings: Config = config._do
        if definition.model is None:
            self._log.error("Error Code 4: API Usage Error (Network must have at least one output)")
            return None
        monitor = settings.progress_monitor
        phases = ["Parsing", "Sizes", "Plan"]
        if monitor is not None:
            monitor.phase_start("Building", None, len(phases))
        plan = self._plan(definition, settings)
        if monitor is not None:
            for index, phase in enumerate(phases):
                monitor.phase_start(phase, "Building", 1)
                if not monitor.step_complete(phase, 0):
                    return None
                monitor.phase_finish(phase)
                monitor.step_complete("Building", index)
            monitor.phase_finish("Building")
        if plan is None:
            return None
        self._world.builds += 1
        if settings.cache is not None:
            settings.cache.measured += 1
        return self._library.wrap("IHostMemory", HostMemory(plan))

    def _plan(self, definition: Network, settings: Config) -> bytes | None:
        dynamic = [tensor for tensor in definition.inputs if -1 in tensor.shape]
        profiles = settings.profiles
        if not profiles:
            if dynamic:
                self._log.error("Error Code 4: API Usage Error (Network has dynamic inputs, but no profile is defined)")
                return None
            profiles = [Profile()]
        refused = sorted(definition.operators & self._world.unbuildable)
        if refused:
            self._log.error(f"Error Code 10: Internal Error (Could not find any implementation for node {refused[0]})")
            return None
        computation = Computation(definition.model or b"")
        described = []
        for index, profile in enumerate(profiles):
            if not self._complete(index, profile, dynamic):
                return None
            try:
                sizes = computation.sizes(profile.shapes)
            except NodeFailed as error:
                self._log.error(f"IBuilder::buildSerializedNetwork: Error Code 4: Shape Error ({error})")
                return None
            rounded = -(-max(sizes.scratch_bytes, 1) // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
            described.append(
                {
                    "inputs": {name: list(shape) for name, shape in profile.shapes.items()},
                    "outputs": {name: list(shape) for name, shape in sizes.shapes.items()},
                    "bounds": dict(sizes.bounds),
                    "scratch_bytes": rounded,
                }
            )
        header = {
            "library": self._library.description["version"],
            "device": self._world.device_key,
            "tf32": settings.get_flag(self._library.enum("BuilderFlag", "TF32")),
            "profiles": described,
        }
        return MAGIC + json.dumps(header).encode() + b"\n" + (definition.model or b"")

    def _complete(self, index: int, profile: Profile, dynamic: list[Tensor]) -> bool:
        sizes: dict[str, int] = {}
        for tensor in dynamic:
            shape = profile.shapes.get(tensor.name)
            if shape is None:
                self._log.error(f"Error Code 4: API Usage Error ({tensor.name}: profile {index} has no dimensions)")
                return False
            for name, size in zip(tensor.axis_names, shape, strict=True):
                if name and sizes.setdefault(name, size) != size:
                    self._log.error(f"Error Code 4: API Usage Error (contradictory IOptimizationProfile: {name})")
                    return False
        return True


class Network:
    """A network definition; ``model`` is what the parser took."""

    def __init__(self, library: Library, flags: int) -> None:
        self._library = library
        self.flags = flags
        self.model: bytes | None = None
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.operators: set[str] = set()

    @property
    def num_inputs(self) -> int:
        return len(self.inputs)

    @property
    def num_outputs(self) -> int:
        return len(self.outputs)

    def get_input(self, index: int) -> Any:
        return self._library.wrap("ITensor", NetworkTensor(self._library, self.inputs[index]))

    def get_output(self, index: int) -> Any:
        return self._library.wrap("ITensor", NetworkTensor(self._library, self.outputs[index]))


class NetworkTensor:
    def __init__(self, library: Library, tensor: Tensor) -> None:
        self.name, self.shape = tensor.name, tensor.shape
        self.dtype = library.enum("DataType", tensor.dtype)


class Parser:
    def __init__(self, library: Library, world: World, network: Any, logger: Any) -> None:
        self._library, self._world = library, world
        self._network: Network = network._do
        self._errors: list[ParserError] = []

    @property
    def num_errors(self) -> int:
        return len(self._errors)

    def get_error(self, index: int) -> Any:
        return self._library.wrap("ParserError", self._errors[index])

    def parse(self, model: Any, path: str = "") -> bool:
        try:
            proto = onnx.load_model_from_string(bytes(model))
        except Exception:
            self._errors.append(ParserError("Failed to parse ONNX model", "", ""))
            return False
        for value in (*proto.graph.input, *proto.graph.output):
            if value.type.tensor_type.elem_type not in FROM_ONNX:
                self._errors.append(
                    ParserError(f"Failed to convert ONNX data type of {value.name} to TensorRT data type.", "", "")
                )
        constants = {tensor.name for tensor in proto.graph.initializer}
        constants.update(node.output[0] for node in proto.graph.node if node.op_type == "Constant")
        for node in proto.graph.node:
            problem = self._problem(node, constants)
            if problem:
                self._errors.append(ParserError(problem, node.op_type, node.name))
        if self._errors:
            return False
        try:
            Computation(bytes(model))
        except UnusableGraph as error:
            self._errors.append(ParserError(str(error), "", ""))
            return False
        network = self._network
        network.model = bytes(model)
        network.inputs = [tensor_of(value) for value in proto.graph.input]
        network.outputs = [tensor_of(value) for value in proto.graph.output]
        network.operators = {node.op_type for node in proto.graph.node}
        return True

    def _problem(self, node: Any, constants: set[str]) -> str:
        known = node.op_type in OPERATORS or node.op_type == "Constant"
        if not known or (self._library.is_rtx and node.op_type == "NonZero"):
            return 'creator && "Plugin not found, are the plugin name, version, and namespace correct?"'
        for index in self._world.constant_operands.get(node.op_type, ()):
            if index < len(node.input) and node.input[index] not in constants:
                return f"Assertion failed: inputs.at({index}).is_weights(): input {index} must be an initializer"
        return ""


class ParserError:
    def __init__(self, text: str, operator: str, node: str) -> None:
        self._text, self._operator, self._node = text, operator, node

    def desc(self) -> str:
        return self._text

    def node_operator(self) -> str:
        return self._operator

    def node_name(self) -> str:
        return self._node


class Profile:
    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}

    def set_shape(self, name: str, smallest: Any, usual: Any, largest: Any) -> None:
        assert tuple(smallest) == tuple(usual) == tuple(largest), "the fake builds exact profiles only"
        self.shapes[name] = tuple(usual)


class TimingCache:
    def __init__(self, library: Library, world: World, blob: bytes) -> None:
        self._library, self.header = library, f"{library.description['version']} {world.device_key} ".encode()
        self.fits = not blob or blob.startswith(self.header)
        self.measured = int(blob[len(self.header) :] or b"0") if self.fits and blob else 0

    def serialize(self) -> Any:
        return self._library.wrap("IHostMemory", HostMemory(self.header + str(self.measured).encode()))


class Config:
    def __init__(self, library: Library, world: World) -> None:
        self._library, self._world = library, world
        self._flags: set[EnumMember] = {library.enum("BuilderFlag", "TF32")}
        self.builder_optimization_level = 3
        self.progress_monitor: Any = None
        self.profiles: list[Profile] = []
        self.cache: TimingCache | None = None
        self.limits: dict[EnumMember, int] = {}

    def set_flag(self, flag: EnumMember) -> None:
        self._flags.add(flag)

    def clear_flag(self, flag: EnumMember) -> None:
        self._flags.discard(flag)

    def get_flag(self, flag: EnumMember) -> bool:
        return flag in self._flags

    def set_memory_pool_limit(self, pool: EnumMember, size: int) -> None:
        self.limits[pool] = size

    def create_timing_cache(self, blob: Any) -> Any:
        return self._library.wrap("ITimingCache", TimingCache(self._library, self._world, bytes(blob)))

    def set_timing_cache(self, cache: Any, ignore_mismatch: bool) -> bool:
        assert not self._library.is_rtx, "RTX calls this deprecated: it measures nothing"
        if not cache._do.fits and not ignore_mismatch:
            return False
        self.cache = cache._do
        return True

    def add_optimization_profile(self, profile: Any) -> int:
        if any(size < 0 for shape in profile._do.shapes.values() for size in shape):
            return -1
        self.profiles.append(profile._do)
        return len(self.profiles) - 1
