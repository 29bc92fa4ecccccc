"""One inference as every protocol sees it: the codecs make these, the request's life is the same from here on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engines.tensor import NDArray

Parameter = bool | int | float | str


@dataclass(slots=True)
class InputTensor:
    """A tensor as a client sent it.

    Exactly one of ``raw`` and ``array`` is set. ``raw`` holds the wire form (little-endian, row-major; BYTES with
    length prefixes) and borrows the request body; ``array`` holds already decoded elements (JSON data,
    typed gRPC contents) in the datatype's numpy type and in ``shape``.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    raw: bytes | bytearray | memoryview | None = None
    array: NDArray | None = None


@dataclass(slots=True)
class RequestedOutput:
    """An output a client asked for. ``binary`` None means: whatever the request's default is."""

    name: str
    binary: bool | None = None
    classification: int = 0


@dataclass(slots=True)
class InferRequest:
    """A decoded request, not yet compared with any model.

    Attributes:
        version: empty for the newest.
        request_id: empty if the client sent none.
        outputs: None if the client listed none (all outputs are wanted).
        timeout_us: KServe ``timeout`` parameter, 0 if none. Deadlines from other sources come in ``deadline_ns``.
        deadline_ns: absolute, monotonic; None if the protocol carried none.
    """

    model: str
    version: str
    request_id: str
    inputs: list[InputTensor]
    outputs: list[RequestedOutput] | None = None
    parameters: dict[str, Parameter] = field(default_factory=dict)
    binary_default: bool = False
    timeout_us: int = 0
    deadline_ns: int | None = None


@dataclass(slots=True)
class OutputTensor:
    """A tensor for a client. ``array`` may borrow shared memory: it is valid until the response is released."""

    name: str
    datatype: str
    array: NDArray
    binary: bool | None = None
    classification: int = 0


@dataclass(slots=True)
class InferResponse:
    """What goes back; ``parameters`` is empty unless the client asked for something.

    The receiver calls ``release`` exactly once, after the last byte was rendered or copied.
    """

    model: str
    version: str
    request_id: str
    outputs: list[OutputTensor]
    parameters: dict[str, Parameter] = field(default_factory=dict)
    release: Callable[[], None] = lambda: None
