"""A decoded request compared with its model: after this, every size and type in it is proven.

The comparison is with the *client* signature, what the model's users see. What a ``preprocess`` hook makes of it, and
which of the served variants the executable inputs fit, is proven where they are placed in shared memory.
Texts carry the key words that clients and their test suites look for (protocols.md 1.5).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engines.bundle.signature import Signature
from engines.errors import InvalidInput
from engines.tensor import NDArray, TensorSpec, decode_bytes, element_count
from frontend.inference import ExecutableInput, InferRequest, InputTensor, RequestedOutput, Room
from frontend.kserve.contract import Contract, Form, contract_of
from frontend.kserve.json_data import HALF_TYPES, half_output_text
from frontend.kserve.raw_data import Buffer
from frontend.kserve.shapes import refuse_many, shaped, text_of
from frontend.settings import EndpointSettings
from worker.channel.messages import ModelEntry


@dataclass(slots=True)
class CheckedInput:
    """One client input, proven to fit its spec; not changed afterwards. Exactly one of ``raw``, ``array`` and ``room``
    is set.

    Attributes:
        shape: full, every size known.
        raw: numeric elements in wire form, C-contiguous bytes borrowed from the request body; view them with
            ``as_array`` or copy them as they are.
        array: decoded elements in ``shape``; object array of ``bytes`` for BYTES.
        room: numeric elements that are still in the client's memory, or on their way; their number is proven, not
            their values, which the client may change until they have been copied.
    """

    spec: TensorSpec
    shape: tuple[int, ...]
    raw: Buffer | None
    array: NDArray | None
    room: Room | None = None

    def as_array(self) -> NDArray:
        """Return the elements in ``shape``; read-only and without a copy if they came raw.

        Raises:
            InvalidInput: see ``fill``.
        """
        if self.raw is not None:
            return np.frombuffer(self.raw, dtype=self.spec.element.numpy).reshape(self.shape)
        if self.array is not None:
            return self.array
        array: NDArray = np.empty(self.shape, dtype=self.spec.element.numpy)
        self.fill(array)
        return array

    def executable(self) -> ExecutableInput:
        """Return the elements, or this input itself to be filled in where they are wanted."""
        return self.as_array() if self.room is None else self

    def fill(self, room: NDArray) -> None:
        """Copy the elements from the client's memory into a C-contiguous array of ``shape``.

        Raises:
            InvalidInput: the client took its memory away, or a BOOL is neither 0 nor 1.
        """
        assert self.room is not None and room.flags.c_contiguous and room.shape == self.shape
        # Through uint8: numpy cannot export a buffer of bfloat16.
        flat = room.reshape(-1).view(np.uint8)
        self.room.read_into(flat.data)
        self.check_values(flat)

    def check_values(self, flat: NDArray) -> None:
        """Raise InvalidInput if bytes of the right number, (n,) uint8, are no such elements."""
        _check_bool(self.spec, flat)


@dataclass(slots=True)
class Checked:
    """A request that fits its model; not changed afterwards.

    Attributes:
        contract: of the model that it fits.
        inputs: in the order of ``client_inputs``.
        rows: size of the batch axis over all inputs, at least 1; 1 if no client input has a batch axis.
        outputs: what is wanted, in the client's order; every client output if it listed none.
    """

    contract: Contract
    inputs: list[CheckedInput]
    rows: int
    outputs: Sequence[RequestedOutput]


def check(request: InferRequest, entry: ModelEntry, limits: EndpointSettings) -> Checked:
    """Compare a request with a READY model version.

    A request of zero rows is refused: no executable has a batch size 0, and an answer made up without running the
    model would promise shapes that nobody computed.

    Raises:
        InvalidInput: names the tensor, what was expected and what came.
        TooLarge: more tensors than ``max_tensors``, or a BYTES element beyond ``max_bytes_element``.
    """
    signature = entry.signature
    assert signature is not None, f"model '{entry.name}' is {entry.state}, only READY models are checked against"
    contract = contract_of(signature)
    given = request.inputs
    key = tuple([(tensor.name, tensor.datatype, tensor.shape) for tensor in given])
    form = contract.forms.get(key)
    if form is None:
        refuse_many(len(given), "inputs", limits)
        raw_request = len(given) == 1 and given[0].datatype == ""
        if raw_request:
            given = [_of_raw_request(given[0], signature.client_inputs, entry.name)]
        form, inputs = _compare(given, signature, entry.name, limits)
        if not raw_request:
            contract.remember(key, form)
    else:
        inputs = []
        for spec, index, size_bytes in zip(signature.client_inputs, form.order, form.sizes_bytes, strict=True):
            tensor = given[index]
            raw = tensor.raw
            if raw is not None and len(raw) == size_bytes:
                inputs.append(CheckedInput(spec, tensor.shape, raw, None))
            else:
                inputs.append(_check_content(tensor, spec, entry.name, limits))
    return Checked(contract, inputs, form.rows, _check_outputs(request, contract, form.rows, entry.name, limits))


def _compare(
    given: Sequence[InputTensor], signature: Signature, model: str, limits: EndpointSettings
) -> tuple[Form, list[CheckedInput]]:
    """Compare inputs with what the model takes, one after the other."""
    specs = signature.client_inputs
    ordered = _in_order(given, specs, model)
    rows = 0
    inputs: list[CheckedInput] = []
    sizes_bytes: list[int] = []
    for tensor, spec in zip(ordered, specs, strict=True):
        _check_type_and_shape(tensor, spec, model)
        axis = spec.batch_axis
        if axis is not None:
            size = tensor.shape[axis]
            if size == 0:
                raise InvalidInput(
                    f"input '{spec.name}' has zero rows: inference request batch-size must be at least 1 "
                    f"for '{model}', got shape {text_of(tensor.shape)}"
                )
            if rows and size != rows:
                raise InvalidInput(
                    f"input '{spec.name}' batch size does not match other inputs for '{model}': "
                    f"expected {rows}, got {size}"
                )
            rows = size
        inputs.append(_check_content(tensor, spec, model, limits))
        # A BOOL byte must be looked at, a BYTES tensor taken apart, and numpy asked whether it has the shape if empty.
        plain = spec.dtype not in ("bool", "bytes")
        sizes_bytes.append(element_count(tensor.shape) * spec.element.itemsize or -1 if plain else -1)
    places = {tensor.name: index for index, tensor in enumerate(given)}
    return Form(tuple(places[spec.name] for spec in specs), rows or 1, tuple(sizes_bytes)), inputs


def require_room(output: str, needed_bytes: int, given_bytes: int) -> None:
    """Raise InvalidInput if an output does not fit into what the client gave for it."""
    if needed_bytes > given_bytes:
        raise InvalidInput(
            f"shared memory size specified with the request for output '{output}' ({given_bytes} bytes) should be at "
            f"least {needed_bytes} bytes to hold the results"
        )


def _of_raw_request(tensor: InputTensor, specs: Sequence[TensorSpec], model: str) -> InputTensor:
    """Give the single tensor of a raw request its name, datatype and shape: batch 1, one free size deduced."""
    if len(specs) != 1:
        raise InvalidInput(
            f"expected {len(specs)} inputs but got 1 inputs for model '{model}': "
            f"a raw binary request is only for models with one input"
        )
    spec = specs[0]
    raw = memoryview(tensor.raw or b"")
    shape = [1 if axis == spec.batch_axis else size for axis, size in enumerate(spec.shape)]
    free = [axis for axis, size in enumerate(shape) if size < 0]
    itemsize = spec.element.itemsize
    if itemsize == 0:
        # As elsewhere in this protocol: the body of a raw request is one element, without its length prefix.
        shape = [1 if size < 0 else size for size in shape]
        array = np.empty(1, dtype=np.object_)
        array[0] = bytes(raw)
        if element_count(shape) != 1:
            raise InvalidInput(
                f"unexpected shape for input '{spec.name}' for model '{model}'. Expected {text_of(spec.shape)}, "
                "got the single element of a raw binary request"
            )
        return InputTensor(spec.name, "BYTES", tuple(shape), array=array.reshape(shape))
    if len(free) > 1:
        raise InvalidInput(
            f"input '{spec.name}' of model '{model}' has shape {text_of(spec.shape)}: the shape of a raw binary "
            "request cannot be deduced, send 'shape' in a JSON header"
        )
    if free:
        fixed_bytes = element_count([size for size in shape if size >= 0]) * itemsize
        shape[free[0]] = len(raw) // fixed_bytes if fixed_bytes else 0
    return InputTensor(spec.name, spec.element.wire, tuple(shape), raw=raw)


def _in_order(given: Sequence[InputTensor], specs: Sequence[TensorSpec], model: str) -> list[InputTensor]:
    by_name = {tensor.name: tensor for tensor in given}
    names = [spec.name for spec in specs]
    if len(given) == len(specs) and len(by_name) == len(given):
        try:
            return [by_name[name] for name in names]
        except KeyError:
            stranger = next(name for name in by_name if name not in names)
            raise InvalidInput(
                f"unexpected inference input '{stranger}' for model '{model}', expected input(s) {names}"
            ) from None
    if len(by_name) < len(given):
        twice = next(name for name, times in Counter(tensor.name for tensor in given).items() if times > 1)
        raise InvalidInput(f"input '{twice}' appears more than once in the request for model '{model}'")
    missing = [name for name in names if name not in by_name]
    unknown = [name for name in by_name if name not in names]
    tail = f", but missing required input(s) {missing}" if missing else ""
    tail += f", unexpected input(s) {unknown}" if unknown else ""
    raise InvalidInput(
        f"expected {len(specs)} inputs but got {len(given)} inputs for model '{model}'. "
        f"Got input(s) {list(by_name)}{tail}"
    )


def _check_type_and_shape(tensor: InputTensor, spec: TensorSpec, model: str) -> None:
    if tensor.datatype != spec.element.wire:
        raise InvalidInput(
            f"inference input '{spec.name}' data-type is '{tensor.datatype}', "
            f"but model '{model}' expects '{spec.element.wire}'"
        )
    shape = tensor.shape
    if len(shape) == len(spec.shape):
        for size, expected in zip(shape, spec.shape, strict=True):
            if size != expected and (expected >= 0 or size < 0):
                break
        else:
            return
    raise InvalidInput(
        f"unexpected shape for input '{spec.name}' for model '{model}'. "
        f"Expected {text_of(spec.shape)}, got {text_of(shape)}"
    )


def _check_content(tensor: InputTensor, spec: TensorSpec, model: str, limits: EndpointSettings) -> CheckedInput:
    shape = tensor.shape
    if tensor.room is not None:
        return _check_room(tensor, tensor.room, spec, model, limits)
    if tensor.raw is None:
        assert tensor.array is not None, "an input tensor has one of raw, array and room"
        assert tensor.array.shape == shape, f"{tensor.array.shape=} {shape=}"
        return CheckedInput(spec, shape, None, tensor.array)
    raw = memoryview(tensor.raw)
    count = element_count(shape)
    itemsize = spec.element.itemsize
    if itemsize == 0:
        flat = decode_bytes(raw, count, spec.name, limits.max_bytes_element)
        return CheckedInput(spec, shape, None, shaped(spec.name, flat, shape))
    _check_size(len(raw), count * itemsize, spec, model)
    if count == 0:
        return CheckedInput(spec, shape, None, shaped(spec.name, np.empty(0, dtype=spec.element.numpy), shape))
    _check_bool(spec, np.frombuffer(raw, dtype=np.uint8))
    return CheckedInput(spec, shape, raw, None)


def _check_room(
    tensor: InputTensor, room: Room, spec: TensorSpec, model: str, limits: EndpointSettings
) -> CheckedInput:
    """As ``_check_content``, of a tensor in the client's memory: numbers stay there, elements of any length do not."""
    shape = tensor.shape
    count = element_count(shape)
    itemsize = spec.element.itemsize
    if itemsize and count:
        _check_size(room.size_bytes, count * itemsize, spec, model)
        return CheckedInput(spec, shape, None, None, room)
    raw = bytearray(room.size_bytes)
    room.read_into(memoryview(raw))
    return _check_content(InputTensor(tensor.name, tensor.datatype, shape, raw), spec, model, limits)


def _check_size(given: int, expected: int, spec: TensorSpec, model: str) -> None:
    if given != expected:
        raise InvalidInput(
            f"input byte size mismatch for input '{spec.name}' for model '{model}'. Expected {expected}, got {given}"
        )


def _check_bool(spec: TensorSpec, flat: NDArray) -> None:
    if spec.dtype == "bool" and (top := int(flat.max())) > 1:
        raise InvalidInput(f"input '{spec.name}': a byte of datatype 'BOOL' must be 0 or 1, got {top}")


def _check_outputs(
    request: InferRequest, contract: Contract, rows: int, model: str, limits: EndpointSettings
) -> Sequence[RequestedOutput]:
    wanted: Sequence[RequestedOutput] | None = request.outputs
    if wanted is None:
        wanted = contract.wanted
        if request.binary_default or not contract.half_outputs:
            return wanted
    else:
        refuse_many(len(wanted), "outputs", limits)
        if len(wanted) > 1 and len({output.name for output in wanted}) < len(wanted):
            twice = next(name for name, times in Counter(output.name for output in wanted).items() if times > 1)
            raise InvalidInput(f"output '{twice}' is requested more than once from model '{model}'")
    for output in wanted:
        known = contract.outputs.get(output.name)
        if known is None:
            raise InvalidInput(
                f"unexpected inference output '{output.name}' for model '{model}', "
                f"expected any of {list(contract.outputs)}"
            )
        spec, wire, _ = known
        if output.classification:
            if wire in ("BOOL", "BYTES"):
                raise InvalidInput(
                    f"output '{output.name}': classification needs a numeric output, its datatype is '{wire}'"
                )
            continue
        # Found here and not when the answer is rendered: the model need not run for an answer that cannot be told.
        if output.region is not None:
            shape = [rows if axis == spec.batch_axis else size for axis, size in enumerate(spec.shape)]
            if spec.element.itemsize and min(shape, default=0) >= 0:
                require_room(output.name, element_count(shape) * spec.element.itemsize, output.region.size_bytes)
            continue
        binary = request.binary_default if output.binary is None else output.binary
        if not binary and wire in HALF_TYPES:
            raise InvalidInput(half_output_text(output.name, wire))
    return wanted
