"""What a frontend gives to calls that are placed without checks, over a serving double: a channel without a worker."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from serving_double import DoubleCall, DoubleServing

from engines.errors import Kind, ServingError
from engines.tensor import NDArray, TensorSpec
from frontend.deadlines import Deadlines
from frontend.inference import InferRequest, InferResponse, InputTensor
from frontend.metrics import Traffic
from worker.channel.messages import ModelEntry
from worker.channel.placement import Reply

DEFAULT_NS = 10**15
ROOM_BYTES = 4096
"""For each tensor of a request, or as many times that as the largest one needs."""


class DoublePlacement:
    """Rows of one request, in memory of their own."""

    def __init__(self, double: DoubleServing, entry: ModelEntry, rows: int) -> None:
        assert entry.signature is not None
        self.entry = entry
        specs = (*entry.signature.inputs, *entry.signature.outputs)
        row_bytes = max(spec.element.itemsize * math.prod(map(abs, spec.shape)) for spec in specs)
        self._room_bytes = ROOM_BYTES * (1 + rows * row_bytes // ROOM_BYTES)
        self._memory = bytearray(self._room_bytes * len(specs))
        self.tensors = [_room(spec, rows, self._memory, self.place_of(n)) for n, spec in enumerate(specs)]
        self._double = double
        self._live = True
        double.responses_out += 1

    @property
    def memory(self) -> memoryview:
        assert self._live
        return memoryview(self._memory)

    def place_of(self, tensor: int) -> int:
        return self._room_bytes * tensor

    def release(self) -> None:
        if self._live:
            self._live = False
            self._double.responses_out -= 1
            self._double.changed()


class DoubleChannel:
    """Runs what is submitted as ``DoubleServing`` does; ``submitted`` counts. Requests have no ids here."""

    def __init__(self, double: DoubleServing) -> None:
        self._double = double
        self._calls: dict[int, DoubleCall] = {}
        self.submitted = 0

    def place(self, entry: ModelEntry, variant: int, rows: int) -> DoublePlacement:
        return DoublePlacement(self._double, entry, rows)

    def submit(self, placement: DoublePlacement, deadline_ns: int, arrival_ns: int, on_reply: Any) -> int:
        signature = placement.entry.signature
        assert signature is not None
        inputs = [
            InputTensor(spec.name, spec.element.wire, array.shape, array=array)
            for spec, array in zip(signature.inputs, placement.tensors, strict=False)
        ]
        request = InferRequest(placement.entry.name, placement.entry.version, "", inputs)
        request.deadline_ns = deadline_ns if deadline_ns - arrival_ns < DEFAULT_NS else None
        self.submitted += 1
        number = self.submitted

        def done(outcome: InferResponse | ServingError) -> None:
            self._calls.pop(number, None)
            if isinstance(outcome, ServingError):
                on_reply(placement, Reply(outcome.kind, str(outcome)))
                return
            arrays = {output.name: output.array for output in outcome.outputs}
            for spec, room in zip(signature.outputs, placement.tensors[len(signature.inputs) :], strict=True):
                room[...] = arrays[spec.name]
            outcome.release()
            on_reply(placement, Reply(Kind.OK))

        call = self._calls[number] = self._double.start(request, arrival_ns, done)
        call.on_cancel = placement.release
        return number

    def abandon(self, number: int) -> None:
        call = self._calls.pop(number, None)
        if call is not None:
            call.cancel()


class DoubleApp:
    """Stands for ``FrontendApp``; used on the running loop."""

    def __init__(self, double: DoubleServing, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.channel = DoubleChannel(double)
        self.traffic = Traffic("double")
        self.clock_ns = clock_ns
        self.deadlines = Deadlines(asyncio.get_running_loop(), self.clock_ns)

    def repeat_deadline_ns(self, timeout_us: int, arrival_ns: int) -> int:
        return arrival_ns + (timeout_us * 1000 or DEFAULT_NS)


def _room(spec: TensorSpec, rows: int, memory: bytearray, at: int) -> NDArray:
    shape = tuple(rows if axis == spec.batch_axis else size for axis, size in enumerate(spec.shape))
    return np.ndarray(shape, spec.element.numpy, memory, at)
