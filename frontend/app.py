"""One frontend process: the life of a request between the protocols and the worker's channel.

    protocol codec -> start() -> checks against the signature -> [preprocess] -> rows into the arena -> worker
                   <- done()  <- response over the arena      <- [postprocess] <- reply record

Every request that is started gets exactly one ``done``, or is cancelled: an error, a result, or its deadline, whichever
comes first. Whoever receives a response releases it; that gives the shared memory back.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from engines.bundle.variants import compiled_text, match_variant
from engines.errors import Cancelled, DeadlineExceeded, Internal, InvalidInput, Kind, ServingError, Unavailable
from engines.tensor import NDArray
from frontend.deadlines import Deadlines
from frontend.execution import Execution
from frontend.explanation import explanation
from frontend.hooked import HookedModels
from frontend.inference import ExecutableInput, InferRequest, InferResponse, OutputTensor, Parameter, Room
from frontend.kserve.checks import Checked, check
from frontend.kserve.memory_store import ClientMemory
from frontend.kserve.memory_tensors import bind_tensors, place_output, release_all
from frontend.metrics import Traffic
from frontend.node.run_dir import CLIENT_MEMORY_FILE
from frontend.serving import Call, Done
from frontend.settings import EndpointSettings, FrontendSettings
from frontend.table import LOADING, READY, ModelTable
from worker.channel.client import WorkerChannel
from worker.channel.messages import ModelEntry

log = logging.getLogger("frontend.app")

STATISTICS_TIMEOUT_S = 5.0


class InferCall:
    """One started request. Its states: running, then over; only the step to over answers."""

    __slots__ = (
        "_app", "_bound", "_done", "_execution", "_explanation", "_over", "_request", "_task", "arrival_ns",
        "deadline_ns", "entry",
    )  # fmt: skip

    def __init__(self, app: FrontendApp, request: InferRequest, arrival_ns: int, done: Done) -> None:
        self._app = app
        self._request = request
        self._done = done
        self._execution: Execution | None = None
        self._task: asyncio.Task[None] | None = None
        self._over = False
        self._bound: list[Room] = []
        self._explanation: dict[str, Parameter] = {}
        self.arrival_ns = arrival_ns
        self.deadline_ns = 0
        self.entry: ModelEntry | None = None

    def begin(self) -> None:
        """Check, place and submit; any mistake becomes the answer."""
        app = self._app
        app.traffic.in_flight += 1
        try:
            entry = self.entry = app.entry(self._request.model, self._request.version)
            if app.memory.enabled:
                self._bound = bind_tensors(self._request, app.memory, app.limits)
            checked = check(self._request, entry, app.limits)
            self.deadline_ns = app.deadline_ns(self._request, checked, self.arrival_ns)
            if self.deadline_ns <= app.clock_ns():
                raise DeadlineExceeded(expired_text(self))
            if entry.model_py:
                self._task = app.loop.create_task(self._run_hooked(checked))
            else:
                self._execute([given.executable() for given in checked.inputs], checked.rows, self._on_executed)
        except ServingError as error:
            self._finish(error)
            return
        except Exception:
            log.exception("request.failed model=%s", self._request.model)
            self._finish(Internal("internal error"))
            return
        app.deadlines.add(self)

    def cancel(self) -> None:
        """Withdraw the request: nobody waits for it any more. Idempotent."""
        if not self._over:
            self._app.traffic.count(self._request.model, Kind.CANCELLED, 0)
            self._close()

    def expire(self) -> None:
        """Answer that the deadline has passed."""
        self._finish(DeadlineExceeded(expired_text(self)))

    def _execute(
        self, inputs: Sequence[ExecutableInput], rows: int, on_done: Callable[[Execution, ServingError | None], None]
    ) -> None:
        assert self.entry is not None
        signature = self.entry.signature
        assert signature is not None
        variant = 0
        if len(signature.variants) > 1 or signature.variants[0].sizes:
            variant = match_variant(signature, [array.shape for array in inputs])
            if variant < 0:
                raise InvalidInput(compiled_text(signature, [array.shape for array in inputs]))
        execution = Execution(self._app.channel, self.entry, on_done, background=self._request.background)
        execution.start(variant, rows, inputs, self.deadline_ns, self.arrival_ns)
        self._execution = execution

    def _on_executed(self, execution: Execution, error: ServingError | None) -> None:
        if self._over:
            execution.release()
            return
        if error is not None:
            self._finish(error)
            return
        assert self.entry is not None and self.entry.signature is not None
        self._explain(execution)
        names = [spec.name for spec in self.entry.signature.outputs]
        try:
            response = self.respond(dict(zip(names, execution.outputs, strict=True)), execution.release)
        except ServingError as place_error:
            self._finish(place_error)
            return
        self._finish(response)

    def _explain(self, execution: Execution) -> None:
        if self._request.explain and execution.reply is not None:
            self._explanation = explanation(execution.reply, execution.pieces)

    async def _run_hooked(self, checked: Checked) -> None:
        assert self.entry is not None
        try:
            response = await self._app.hooked.run(self, self._request, checked)
        except ServingError as error:
            self._finish(error)
        except asyncio.CancelledError:
            self._finish(Cancelled("the request was cancelled"))
            raise
        except Exception:
            log.exception("request.failed model=%s", self._request.model)
            self._finish(Internal("internal error"))
        else:
            if self._over:
                response.release()
            else:
                self._finish(response)

    async def execute(self, inputs: list[NDArray], rows: int) -> Execution:
        """Run executable inputs through the worker, for hooks; the caller releases the execution.

        Raises:
            ServingError: whatever the worker answered.
        """
        future: asyncio.Future[Execution] = self._app.loop.create_future()

        def on_done(execution: Execution, error: ServingError | None) -> None:
            # From here on the caller owns it: a deadline must not free memory that a hook's thread still reads.
            self._execution = None
            if future.done():
                execution.release()
            elif error is not None:
                future.set_exception(error)
            else:
                self._explain(execution)
                future.set_result(execution)

        self._execute(inputs, rows, on_done)
        return await future

    def respond(self, arrays: dict[str, NDArray], release: Callable[[], None]) -> InferResponse:
        """Return the response with the outputs the client asked for, in its order; all of them if it named none.

        Outputs for the client's memory are written there now, while the request is not over.

        Raises:
            InvalidInput: one does not fit there, or the memory is gone; the caller releases.
        """
        assert self.entry is not None and self.entry.signature is not None
        specs = self.entry.signature.client_outputs
        wanted = self._request.outputs
        if wanted is None:
            outputs = [OutputTensor(spec.name, spec.element.wire, arrays[spec.name]) for spec in specs]
        else:
            datatypes = {spec.name: spec.element.wire for spec in specs}
            outputs = [
                OutputTensor(one.name, datatypes[one.name], arrays[one.name], one.binary, one.classification)
                for one in wanted
            ]
            if self._bound:
                for index, one in enumerate(wanted):
                    if one.room is not None:
                        outputs[index] = place_output(outputs[index], one.room)
        return InferResponse(
            self.entry.name, self.entry.version, self._request.request_id, outputs, self._explanation, release,
            explained=bool(self._explanation),
        )  # fmt: skip

    def _finish(self, outcome: InferResponse | ServingError) -> None:
        if self._over:
            return
        kind = outcome.kind if isinstance(outcome, ServingError) else Kind.OK
        self._app.traffic.count(self._request.model, kind, self._app.clock_ns() - self.arrival_ns)
        if kind is Kind.OK:
            # The response owns the execution's memory from here on.
            self._execution = None
        self._close()
        self._done(outcome)

    def _close(self) -> None:
        self._over = True
        self._app.traffic.in_flight -= 1
        if self.deadline_ns:
            self._app.deadlines.discard(self)
        if self._bound:
            release_all(self._bound)
        if self._execution is not None:
            self._execution.abandon()
            self._execution = None
        if self._task is not None and not self._task.done() and self._task is not asyncio.current_task():
            self._task.cancel()
        self._task = None


class FrontendApp:
    """Provides ``frontend.serving.Serving`` over one worker channel."""

    def __init__(
        self,
        settings: FrontendSettings,
        loop: asyncio.AbstractEventLoop,
        channel: WorkerChannel,
        table: ModelTable,
        hooked: HookedModels,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.loop = loop
        self.channel = channel
        self.hooked = hooked
        self.clock_ns = clock_ns
        self.traffic = Traffic(settings.name)
        self.memory = ClientMemory(
            settings.endpoints.system_shared_memory, os.path.join(settings.run_dir, CLIENT_MEMORY_FILE)
        )
        self.deadlines = Deadlines(loop, clock_ns)
        self._settings = settings
        self._table = table
        self._draining = False
        self._default_timeout_ns = int(settings.dispatch_timeout_seconds * 1e9)

    @property
    def limits(self) -> EndpointSettings:
        return self._settings.endpoints

    def live(self) -> bool:
        return True

    def ready(self) -> bool:
        return not self.unready_reason()

    def unready_reason(self) -> str:
        """Return why the frontend is not ready; empty if it is."""
        if self._draining:
            return "draining"
        if self.channel.state != "attached":
            return f"worker {self.channel.state}"
        failed = [entry for entry in self._table.unready() if entry.state != LOADING]
        if failed:
            return "; ".join(f"{entry.name}/{entry.version} {entry.state}: {entry.reason}" for entry in failed)
        if self.loading():
            return "models are loading"
        return self.hooked.broken()

    def loading(self) -> bool:
        """Whether something that will end by itself keeps the frontend from being ready."""
        return (
            not self._table.heard
            or self.hooked.loading()
            or any(entry.state == LOADING for entry in self._table.unready())
        )

    def drain(self) -> None:
        """Stop being ready; requests under way go on."""
        self._draining = True

    def draining(self) -> bool:
        return self._draining

    def entries(self) -> list[ModelEntry]:
        return self._table.entries()

    def entry(self, model: str, version: str = "") -> ModelEntry:
        return self._table.entry(model, version)

    def find(self, model: str, version: str = "") -> ModelEntry:
        return self._table.find(model, version)

    def versions(self, model: str) -> list[str]:
        return self._table.versions(model)

    def start(self, request: InferRequest, arrival_ns: int, done: Done) -> Call:
        call = InferCall(self, request, arrival_ns, done)
        call.begin()
        return call

    async def infer(self, request: InferRequest, arrival_ns: int) -> InferResponse:
        future: asyncio.Future[InferResponse] = self.loop.create_future()

        def done(outcome: InferResponse | ServingError) -> None:
            if future.done():
                if isinstance(outcome, InferResponse):
                    outcome.release()
            elif isinstance(outcome, ServingError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        call = self.start(request, arrival_ns, done)
        try:
            return await future
        except asyncio.CancelledError:
            call.cancel()
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().release()
            raise

    async def statistics(self, model: str = "", version: str = "") -> list[dict[str, Any]]:
        if model:
            self._table.find(model, version)
        try:
            async with asyncio.timeout(STATISTICS_TIMEOUT_S):
                found = await self.channel.ask("statistics", model=model, version=version)
        except TimeoutError:
            raise Unavailable("the worker did not answer in time") from None
        assert isinstance(found, list)
        return found

    def deadline_ns(self, request: InferRequest, checked: Checked, arrival_ns: int) -> int:
        """Return the earliest of all deadlines of a request (rule 18)."""
        deadline_ns = arrival_ns + self._default_timeout_ns
        if request.deadline_ns is not None:
            deadline_ns = min(deadline_ns, request.deadline_ns)
        if request.timeout_us:
            deadline_ns = min(deadline_ns, arrival_ns + request.timeout_us * 1000)
        return deadline_ns


def expired_text(call: InferCall) -> str:
    """Return the message for a passed deadline: the budget it had, with its unit."""
    budget_ms = (call.deadline_ns - call.arrival_ns) / 1e6
    return f"Request timeout expired: no answer within {budget_ms:.3f} ms"


def ready_models(entries: list[ModelEntry]) -> list[str]:
    """Return the names of models with a ready version."""
    return sorted({entry.name for entry in entries if entry.state == READY})
