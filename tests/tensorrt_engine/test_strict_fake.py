"""The fake refuses what the real bindings would refuse: each mistake planted here must be found."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import onnx_models
from engines.device.base import Span
from engines.device.host import HostDevice
from engines.device.host_order import DeviceMisuse
from engines.tensorrt.names import Api, MessageLog
from tensorrt_fake.building import FakeCrash
from tensorrt_fake.library import VERSIONS, World, fake_api, fake_library
from tensorrt_fake.strict import Library, Signature


class Machine:
    """A device, a library and an engine of one affine model, for calls by hand."""

    def __init__(self, version: str, directory: Path) -> None:
        self.device = HostDevice()
        self.world = World(self.device)
        self.api = fake_api(version, self.world)
        self.trt = self.api.module
        self.log = MessageLog()
        self.logger = self.api.logger(self.log)
        self.builder = self.trt.Builder(self.logger)
        self.network = self.builder.create_network(self.api.network_flags)
        self.parser = self.trt.OnnxParser(self.network, self.logger)
        assert self.parser.parse(onnx_models.affine(directory / "m").read_bytes())
        self.config = self.builder.create_builder_config()
        profile = self.builder.create_optimization_profile()
        profile.set_shape("INPUT", (4, 8), (4, 8), (4, 8))
        assert self.config.add_optimization_profile(profile) == 0
        plan = self.builder.build_serialized_network(self.network, self.config)
        self.engine = self.trt.Runtime(self.logger).deserialize_cuda_engine(bytes(plan))
        self.stream = self.device.stream("compute")
        self.io = self.device.allocate(512, "io")
        self.scratch = self.device.allocate(self.engine.device_memory_size_v2, "scratch")

    def context(self) -> Any:
        return self.engine.create_execution_context(self.trt.ExecutionContextAllocationStrategy.USER_MANAGED)

    def ready(self) -> Any:
        """Return a context that lacks nothing."""
        context = self.context()

        def set_all() -> None:
            assert context.set_optimization_profile_async(0, self.stream.handle)
            assert context.set_input_shape("INPUT", (4, 8))
            context.set_device_memory(self.scratch.address, self.scratch.size_bytes)
            assert context.set_tensor_address("INPUT", self.io.address)
            assert context.set_tensor_address("OUTPUT", self.io.address + 256)

        self.device.launch(self.stream, set_all, reads=(), writes=())
        self.stream.synchronize()
        self.device.zero(Span.whole(self.io), self.stream)
        return context

    def enqueue(self, work: Callable[[], None]) -> None:
        """Run as the device would, with everything declared."""
        io = Span.whole(self.io)
        self.device.launch(
            self.stream, work, reads=[io.part(0, 256)], writes=[io.part(256, 256), Span.whole(self.scratch)]
        )
        self.stream.synchronize()

    def close(self) -> None:
        self.stream.synchronize()
        self.io.free()
        self.scratch.free()


@pytest.fixture(params=sorted(VERSIONS))
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Machine:
    return Machine(request.param, tmp_path)


REMOVED: list[tuple[str, Callable[[Machine], Any]]] = [
    ("context without memory", lambda m: m.engine.create_execution_context_without_device_memory()),
    ("old scratch size", lambda m: m.engine.device_memory_size),
    ("old scratch size of a profile", lambda m: m.engine.get_device_memory_size_for_profile(0)),
    ("old streaming budget", lambda m: m.engine.weight_streaming_budget),
    ("half precision by flag", lambda m: m.trt.BuilderFlag.FP16),
    ("precision constraints", lambda m: m.trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS),
    ("explicit batch", lambda m: m.trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH),
    ("parser's old support test", lambda m: m.parser.supports_model(b"")),
]
"""What 11 removed and 10.16 still had."""

MISSPELT: list[tuple[str, Callable[[Machine], Any]]] = [
    ("enqueue of another version", lambda m: m.context().execute_async_v2([], 1)),
    ("old binding index", lambda m: m.engine.get_binding_index("INPUT")),
    ("unknown property", lambda m: setattr(m.config, "optimization_level", 3)),
    ("read-only property", lambda m: setattr(m.parser, "num_errors", 0)),
    ("unknown enum value", lambda m: m.trt.MemoryPoolType.SCRATCH),
    ("missing argument", lambda m: m.context().set_tensor_address("INPUT")),
    ("surplus argument", lambda m: m.context().execute_async_v3(1, 2)),
    ("unknown keyword", lambda m: m.config.set_timing_cache(None, ignore=True)),
    ("text for an address", lambda m: m.context().set_tensor_address("INPUT", "0x100")),
    ("number for an enum", lambda m: m.config.set_flag(6)),
    ("another enum", lambda m: m.config.set_flag(m.trt.MemoryPoolType.WORKSPACE)),
    ("float for a size", lambda m: m.config.set_memory_pool_limit(m.trt.MemoryPoolType.WORKSPACE, 1e9)),
    ("two shapes for three", lambda m: m.builder.create_optimization_profile().set_shape("INPUT", (1,), (1,))),
    ("class without constructor", lambda m: m.trt.ICudaEngine()),
    ("logger that is none", lambda m: m.trt.Builder(print)),
    ("module's name", lambda m: m.trt.init_libnvinfer),
]


@pytest.mark.parametrize("call", [call for _, call in REMOVED], ids=[title for title, _ in REMOVED])
def test_removed_names_are_refused(tmp_path: Path, call: Callable[[Machine], Any]) -> None:
    machine = Machine("11.4", tmp_path)
    with pytest.raises(AttributeError):
        call(machine)


@pytest.mark.parametrize("call", [call for _, call in MISSPELT], ids=[title for title, _ in MISSPELT])
def test_misspelt_calls_are_refused(machine: Machine, call: Callable[[Machine], Any]) -> None:
    with pytest.raises((AttributeError, TypeError)):
        call(machine)


def test_api_that_the_fake_does_not_do_says_so(machine: Machine) -> None:
    with pytest.raises(NotImplementedError, match="refittable"):
        _ = machine.engine.refittable
    with pytest.raises(NotImplementedError, match="create_engine_inspector"):
        machine.engine.create_engine_inspector()


@pytest.mark.parametrize("version", sorted(VERSIONS))
def test_every_described_signature_can_be_read(version: str) -> None:
    library = fake_library(version, World())
    count = 0
    for described in library.description["classes"].values():
        for texts in described["methods"].values():
            for text in texts:
                parsed = Signature.parse(text)
                assert all(parameter.name and parameter.kind for parameter in parsed.parameters), text
                count += 1
    assert count > 200


def test_derived_classes_must_override_what_is_called_and_start_their_base(machine: Machine) -> None:
    class Misspelt(machine.trt.IOutputAllocator):  # type: ignore[misc, name-defined]
        def reallocate_output_async(self, *args: Any) -> int:
            return 0

        def notify_shapes(self, *args: Any) -> None: ...

    with pytest.raises(TypeError, match="without notify_shape"):
        Misspelt()


def plain(machine: Machine, context: Any) -> None:
    machine.enqueue(lambda: _require(context.execute_async_v3(machine.stream.handle)))


def _require(succeeded: bool) -> None:
    assert succeeded, "refused"


def forgotten(name: str) -> Callable[[Machine], None]:
    """Return a run in which one of the settings of a context was left out."""

    def run(machine: Machine) -> None:
        context = machine.context()

        def work() -> None:
            if name != "profile":
                context.set_optimization_profile_async(0, machine.stream.handle)
            if name != "shape":
                context.set_input_shape("INPUT", (4, 8))
            if name != "scratch":
                context.set_device_memory(machine.scratch.address, machine.scratch.size_bytes)
            for tensor, offset in (("INPUT", 0), ("OUTPUT", 256)):
                if name != tensor:
                    context.set_tensor_address(tensor, machine.io.address + offset)
            _require(context.execute_async_v3(machine.stream.handle))

        machine.device.zero(Span.whole(machine.io), machine.stream)
        machine.enqueue(work)

    return run


def misaligned(machine: Machine) -> None:
    machine.enqueue(lambda: _require(machine.context().set_tensor_address("INPUT", machine.io.address + 8)))


def small_scratch(machine: Machine) -> None:
    machine.enqueue(lambda: machine.context().set_device_memory(machine.scratch.address, 16))


def default_stream(machine: Machine) -> None:
    context = machine.ready()
    machine.enqueue(lambda: _require(context.execute_async_v3(0)))


def outside_a_launch(machine: Machine) -> None:
    machine.ready().execute_async_v3(machine.stream.handle)


def captured_before_it_ran(machine: Machine) -> None:
    context = machine.ready()
    io = Span.whole(machine.io)
    graph = machine.device.capture(
        machine.stream,
        lambda: _require(context.execute_async_v3(machine.stream.handle)),
        reads=[io.part(0, 256)],
        writes=[io.part(256, 256), Span.whole(machine.scratch)],
    )
    graph.launch(machine.stream)
    machine.stream.synchronize()


def undeclared_scratch(machine: Machine) -> None:
    context = machine.ready()
    io = Span.whole(machine.io)
    machine.device.launch(
        machine.stream,
        lambda: _require(context.execute_async_v3(machine.stream.handle)),
        reads=[io.part(0, 256)],
        writes=[io.part(256, 256)],
    )
    machine.stream.synchronize()


def other_shape(machine: Machine) -> None:
    context = machine.context()

    def work() -> None:
        context.set_optimization_profile_async(0, machine.stream.handle)
        _require(context.set_input_shape("INPUT", (3, 8)))

    machine.enqueue(work)


MISUSES: list[Callable[[Machine], None]] = [
    *map(forgotten, ("profile", "shape", "scratch", "INPUT", "OUTPUT")), misaligned, small_scratch, default_stream,
    outside_a_launch, captured_before_it_ran, undeclared_scratch, other_shape,
]  # fmt: skip


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_that_would_be_silent_or_fatal_is_refused(machine: Machine, misuse: Callable[[Machine], None]) -> None:
    with pytest.raises((AssertionError, DeviceMisuse)):
        misuse(machine)


def test_what_is_right_passes(machine: Machine) -> None:
    context = machine.ready()
    plain(machine, context)
    plain(machine, context)
    machine.close()
    machine.stream.close()
    machine.device.close()


def test_runtime_without_a_device_ends_the_process_and_a_builder_gives_a_type_error() -> None:
    api = fake_api("11.4", World(None))
    with pytest.raises(FakeCrash):
        api.module.Runtime(api.logger(MessageLog()))
    with pytest.raises(TypeError, match="nullptr"):
        api.module.Builder(api.logger(MessageLog()))
    rtx = fake_api("rtx-1.7", World(None))
    assert rtx.module.Builder(rtx.logger(MessageLog())) is not None


def test_weak_typing_is_refused_where_it_exists() -> None:
    api = fake_api("10.16", World(HostDevice()))
    builder = api.module.Builder(api.logger(MessageLog()))
    with pytest.raises(AssertionError, match="weakly typed"):
        builder.create_network(0)


def test_plan_of_another_version_or_device_is_refused(tmp_path: Path) -> None:
    old, new = Machine("10.16", tmp_path), Machine("11.4", tmp_path)
    plan = old.builder.build_serialized_network(old.network, old.config)
    runtime = new.trt.Runtime(new.logger)
    assert runtime.deserialize_cuda_engine(bytes(plan)) is None
    assert "expecting library version 11.4.0.106 got 10.16.1.11" in new.log.take()[-1].text
    assert runtime.deserialize_cuda_engine(b"junk") is None


def test_old_library_is_refused() -> None:
    library: Library = fake_library("10.16", World(HostDevice()))
    library.module.__version__ = "10.9.0.34"  # type: ignore[attr-defined]
    with pytest.raises(Exception, match=r"TensorRT 10\.9\.0\.34 is too old, the oldest supported is 10\.16"):
        Api(library.module, "tensorrt").checked()


def test_callbacks_may_come_from_another_thread(machine: Machine) -> None:
    thread = threading.Thread(target=lambda: machine.logger.log(machine.trt.ILogger.ERROR, "from a builder thread"))
    thread.start()
    thread.join()
    assert machine.log.take()[-1].text == "from a builder thread"
