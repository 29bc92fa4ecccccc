"""A small Serving for protocol tests: numpy models behind the real checks, held back or failing on demand."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from engines.bundle.signature import Signature, Variant
from engines.errors import (
    DeadlineExceeded,
    EngineFailed,
    InvalidInput,
    NotFound,
    NotReady,
    QueueFull,
    ServingError,
)
from engines.tensor import DTYPES, NDArray, TensorSpec
from frontend.inference import InferRequest, InferResponse, OutputTensor
from frontend.kserve.checks import check
from frontend.kserve.memory_store import ClientMemory
from frontend.serving import Done, awaited
from frontend.settings import EndpointSettings
from worker.channel.messages import ModelEntry

LONGEST_S = 120
"""Beyond, a scenario hangs. Much longer than any takes: 64 MiB through grpcio have taken 30 s on a busy machine."""


def spec(name: str, dtype: str, *shape: int, batch_axis: int | None = 0) -> TensorSpec:
    return TensorSpec(name, dtype, shape, batch_axis)


def entry(
    name: str,
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    batch_sizes: tuple[int, ...] = (1, 8),
    model_id: int = 1,
) -> ModelEntry:
    variant = Variant((), tuple(s.shape for s in inputs), tuple(s.shape for s in outputs), (False,) * len(outputs))
    signature = Signature(inputs, outputs, inputs, outputs, batch_sizes, (variant,))
    return ModelEntry(
        model_id=model_id,
        name=name,
        version="1",
        state="READY",
        platform="onnxruntime",
        signature=signature,
        max_batch_size=batch_sizes[-1],
    )


def echo_entry(dtype: str, *shape: int) -> ModelEntry:
    return entry(f"echo_{dtype}", (spec("x", dtype, *shape),), (spec("y", dtype, *shape),))


def entries() -> dict[str, ModelEntry]:
    models = [
        entry(
            "simple",
            (spec("INPUT0", "i32", -1, 16), spec("INPUT1", "i32", -1, 16)),
            (spec("OUTPUT0", "i32", -1, 16), spec("OUTPUT1", "i32", -1, 16)),
        ),
        entry("fixed", (spec("x", "f32", 3, batch_axis=None),), (spec("y", "f32", 3, batch_axis=None),), (0,)),
        entry("free", (spec("x", "f32", -1, -1),), (spec("y", "f32", -1, -1),)),
        entry("scalar", (spec("x", "f32", batch_axis=None),), (spec("y", "f32", batch_axis=None),), (0,)),
    ]
    models += [echo_entry(dtype.name, -1, 4) for dtype in DTYPES]
    for name in ("held", "broken", "full", "late"):
        models.append(entry(name, (spec("x", "f32", -1, 4),), (spec("y", "f32", -1, 4),)))
    return {model.name: model for model in models}


class DoubleCall:
    def __init__(self, serving: DoubleServing, request: InferRequest, done: Done) -> None:
        self.request = request
        self.cancelled = False
        self.on_cancel: Callable[[], None] | None = None
        self._serving = serving
        self._done: Done | None = done

    def finish(self, outcome: InferResponse | ServingError) -> None:
        done, self._done = self._done, None
        if done is not None:
            done(outcome)

    def cancel(self) -> None:
        if self._done is not None:
            self._done = None
            self.cancelled = True
            if self.on_cancel is not None:
                self.on_cancel()
            self._serving.cancelled.append(self.request.request_id)
            self._serving.changed()


class DoubleServing:
    """Serves ``entries()``. Requests to ``held`` wait until ``release_held``; others are answered in the next turn.

    ``app`` runs calls that repeat an earlier one, if there is one. ``responses_out`` counts responses that were handed
    over and not released yet.
    """

    def __init__(self, limits: EndpointSettings | None = None) -> None:
        self.limits = limits or EndpointSettings()
        self.memory = ClientMemory(self.limits.system_shared_memory, os.devnull)
        self.models = entries()
        self.is_ready = True
        self.held: list[DoubleCall] = []
        self.cancelled: list[str] = []
        self.started: list[str] = []
        self.last_request: InferRequest | None = None
        self.last_arrival_ns = 0
        self.app: Any = None
        self.responses_out = 0
        self._changes: list[asyncio.Event] = []
        loading = ModelEntry(model_id=99, name="loading", version="1", state="LOADING", reason="reading weights")
        self._entries = [*self.models.values(), loading]

    def changed(self) -> None:
        for event in self._changes:
            event.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        event = asyncio.Event()
        self._changes.append(event)
        async with asyncio.timeout(20):
            while not condition():
                await event.wait()
                event.clear()
        self._changes.remove(event)

    def live(self) -> bool:
        return True

    def ready(self) -> bool:
        return self.is_ready

    def draining(self) -> bool:
        return False

    def entries(self) -> list[ModelEntry]:
        return self._entries

    def entry(self, model: str, version: str = "") -> ModelEntry:
        if version and not version.isdecimal():
            raise InvalidInput(f"failed to get model version from specified version string '{version}'")
        if model == "loading":
            raise NotReady("Request for model 'loading' version 1 is not at ready state: LOADING, reading weights")
        if model not in self.models:
            raise NotFound(f"Request for unknown model: '{model}' is not found")
        if version not in ("", "1"):
            raise NotFound(f"Request for unknown model: '{model}' version {version} is not found")
        return self.models[model]

    def versions(self, model: str) -> list[str]:
        return ["1"] if model in self.models else []

    def start(self, request: InferRequest, arrival_ns: int, done: Done) -> DoubleCall:
        self.last_request = request
        self.last_arrival_ns = arrival_ns
        self.started.append(request.request_id)
        call = DoubleCall(self, request, done)
        loop = asyncio.get_running_loop()
        if request.model == "held":
            self.held.append(call)
        else:
            loop.call_soon(self._answer, call)
        self.changed()
        return call

    def receive(self, request: InferRequest, arrival_ns: int, done: Done) -> None:
        """Everything is started with its elements here."""
        return None

    def release_held(self) -> None:
        held, self.held = self.held, []
        for call in held:
            self._answer(call)

    async def infer(self, request: InferRequest, arrival_ns: int) -> InferResponse:
        return await awaited(lambda done: self.start(request, arrival_ns, done))

    async def statistics(self, model: str = "", version: str = "") -> list[dict[str, Any]]:
        if model:
            self.entry(model, version)
        one = {"count": 3, "ns": 12345}
        return [
            {
                "name": name,
                "version": "1",
                "last_inference": 1_700_000_000_000,
                "inference_count": 7,
                "execution_count": 3,
                "inference_stats": {"success": one, "fail": {"count": 0, "ns": 0}, "queue": one},
                "batch_stats": [{"batch_size": 8, "compute_infer": one}],
                "response_stats": {},
                "memory_usage": [],
            }
            for name in ([model] if model else self.models)
        ]

    def _answer(self, call: DoubleCall) -> None:
        try:
            outcome: InferResponse | ServingError = self._run(call.request)
            self.responses_out += 1
        except ServingError as error:
            outcome = error
        if call.cancelled:
            if isinstance(outcome, InferResponse):
                outcome.release()
            return
        call.finish(outcome)
        self.changed()

    def _run(self, request: InferRequest) -> InferResponse:
        model = self.entry(request.model, request.version)
        checked = check(request, model, self.limits)
        if model.name == "full":
            raise QueueFull("queue of model 'full' is full (1024 requests waiting): Exceeds maximum queue size")
        if model.name == "broken":
            raise EngineFailed("model 'broken' failed while running")
        if model.name == "late":
            raise DeadlineExceeded("Request timeout expired: no answer within 200 us")
        arrays = run_model(model, [given.as_array() for given in checked.inputs])
        assert model.signature is not None
        wires = {out.name: out.element.wire for out in model.signature.client_outputs}
        outputs = [
            OutputTensor(out.name, wires[out.name], arrays[out.name], out.binary, out.classification)
            for out in checked.outputs
        ]
        return InferResponse(model.name, model.version, request.request_id, outputs, release=self._released)

    def _released(self) -> None:
        self.responses_out -= 1
        self.changed()


def run_model(model: ModelEntry, inputs: list[NDArray]) -> dict[str, NDArray]:
    if model.name == "simple":
        return {"OUTPUT0": np.add(*inputs), "OUTPUT1": np.subtract(*inputs)}
    return {"y": inputs[0]}


class LoopThread:
    """An event loop in a thread, for servers that synchronous clients talk to.

    Asyncio clients of gRPC must run on this loop too: grpcio hands the events of one process to whichever loop comes
    first, so that with two loops the completions of one call may be seen out of order.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop = loop or asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(LONGEST_S)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(30)
        self.loop.close()
