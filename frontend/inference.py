"""One inference as every protocol sees it: the codecs make these, the request's life is the same from here on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from engines.tensor import NDArray

Parameter = bool | int | float | str


@dataclass(frozen=True, slots=True)
class RegionRange:
    """Where a tensor lies in a client's shared memory: a part of a region that was registered by name."""

    region: str
    offset: int
    size_bytes: int


class Room(Protocol):
    """The bytes of such a part, held for one request."""

    size_bytes: int

    def read_into(self, room: memoryview) -> None:
        """Fill ``room``, of ``size_bytes``.

        Raises:
            InvalidInput: the client took its memory away.
        """
        ...

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write at most ``size_bytes`` at the beginning; raises as ``read_into`` does."""
        ...

    def release(self) -> None:
        """Let go of it, once."""
        ...


class Promised:
    """A ``Room`` of bytes that are still on their way: their number is known, and soon where they go.

    Attributes:
        place: where whoever receives them writes them; set by whoever placed the request.
    """

    __slots__ = ("place", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.place = memoryview(b"")

    def read_into(self, room: memoryview) -> None:
        """Fill ``room``, of ``size_bytes``; only when all have come."""
        room[:] = self.place

    def write(self, data: bytes | bytearray | memoryview) -> None:
        raise AssertionError("nothing is written to what a client sends")

    def release(self) -> None:
        self.place = memoryview(b"")


class LateTensor(Protocol):
    """A tensor whose elements are brought in when their place is known."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def fill(self, room: NDArray) -> None:
        """Write the elements into ``room``, C-contiguous and of ``shape``.

        Raises:
            ServingError: they cannot be had, or are no such elements.
        """
        ...

    def as_array(self) -> NDArray:
        """Return the elements in an array of their own; raises as ``fill`` does."""
        ...


ExecutableInput = NDArray | LateTensor


@dataclass(slots=True)
class InputTensor:
    """A tensor as a client sent it.

    Exactly one of ``raw``, ``array`` and ``region`` is set. ``raw`` holds the wire form (little-endian, row-major;
    BYTES with length prefixes) and borrows the request body; ``array`` holds already decoded elements (JSON data,
    typed gRPC contents) in the datatype's numpy type and in ``shape``. ``region`` says where the wire form lies in the
    client's shared memory; whoever starts the request sets ``room``, the means to read it. A tensor that is still on
    its way has only a ``room``, a ``Promised``.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    raw: bytes | bytearray | memoryview | None = None
    array: NDArray | None = None
    region: RegionRange | None = None
    room: Room | None = None


@dataclass(slots=True)
class RequestedOutput:
    """An output a client asked for. ``binary`` None means: whatever the request's default is.

    With a ``region`` its wire form goes into the client's shared memory; whoever starts the request sets ``room``.
    """

    name: str
    binary: bool | None = None
    classification: int = 0
    region: RegionRange | None = None
    room: Room | None = None


@dataclass(slots=True)
class InferRequest:
    """A decoded request, not yet compared with any model.

    Attributes:
        version: empty for the newest.
        request_id: empty if the client sent none.
        outputs: None if the client listed none (all outputs are wanted).
        timeout_us: KServe ``timeout`` parameter, 0 if none. Deadlines from other sources come in ``deadline_ns``.
        deadline_ns: absolute, monotonic; None if the protocol carried none.
        background: it may wait for everything that is not; lines of batch jobs.
        explain: whether the response should say in which batch the request ran, and why it had that size.
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
    explain: bool = False
    background: bool = False


@dataclass(slots=True)
class OutputTensor:
    """A tensor for a client. ``array`` may borrow shared memory: it is valid until the response is released.

    ``placed``: its wire form is in the client's memory already; the answer tells its name, datatype and shape only.
    """

    name: str
    datatype: str
    array: NDArray
    binary: bool | None = None
    classification: int = 0
    placed: bool = False


@dataclass(slots=True)
class InferResponse:
    """What goes back; ``parameters`` is empty unless the client asked for something.

    ``explained`` says that the parameters are about the batch (``InferRequest.explain``), which HTTP also tells in
    headers. The receiver calls ``release`` exactly once, after the last byte was rendered or copied.
    """

    model: str
    version: str
    request_id: str
    outputs: list[OutputTensor]
    parameters: dict[str, Parameter] = field(default_factory=dict)
    release: Callable[[], None] = lambda: None
    explained: bool = False
