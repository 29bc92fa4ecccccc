"""One execution context per profile, with its shapes, the layout of its inputs and outputs, and its graphs.

A context is set to its profile and shapes once. What changes afterwards are addresses, which are set where the work is
enqueued and only when they differ from the last ones; a captured graph has them inside and is thrown away with them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engines.device.base import ALIGNMENT_BYTES, Graph, Span, Work
from engines.device.errors import CannotCapture
from engines.errors import EngineFailed, NotReady
from engines.tensor import BY_NAME, element_count
from engines.tensorrt.names import Api
from engines.tensorrt.profiles import Profile
from engines.tensorrt.rooms import Region, Rooms
from engines.tensorrt.weights import Weights

log = logging.getLogger("engines.tensorrt")


@dataclass(frozen=True, slots=True)
class IoTensor:
    """An input or output in a region.

    Attributes:
        shape: full; for ``dynamic`` outputs, whose size the data decides, -1 where it is unknown.
        offset_bytes: in the region.
        room_bytes: largest size.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    room_bytes: int
    dynamic: bool = False


@dataclass(slots=True)
class Outcome:
    """What became of the last execution in one region."""

    errors: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class _Prepared:
    """An execution that is ready for one region: addresses of a moment, and how it is started."""

    key: tuple[int, int]
    work: Work
    reads: list[Span]
    writes: list[Span]
    outcome: Outcome
    graph: Graph | None = None
    runs: int = 0


class ProfileContext:
    """Executes one (variant, batch size)."""

    def __init__(self, title: str, api: Api, engine: Any, profile: Profile, rooms: Rooms, weights: Weights) -> None:
        self.profile = profile
        self.inputs: tuple[IoTensor, ...] = ()
        self.outputs: tuple[IoTensor, ...] = ()
        self.inputs_bytes = 0
        self.region_bytes = 0
        self.scratch_bytes = 0
        self._title = title
        self._api = api
        self._engine = engine
        self._device = rooms.device
        self._rooms = rooms
        self._weights = weights
        self._context: Any = None
        self._recorder: Any = None
        self._allocators: dict[str, Any] = {}
        self._prepared: dict[int, _Prepared] = {}
        self._captures = rooms.device.capabilities.graphs
        self._bound: _Prepared | None = None
        self._bound_weights = -1

    def start(self, output_names: Sequence[str]) -> None:
        """Make the context and lay out its tensors; ``output_names`` in the manifest's order.

        Raises:
            NotReady: the library makes no context, or refuses the shapes.
        """
        strategy = self._api.module.ExecutionContextAllocationStrategy.USER_MANAGED
        self._context = self._engine.create_execution_context(strategy)
        if self._context is None:
            raise NotReady(f"{self._title}: no execution context for {self._shapes_text()}")
        self._recorder = self._api.error_recorder()
        self._context.error_recorder = self._recorder
        problems: list[str] = []
        with self._rooms.lock:
            compute = self._rooms.shared.compute
            self._device.launch(compute, lambda: self._set_shapes(problems), reads=(), writes=())
            compute.synchronize()
        if problems:
            raise NotReady(f"{self._title}: {self._shapes_text()}: {'; '.join(problems)}")
        # Of the largest profile: the library asks for that much whichever profile runs, and all of them will.
        self.scratch_bytes = int(self._engine.device_memory_size_v2)
        self._lay_out(output_names)
        self._rooms.require(self.scratch_bytes, self.region_bytes)

    @property
    def dynamic(self) -> bool:
        """Whether the size of some output depends on the data."""
        return bool(self._allocators)

    def launch(self, region: Region) -> Outcome:
        """Enqueue the execution on the compute stream and return where its outcome will be; the lock is held.

        The first time at given addresses plainly, which lets the library set up what it needs; then as a graph.
        """
        compute = self._rooms.shared.compute
        prepared = self._for_region(region)
        prepared.outcome.errors.clear()
        if prepared.graph is None and prepared.runs == 1 and self._captures and not self.dynamic:
            self._capture(prepared)
        prepared.runs += 1
        if prepared.graph is not None:
            prepared.graph.launch(compute)
        else:
            self._device.launch(compute, prepared.work, reads=prepared.reads, writes=prepared.writes)
        return prepared.outcome

    def close(self) -> None:
        """Let go of graphs and context; nothing may be in flight."""
        for prepared in self._prepared.values():
            if prepared.graph is not None:
                prepared.graph.close()
        self._prepared.clear()
        self._bound = None
        self._context = self._recorder = self._engine = None
        self._allocators.clear()

    def _for_region(self, region: Region) -> _Prepared:
        key = (self._rooms.generation, self._weights.generation)
        prepared = self._prepared.get(region.index)
        if prepared is None or prepared.key != key:
            if prepared is not None and prepared.graph is not None:
                prepared.graph.close()
            prepared = self._prepared[region.index] = self._prepare(key, region.span)
        return prepared

    def _prepare(self, key: tuple[int, int], region: Span) -> _Prepared:
        weights, scratch = self._weights.span, self._rooms.scratch
        # Not the gaps between inputs, where nothing is ever written.
        reads = [region.part(tensor.offset_bytes, tensor.room_bytes) for tensor in self.inputs if tensor.room_bytes]
        writes = []
        if self.region_bytes > self.inputs_bytes:
            writes.append(region.part(self.inputs_bytes, self.region_bytes - self.inputs_bytes))
        if weights is not None:
            reads.append(weights)
        if scratch is not None and self.scratch_bytes:
            writes.append(scratch)
        handle = self._rooms.shared.compute.handle
        addresses = self._weights.addresses()
        outcome = Outcome()

        def work() -> None:
            # Runs later on some devices: everything it needs is its own.
            try:
                self._bind(prepared, region, addresses, scratch)
                self._recorder.clear()
                succeeded = self._context.execute_async_v3(handle)
                outcome.errors = self._recorder.texts()
                if not succeeded and not outcome.errors:
                    outcome.errors = ["the execution could not be started and no reason was given"]
                for name, allocator in self._allocators.items():
                    if allocator.shape is not None:
                        outcome.shapes[name] = allocator.shape
                    elif succeeded:
                        outcome.errors.append(f"output '{name}' needs {allocator.refused_bytes} bytes")
            except Exception as error:
                self._bound = None
                outcome.errors = [f"{type(error).__name__}: {error}"]

        prepared = _Prepared(key, work, reads, writes, outcome)
        return prepared

    def _capture(self, prepared: _Prepared) -> None:
        try:
            prepared.graph = self._device.capture(
                self._rooms.shared.compute, prepared.work, reads=prepared.reads, writes=prepared.writes
            )
            reason = "; ".join(prepared.outcome.errors)
        except CannotCapture as error:
            reason = str(error)
        if reason:
            # The library may fail inside a capture that the driver then ends well: such a graph does nothing.
            if prepared.graph is not None:
                prepared.graph.close()
                prepared.graph = None
            prepared.outcome.errors.clear()
            self._captures = False
            log.info("tensorrt.no_graph model=%s shapes=%s reason=%s", self._title, self._shapes_text(), reason)

    def _bind(self, prepared: _Prepared, region: Span, weights: Mapping[str, int], scratch: Span | None) -> None:
        """Set every address that differs from the last execution's."""
        for output in self.outputs:
            if output.dynamic:
                self._allocators[output.name].offer(region.address + output.offset_bytes, output.room_bytes)
        if self._bound is prepared:
            return
        context = self._context
        if scratch is not None:
            context.set_device_memory(scratch.address, scratch.size_bytes)
        for tensor in (*self.inputs, *self.outputs):
            if not tensor.dynamic:
                _require(
                    context.set_tensor_address(tensor.name, region.address + tensor.offset_bytes),
                    f"address of '{tensor.name}'",
                )
        if self._bound_weights != prepared.key[1]:
            for name, address in weights.items():
                _require(context.set_tensor_address(name, address), f"address of '{name}'")
            self._bound_weights = prepared.key[1]
        self._bound = prepared

    def _set_shapes(self, problems: list[str]) -> None:
        context = self._context
        try:
            if not context.set_optimization_profile_async(self.profile.index, self._rooms.shared.compute.handle):
                problems.append(f"profile {self.profile.index} cannot be chosen")
                return
            for name, dims in self.profile.shapes:
                if not context.set_input_shape(name, dims):
                    problems.append(f"shape {list(dims)} of input '{name}' is refused")
            missing = context.infer_shapes()
            if missing:
                problems.append(f"shapes cannot be inferred, values are missing of {', '.join(missing)}")
            problems += self._recorder.texts()
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}")

    def _lay_out(self, output_names: Sequence[str]) -> None:
        at = 0
        inputs, outputs = [], []
        for name, dims in self.profile.shapes:
            dtype = self._dtype(name)
            size = element_count(dims) * BY_NAME[dtype].itemsize
            inputs.append(IoTensor(name, dtype, dims, at, size))
            at = _aligned(at + size)
        self.inputs_bytes = at
        for name in output_names:
            dtype = self._dtype(name)
            shape = tuple(int(size) for size in self._context.get_tensor_shape(name))
            dynamic = any(size < 0 for size in shape)
            if dynamic:
                size = int(self._context.get_max_output_size(name))
                self._allocators[name] = allocator = self._api.output_allocator()
                if not self._context.set_output_allocator(name, allocator):
                    raise NotReady(f"{self._title}: output '{name}' of unknown size takes no allocator")
            else:
                size = element_count(shape) * BY_NAME[dtype].itemsize
            outputs.append(IoTensor(name, dtype, shape, at, size, dynamic))
            at = _aligned(at + size)
        self.region_bytes = at
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)

    def _dtype(self, name: str) -> str:
        dtype = self._api.dtype_name(self._engine.get_tensor_dtype(name))
        if dtype not in BY_NAME:
            raise NotReady(f"{self._title}: '{name}' is {dtype} in TensorRT, which cannot be carried")
        return dtype

    def _shapes_text(self) -> str:
        return ", ".join(f"{name} {list(dims)}" for name, dims in self.profile.shapes)


def _require(succeeded: Any, what: str) -> None:
    if not succeeded:
        raise EngineFailed(f"{what} is refused")


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
