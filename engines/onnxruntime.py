"""The CPU engine: one ONNX Runtime session per model serves every variant and batch size.

A session of its own per batch size would hold the weights again each time and is not faster, so compiled batch sizes
are only the row counts that are used. Executions go through the C++ binding objects: they cost half of the public
wrapper, bind plain addresses, and carry bfloat16, which the wrapper cannot return.

Memory: the runtime's arena keeps the high-water mark of the largest (variant, batch size) that ran; since those are a
closed list, so is its size. ``close`` gives it back.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime
from onnxruntime.capi import _pybind_state as binding

from engines.agreement import FileTensor, model_name, require_agreement, require_facts
from engines.base import Footprint, Rows, Slot, Timing
from engines.bundle.manifest import Manifest
from engines.bundle.signature import Signature
from engines.cpus import available_cpus, compute_threads
from engines.errors import EngineFailed, NotReady
from engines.process_memory import release_freed, resident_bytes
from engines.staging import HostSlot, Plan, Turns, address_of
from engines.tensor import BY_NAME, NDArray, element_count

MAX_BINDINGS: Final = 64
"""Address sets remembered per executable. Requests reuse few block positions; beyond that binding again is cheap."""
MAX_MESSAGE_CHARS: Final = 400
"""Length of a runtime message that is passed on; the rest is build paths and template names."""

_TYPES: Final[dict[str, str]] = {
    "tensor(bool)": "bool", "tensor(uint8)": "u8", "tensor(uint16)": "u16", "tensor(uint32)": "u32",
    "tensor(uint64)": "u64", "tensor(int8)": "i8", "tensor(int16)": "i16", "tensor(int32)": "i32",
    "tensor(int64)": "i64", "tensor(float16)": "f16", "tensor(bfloat16)": "bf16", "tensor(float)": "f32",
    "tensor(double)": "f64",
}  # fmt: skip
_ONNX_TYPES: Final[dict[str, int]] = {
    "f32": 1, "u8": 2, "i8": 3, "u16": 4, "i16": 5, "i32": 6, "i64": 7, "bool": 9, "f16": 10, "f64": 11, "u32": 12,
    "u64": 13, "bf16": 16,
}  # fmt: skip
_NAME_OF_ONNX_TYPE: Final[dict[int, str]] = {number: name for name, number in _ONNX_TYPES.items()}

_CPU: Final = binding.OrtDevice(binding.OrtDevice.cpu(), binding.OrtDevice.default_memory(), 0)


class OnnxRuntimeEngine:
    """Runs ONNX files on the CPU.

    Args:
        threads: threads that compute one operator; 0 takes the CPUs this process may use, less one.
        spinning: whether idle compute threads burn CPU to start sooner; they then take it from frontends.
    """

    name = "onnxruntime"

    def __init__(self, *, threads: int = 0, spinning: bool = False) -> None:
        self.threads = threads or compute_threads(available_cpus())
        self._spinning = spinning

    def open(self, manifest: Manifest, model_file: Path) -> OnnxRuntimeModel:
        name = model_name(model_file)
        weights_bytes = require_facts(model_file).weights_bytes
        resident_before = resident_bytes()
        try:
            session = onnxruntime.InferenceSession(str(model_file), self._options(), providers=["CPUExecutionProvider"])
        except Exception as error:
            release_freed()
            raise NotReady(f"{name}: {model_file} does not load: {_load_hint(str(error))}") from error
        try:
            require_agreement(
                manifest,
                {tensor.name: _file_tensor(tensor) for tensor in session.get_inputs()},
                {tensor.name: _file_tensor(tensor) for tensor in session.get_outputs()},
                model_file,
            )
        except NotReady:
            # The traceback keeps this frame alive, and would keep the weights with it.
            session = None
            release_freed()
            raise
        # The wrapper keeps its arguments for a fallback to other providers; the C++ session alone is enough.
        return OnnxRuntimeModel(name, session._sess, manifest, weights_bytes, resident_before)

    def close(self) -> None:
        """Nothing is shared between models."""

    def _options(self) -> Any:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
        # Failures come back as exceptions; printing them as well would fill the worker's log with each bad request.
        options.log_severity_level = 4
        options.add_session_config_entry("session.intra_op.allow_spinning", "1" if self._spinning else "0")
        return options


class OnnxRuntimeModel:
    """One session and the executables over it."""

    def __init__(
        self, name: str, session: Any, manifest: Manifest, weights_bytes: int, resident_before_bytes: int
    ) -> None:
        self._name = name
        self._session: Any = session
        self._manifest = manifest
        self._weights_bytes = weights_bytes
        self._resident_before_bytes = resident_before_bytes
        self._scratch_bytes = 0
        self._executables: dict[tuple[int, int], OnnxRuntimeExecutable] = {}
        self._run_options = binding.RunOptions()

    @property
    def footprint(self) -> Footprint:
        """Weights as the file holds them; scratch as the process grew beyond them while loading and probing."""
        return Footprint(self._weights_bytes, self._scratch_bytes, exact=False)

    def run(self, inputs: list[NDArray]) -> list[NDArray]:
        assert self._session is not None, "the model is closed"
        io = binding.SessionIOBinding(self._session)
        # Held until the run is over: only their addresses are bound.
        arrays = [np.ascontiguousarray(array) for array in inputs]
        for spec, given, array in zip(self._manifest.inputs, inputs, arrays, strict=True):
            assert array.dtype == spec.element.numpy, f"'{spec.name}': expected {spec.dtype}, got {array.dtype}"
            # ascontiguousarray turns a scalar into one row.
            io.bind_input(spec.name, _CPU, _ONNX_TYPES[spec.dtype], list(given.shape), address_of(array))
        for spec in self._manifest.outputs:
            io.bind_output(spec.name, _CPU)
        try:
            self._session.run_with_iobinding(io, self._run_options)
        except Exception as error:
            raise EngineFailed(f"model '{self._name}': {_shortened(str(error))}") from error
        return [_copied(value) for value in io.get_outputs()]

    def prepare(self, signature: Signature) -> None:
        assert self._session is not None, "the model is closed"
        self._executables = {
            (variant, batch_size): OnnxRuntimeExecutable(
                self._session, Plan.of(self._name, signature, variant, batch_size), batch_size
            )
            for variant in range(len(signature.variants))
            for batch_size in signature.batch_sizes
        }
        grown_bytes = resident_bytes() - self._resident_before_bytes - self._weights_bytes
        self._scratch_bytes = max(0, grown_bytes)

    def executable(self, variant: int, batch_size: int) -> OnnxRuntimeExecutable:
        return self._executables[variant, batch_size]

    def close(self) -> None:
        for executable in self._executables.values():
            executable.close()
        self._executables.clear()
        self._session = None
        release_freed()


class _BoundSlot(HostSlot):
    """A slot and the C++ binding over its arrays."""

    __slots__ = ("io",)

    io: Any


class OnnxRuntimeExecutable:
    """One (variant, batch size) of a session; ``launch`` blocks and releases the GIL."""

    binds = True
    direct_bytes = 0

    def __init__(self, session: Any, plan: Plan, batch_size: int) -> None:
        self.batch_size = batch_size
        self._session: Any = session
        self._plan = plan
        self._input_rows = [
            (spec.name, _ONNX_TYPES[spec.dtype], list(shape))
            for spec, shape in zip(plan.input_specs, plan.inputs, strict=True)
        ]
        self._output_rows = [
            (spec.name, _ONNX_TYPES[spec.dtype], list(shape), dynamic)
            for spec, shape, dynamic in zip(plan.output_specs, plan.outputs, plan.dynamic, strict=True)
        ]
        self._nbytes = [
            element_count(shape) * spec.element.itemsize
            for shape, spec in zip(plan.inputs + plan.outputs, plan.input_specs + plan.output_specs, strict=True)
        ]
        self._dynamic_names = [name for name, _, _, dynamic in self._output_rows if dynamic]
        self._own = Turns(self._made)
        self._bindings: dict[tuple[int, ...], Any] = {}
        self._run_options = binding.RunOptions()

    def slot(self) -> Slot:
        return self._own.take()

    def bind(self, inputs: list[NDArray], outputs: list[NDArray]) -> Slot:
        arrays = inputs + outputs
        addresses = tuple([address_of(array) for array in arrays])
        io = self._bindings.get(addresses)
        if io is None:
            self._plan.require_fit(inputs, outputs)
            if len(self._bindings) >= MAX_BINDINGS:
                self._bindings.clear()
            io = self._bindings[addresses] = self._bound(addresses)
        # What was found fitted here once; this much keeps a mistake of ours from reaching beyond the arrays.
        assert [array.nbytes for array in arrays] == self._nbytes, "arrays of other sizes at the same addresses"
        slot = _BoundSlot(inputs, list(outputs))
        slot.io = io
        return slot

    def rows(self, slot: Slot, inputs: Sequence[Rows], outputs: Sequence[Rows]) -> None:
        raise AssertionError("rows are gathered into the slot: there is no device to copy them to")

    def stage(self, slot: Slot) -> None:
        """Nothing to move: the CPU computes where the arrays are."""

    def unstage(self, slot: Slot) -> None:
        """Nothing was moved."""

    def launch(self, slot: Slot) -> None:
        assert isinstance(slot, _BoundSlot)
        io = slot.io
        for name in self._dynamic_names:
            # A free output keeps the memory and shape of its first run unless it is bound anew.
            io.bind_output(name, _CPU)
        slot.error = None
        started_ns = time.monotonic_ns()
        try:
            self._session.run_with_iobinding(io, self._run_options)
        except Exception as error:
            slot.error = self._failure(str(error))
        slot.compute_ns = time.monotonic_ns() - started_ns

    def finish(self, slot: Slot) -> Timing:
        assert isinstance(slot, _BoundSlot)
        if slot.error is not None:
            raise slot.error
        if self._dynamic_names:
            values = slot.io.get_outputs()
            for index, (_, _, _, dynamic) in enumerate(self._output_rows):
                if dynamic:
                    self._plan.require_shape(index, tuple(values[index].shape()))
                    slot.outputs[index] = self._plan.checked(index, _copied(values[index]))
        return Timing(slot.compute_ns)

    def close(self) -> None:
        """Let go of the session and every buffer."""
        self._own.clear()
        self._bindings.clear()
        self._session = None

    def _made(self) -> _BoundSlot:
        slot = _BoundSlot.for_plan(self._plan)
        slot.io = self._bound(tuple(address_of(array) for array in slot.inputs + slot.outputs))
        return slot

    def _bound(self, addresses: tuple[int, ...]) -> Any:
        io = binding.SessionIOBinding(self._session)
        at = iter(addresses)
        for name, onnx_type, shape in self._input_rows:
            io.bind_input(name, _CPU, onnx_type, shape, next(at))
        for name, onnx_type, shape, dynamic in self._output_rows:
            address = next(at)
            if dynamic:
                io.bind_output(name, _CPU)
            else:
                io.bind_output(name, _CPU, onnx_type, shape, address)
        return io

    def _failure(self, message: str) -> EngineFailed:
        """Return the error for a run that raised; an output of another shape gets the same words as anywhere else."""
        found = _WRONG_SHAPE.search(message)
        names = [spec.name for spec in self._plan.output_specs]
        if found is not None and found["name"] in names:
            got = tuple(int(size) for size in re.findall(r"\d+", found["got"]))
            try:
                self._plan.require_shape(names.index(found["name"]), got)
            except EngineFailed as error:
                return error
        return EngineFailed(f"model '{self._plan.model}': {_shortened(message)}")


_WRONG_SHAPE: Final = re.compile(
    r"OrtValue provided for output '(?P<name>[^']*)'.*?has shape \{[^}]*\} but the computed output shape for this run "
    r"is \{(?P<got>[^}]*)\}",
    re.DOTALL,
)
_NODE_FAILED: Final = re.compile(
    r".*returned while running (?P<operator>\S+) node\. Name:'(?P<node>[^']*)' Status Message: (?P<why>.*)", re.DOTALL
)
_STATUS: Final = re.compile(r"^(Error in execution: )?\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : ")
_SOURCE_PLACE: Final = re.compile(r"/\S+\.(?:cc|h):\d+ .*?\) (?:const )?(?=\S)", re.DOTALL)


def _shortened(message: str) -> str:
    """Return a runtime message without status numbers, build paths and C++ signatures."""
    message = _STATUS.sub("", message.strip())
    found = _NODE_FAILED.match(message)
    if found is not None:
        node = f" '{found['node']}'" if found["node"] else ""
        message = f"{found['operator']} node{node} failed: {found['why']}"
    message = " ".join(_SOURCE_PLACE.sub("", message).split())
    return message if len(message) <= MAX_MESSAGE_CHARS else message[: MAX_MESSAGE_CHARS - 3] + "..."


def _load_hint(message: str) -> str:
    """Return why a file does not load, with what to do about it where that is known."""
    short = _shortened(message)
    runtime = f"ONNX Runtime {onnxruntime.__version__}"
    if "opset" in message.lower() and "support" in message.lower():
        return f"{short} ({runtime}: export the model with an older opset, or install a newer onnxruntime)"
    if "NOT_IMPLEMENTED" in message:
        return f"{short} ({runtime} has no CPU kernel for this operator and data type; export the model as f32)"
    if "is not a registered function/op" in message or "No Op registered" in message:
        return f"{short} ({runtime} does not know this operator)"
    return short


def _file_tensor(tensor: Any) -> FileTensor:
    dims = tuple(size if isinstance(size, int) else -1 for size in tensor.shape)
    return FileTensor(tensor.name, _TYPES.get(tensor.type, tensor.type), dims)


def _copied(value: Any) -> NDArray:
    """Return a runtime-owned tensor as an array of our own."""
    name = _NAME_OF_ONNX_TYPE.get(value.element_type()) if value.is_tensor() else None
    if name is None:
        raise EngineFailed(f"an output of type {value.data_type()} cannot be returned; expected a numeric tensor")
    shape, dtype = tuple(value.shape()), BY_NAME[name].numpy
    size = value.tensor_size_in_bytes()
    if size == 0:
        return np.empty(shape, dtype)
    raw = (ctypes.c_char * size).from_address(value.data_ptr())
    return np.frombuffer(raw, dtype=dtype).reshape(shape).copy()
