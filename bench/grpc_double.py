"""A gRPC server of ours over a serving double: what the server costs, without worker and channel.

    .venv/bin/python bench/grpc_double.py fast|ordinary|grpcio [--cpu N]

``ordinary`` is the fast server where no call is recognised as a repeat. Prints its port and serves until stdin closes.
Requests pass the real decoding and checks; all that a turn of the loop brought is answered in the next, as replies of a
batch come back together.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

if __name__ == "__main__":
    # Instead of this folder: files in it may be called like modules of the standard library.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import uvloop

from engines.bundle.signature import Signature, Variant
from engines.errors import Kind, NotFound, ServingError
from engines.tensor import TensorSpec
from frontend.deadlines import Deadlines
from frontend.grpc_server import make_grpc_server
from frontend.inference import InferRequest, InferResponse, OutputTensor
from frontend.kserve.checks import check
from frontend.metrics import Traffic
from frontend.serving import Done
from frontend.settings import EndpointSettings, GrpcSettings
from worker.channel.messages import ModelEntry
from worker.channel.placement import OnReply, Placement, Reply

ROOMS: Final = 4096
ROOM_BYTES: Final = 32 * 1024
OK: Final = Reply(Kind.OK)


def echo_entry() -> ModelEntry:
    """Return a model that gives back FP32 rows of 64 or 2^18 columns."""
    given, gives = TensorSpec("x", "f32", (-1, -1), 0), TensorSpec("y", "f32", (-1, -1), 0)
    variants = tuple(Variant((width,), ((-1, width),), ((-1, width),), (False,)) for width in (64, 1 << 18))
    signature = Signature((given,), (gives,), (given,), (gives,), (1, 8), variants)
    return ModelEntry(model_id=1, name="echo", version="1", state="READY", signature=signature)


class EchoCall:
    """A request on its way."""

    __slots__ = ("done",)

    def __init__(self, done: Done) -> None:
        self.done: Done | None = done

    def cancel(self) -> None:
        self.done = None


class EchoServing:
    """Answers every request with its input."""

    def __init__(self, limits: EndpointSettings) -> None:
        self.limits = limits
        self._entry = echo_entry()
        self._entries = [self._entry]
        self._waiting: list[tuple[EchoCall, InferResponse | ServingError]] = []

    def live(self) -> bool:
        return True

    def ready(self) -> bool:
        return True

    def draining(self) -> bool:
        return False

    def entries(self) -> list[ModelEntry]:
        return self._entries

    def entry(self, model: str, version: str = "") -> ModelEntry:
        if model != "echo":
            raise NotFound(f"Request for unknown model: '{model}' is not found")
        return self._entry

    def versions(self, model: str) -> list[str]:
        return ["1"]

    async def statistics(self, model: str = "", version: str = "") -> list[dict[str, Any]]:
        return []

    def start(self, request: InferRequest, arrival_ns: int, done: Done) -> EchoCall:
        outcome: InferResponse | ServingError
        try:
            checked = check(request, self.entry(request.model), self.limits)
            output = OutputTensor("y", "FP32", checked.inputs[0].as_array())
            outcome = InferResponse("echo", "1", request.request_id, [output])
        except ServingError as error:
            outcome = error
        call = EchoCall(done)
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._answer)
        self._waiting.append((call, outcome))
        return call

    async def infer(self, request: InferRequest, arrival_ns: int) -> InferResponse:
        future: asyncio.Future[InferResponse | ServingError] = asyncio.get_running_loop().create_future()
        self.start(request, arrival_ns, lambda outcome: None if future.done() else future.set_result(outcome))
        outcome = await future
        if isinstance(outcome, ServingError):
            raise outcome
        return outcome

    def _answer(self) -> None:
        waiting, self._waiting = self._waiting, []
        for call, outcome in waiting:
            if call.done is not None:
                call.done(outcome)


class EchoPlacement:
    """A room in which a request's rows are what the worker would have written."""

    __slots__ = ("_rooms", "memory", "room")

    def __init__(self, rooms: list[int], memory: memoryview) -> None:
        self._rooms = rooms
        self.memory = memory
        self.room = rooms.pop()

    def place_of(self, tensor: int) -> int:
        return self.room

    def release(self) -> None:
        self._rooms.append(self.room)


class EchoChannel:
    """Answers what is submitted when ``answer`` is called; asks for that by ``wake``."""

    def __init__(self, wake: Callable[[Callable[[], None]], object]) -> None:
        self._wake = wake
        self._memory = memoryview(bytearray(ROOMS * ROOM_BYTES))
        self._rooms = [number * ROOM_BYTES for number in range(ROOMS)]
        self._waiting: dict[int, tuple[EchoPlacement, OnReply]] = {}
        self._submitted = 0

    def place(self, entry: ModelEntry, variant: int, rows: int) -> EchoPlacement:
        return EchoPlacement(self._rooms, self._memory)

    def submit(self, placement: EchoPlacement, deadline_ns: int, arrival_ns: int, on_reply: OnReply) -> int:
        if not self._waiting:
            self._wake(self.answer)
        self._submitted += 1
        self._waiting[self._submitted] = placement, on_reply
        return self._submitted

    def abandon(self, number: int) -> None:
        placement, _ = self._waiting.pop(number)
        placement.release()

    def answer(self) -> None:
        """Answer all that waits."""
        waiting, self._waiting = self._waiting, {}
        for placement, on_reply in waiting.values():
            on_reply(cast(Placement, placement), OK)


class EchoApp:
    """What the frontend has for calls that repeat."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.channel = EchoChannel(loop.call_soon)
        self.clock_ns = time.monotonic_ns
        self.traffic = Traffic("double")
        self.deadlines = Deadlines(loop, time.monotonic_ns)

    def repeat_deadline_ns(self, timeout_us: int, arrival_ns: int) -> int:
        return arrival_ns + 30_000_000_000


async def serve(kind: str, profile: str) -> None:
    """Serve until stdin closes."""
    limits = EndpointSettings()
    app: Any = EchoApp(asyncio.get_running_loop()) if kind == "fast" else None
    settings = GrpcSettings(server="grpcio" if kind == "grpcio" else "fast")
    server = make_grpc_server(EchoServing(limits), "127.0.0.1", 0, settings, limits, app)
    print(await server.start(), flush=True)
    closed = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), closed.set)
    if profile:
        import cProfile

        profiler = cProfile.Profile()
        profiler.enable()
        await closed.wait()
        profiler.disable()
        profiler.dump_stats(profile)
    else:
        await closed.wait()
    await server.close()


def main() -> None:
    """Parse and serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["fast", "ordinary", "grpcio"])
    parser.add_argument("--cpu", type=int, default=-1)
    parser.add_argument("--profile", default="", help="write cProfile statistics to this file")
    arguments = parser.parse_args()
    if arguments.cpu >= 0:
        os.sched_setaffinity(0, {arguments.cpu})
    uvloop.run(serve(arguments.kind, arguments.profile))


if __name__ == "__main__":
    main()
