"""What the protocol renderings (HTTP, gRPC) may ask of a frontend; ``frontend.app`` provides it.

The interface stands apart so that codecs and servers can be built and tested against a small double.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from engines.errors import ServingError
from frontend.inference import InferRequest, InferResponse
from frontend.kserve.memory_store import ClientMemory
from frontend.settings import EndpointSettings
from worker.channel.messages import ModelEntry

Done = Callable[[InferResponse | ServingError], None]


class Call(Protocol):
    """A request under way."""

    def cancel(self) -> None:
        """Withdraw it: the client went away. ``Done`` is not called afterwards. Idempotent."""
        ...


class Receiving(Call, Protocol):
    """A request whose elements are on their way to the ``place`` of each input's ``room``, a ``Promised``.

    Once ``Done`` or ``cancel`` was called, the places belong to others.
    """

    def complete(self) -> None:
        """All elements are there. Called at most once."""
        ...


class Serving(Protocol):
    """A frontend, seen from a protocol."""

    @property
    def limits(self) -> EndpointSettings: ...

    @property
    def memory(self) -> ClientMemory:
        """Shared memory that clients have registered."""
        ...

    def live(self) -> bool:
        """Whether the process works at all."""
        ...

    def ready(self) -> bool:
        """Whether the worker is attached, no required model failed and the node is not draining."""
        ...

    def draining(self) -> bool: ...

    def entries(self) -> list[ModelEntry]:
        """Return every known model version, ready or not, for the repository index."""
        ...

    def entry(self, model: str, version: str = "") -> ModelEntry:
        """Return a READY version; the newest ready one if ``version`` is empty.

        Raises:
            NotFound: unknown model or version ("Request for unknown model: 'M' is not found").
            InvalidInput: the version is not a number.
            NotReady: known but loading, failed or unloaded; the message says which and why.
        """
        ...

    def versions(self, model: str) -> list[str]:
        """Return the ready versions of a model, ascending; empty if none."""
        ...

    def start(self, request: InferRequest, arrival_ns: int, done: Done) -> Call:
        """Begin one inference; ``done`` is called exactly once unless cancelled, possibly before this returns."""
        ...

    def receive(self, request: InferRequest, arrival_ns: int, done: Done) -> Receiving | None:
        """Begin one inference before its elements are there: the ``room`` of every input is a ``Promised``, none empty
        and none of BYTES, and no output has a region.

        As ``start``; what is wrong without knowing the elements is told before this returns. None if this request
        must be started with its elements: then nothing has happened, and ``done`` is not called.
        """
        ...

    async def infer(self, request: InferRequest, arrival_ns: int) -> InferResponse:
        """Like ``start``, for coroutines: cancelling the coroutine withdraws the request.

        Raises:
            ServingError: with the kind that says what happened.
        """
        ...

    async def statistics(self, model: str = "", version: str = "") -> list[dict[str, Any]]:
        """Return KServe statistics objects (protocols.md 1.9) of one model version, one model, or all."""
        ...


async def awaited(start: Callable[[Done], Call]) -> InferResponse:
    """Return the response of a request that ``start`` begins; cancelling the coroutine withdraws the request.

    Raises:
        ServingError: with the kind that says what happened.
    """
    future: asyncio.Future[InferResponse] = asyncio.get_running_loop().create_future()

    def done(outcome: InferResponse | ServingError) -> None:
        if future.done():
            if isinstance(outcome, InferResponse):
                outcome.release()
        elif isinstance(outcome, ServingError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    call = start(done)
    try:
        return await future
    except asyncio.CancelledError:
        call.cancel()
        # The response may have come after the coroutine was cancelled and before it ran: nobody else has it.
        if future.done() and not future.cancelled() and future.exception() is None:
            future.result().release()
        raise
