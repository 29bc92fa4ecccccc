"""Facts about an ONNX file, read from its bytes without building the message.

Parsing a large model into a protobuf message costs twice its size for a moment and leaves holes in the heap. The
file's bytes are therefore walked field by field (not mapped: a file cut short meanwhile would kill the process).
Protobuf's wire format is (field number << 3 | wire type) as a varint, then a varint (0), 8 bytes (1), a length and
that many bytes (2) or 4 bytes (5).

Source: protobuf encoding guide; field numbers from onnx.proto (ModelProto, GraphProto, NodeProto, AttributeProto,
TensorProto).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MODEL_OPSET, _MODEL_GRAPH = 8, 7
_OPSET_DOMAIN, _OPSET_VERSION = 1, 2
_GRAPH_NODE, _GRAPH_INITIALIZER, _GRAPH_SPARSE = 1, 5, 15
_NODE_ATTRIBUTE = 5
_ATTRIBUTE_TENSOR, _ATTRIBUTE_GRAPH, _ATTRIBUTE_TENSORS, _ATTRIBUTE_GRAPHS = 5, 6, 10, 11
_TENSOR_DIMS, _TENSOR_TYPE = 1, 2
_SPARSE_VALUES, _SPARSE_INDICES = 1, 2

_BITS: dict[int, int] = {
    1: 32, 2: 8, 3: 8, 4: 16, 5: 16, 6: 32, 7: 64, 9: 8, 10: 16, 11: 64, 12: 32, 13: 64, 14: 64, 15: 128, 16: 16,
    17: 8, 18: 8, 19: 8, 20: 8, 21: 4, 22: 4, 23: 4, 24: 8, 25: 2, 26: 2,
}  # fmt: skip
"""Bits per element of TensorProto.DataType; strings (8) are not counted."""


class NotOnnx(ValueError):
    """The bytes are not a serialised ONNX model."""


@dataclass(frozen=True, slots=True)
class OnnxFacts:
    """Attributes:
    opset: version of the default operator set; 0 if the file imports none.
    weights_bytes: all initializers and constant tensors, subgraphs included, wherever their data lies.
    weights_count: how many tensors those are.
    """

    opset: int
    weights_bytes: int
    weights_count: int


def facts_of(path: Path) -> OnnxFacts:
    """Return what the file holds.

    Raises:
        NotOnnx: the file is empty, truncated or no ONNX model.
        OSError: it cannot be read.
    """
    raw = path.read_bytes()
    if not raw:
        raise NotOnnx("the file is empty")
    return _facts(memoryview(raw))


def _facts(data: memoryview) -> OnnxFacts:
    opset = 0
    graphs: list[memoryview] = []
    sizes: list[int] = []
    for number, field in _fields(data):
        if number == _MODEL_GRAPH and isinstance(field, memoryview):
            graphs.append(field)
        elif number == _MODEL_OPSET and isinstance(field, memoryview):
            opset = _default_opset(field) or opset
    if not graphs:
        raise NotOnnx("the file holds no graph")
    while graphs:
        _walk_graph(graphs.pop(), graphs, sizes)
    return OnnxFacts(opset, sum(sizes), len(sizes))


def _default_opset(data: memoryview) -> int:
    domain, version = b"", 0
    for number, field in _fields(data):
        if number == _OPSET_DOMAIN and isinstance(field, memoryview):
            domain = bytes(field)
        elif number == _OPSET_VERSION and isinstance(field, int):
            version = field
    return version if domain in (b"", b"ai.onnx") else 0


def _walk_graph(graph: memoryview, graphs: list[memoryview], sizes: list[int]) -> None:
    for number, field in _fields(graph):
        if not isinstance(field, memoryview):
            continue
        if number == _GRAPH_INITIALIZER:
            sizes.append(_tensor_bytes(field))
        elif number == _GRAPH_SPARSE:
            sizes.extend(
                _tensor_bytes(part)
                for inner, part in _fields(field)
                if inner in (_SPARSE_VALUES, _SPARSE_INDICES) and isinstance(part, memoryview)
            )
        elif number == _GRAPH_NODE:
            for inner, attribute in _fields(field):
                if inner == _NODE_ATTRIBUTE and isinstance(attribute, memoryview):
                    _walk_attribute(attribute, graphs, sizes)


def _walk_attribute(attribute: memoryview, graphs: list[memoryview], sizes: list[int]) -> None:
    for number, field in _fields(attribute):
        if not isinstance(field, memoryview):
            continue
        if number in (_ATTRIBUTE_TENSOR, _ATTRIBUTE_TENSORS):
            sizes.append(_tensor_bytes(field))
        elif number in (_ATTRIBUTE_GRAPH, _ATTRIBUTE_GRAPHS):
            graphs.append(field)


def _tensor_bytes(tensor: memoryview) -> int:
    count, bits = 1, 0
    for number, field in _fields(tensor):
        if number == _TENSOR_DIMS:
            if isinstance(field, int):
                count *= field
            else:
                at = 0
                while at < len(field):
                    size, at = _varint(field, at)
                    count *= size
        elif number == _TENSOR_TYPE and isinstance(field, int):
            bits = _BITS.get(field, 0)
    return -(-count * bits // 8)


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield (field number, value) of one message; fixed-width fields are skipped, none that we read is one."""
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if number == 0:
            raise NotOnnx("the file is not a protobuf message")
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
        elif wire == 2:
            length, at = _varint(data, at)
            if length > end - at:
                raise NotOnnx(f"the file is cut short: a field of {length} bytes, {end - at} left")
            yield number, data[at : at + length]
            at += length
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
        else:
            raise NotOnnx("the file is not a protobuf message")


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise NotOnnx("the file is cut short or no protobuf message")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
