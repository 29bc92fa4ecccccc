"""A gRPC server of ours over a serving double: what the server costs, without worker and channel.

    .venv/bin/python bench/grpc_double.py fast|grpcio [--cpu N]

Prints its port and serves until stdin closes. Requests pass the real decoding and checks; all that a turn of the loop
brought is answered in the next, as replies of a batch come back together.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Instead of this folder: files in it may be called like modules of the standard library.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import uvloop

from engines.bundle.signature import Signature, Variant
from engines.errors import NotFound, ServingError
from engines.tensor import TensorSpec
from frontend.grpc_server import make_grpc_server
from frontend.inference import InferRequest, InferResponse, OutputTensor
from frontend.kserve.checks import check
from frontend.serving import Done
from frontend.settings import EndpointSettings, GrpcSettings
from worker.channel.messages import ModelEntry


def echo_entry() -> ModelEntry:
    """Return a model that gives back FP32 rows of any width."""
    given, gives = TensorSpec("x", "f32", (-1, -1), 0), TensorSpec("y", "f32", (-1, -1), 0)
    variant = Variant((), ((-1, -1),), ((-1, -1),), (False,))
    signature = Signature((given,), (gives,), (given,), (gives,), (1, 8), (variant,))
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
        self._waiting: list[tuple[EchoCall, InferResponse | ServingError]] = []

    def live(self) -> bool:
        return True

    def ready(self) -> bool:
        return True

    def draining(self) -> bool:
        return False

    def entries(self) -> list[ModelEntry]:
        return [self._entry]

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


async def serve(kind: str, profile: str) -> None:
    """Serve until stdin closes."""
    limits = EndpointSettings()
    server = make_grpc_server(EchoServing(limits), "127.0.0.1", 0, GrpcSettings(server=kind), limits)
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
    parser.add_argument("kind", choices=["fast", "grpcio"])
    parser.add_argument("--cpu", type=int, default=-1)
    parser.add_argument("--profile", default="", help="write cProfile statistics to this file")
    arguments = parser.parse_args()
    if arguments.cpu >= 0:
        os.sched_setaffinity(0, {arguments.cpu})
    uvloop.run(serve(arguments.kind, arguments.profile))


if __name__ == "__main__":
    main()
