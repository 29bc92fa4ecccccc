"""One inference request's life in a frontend: checked, executed, answered exactly once.

A mistake, a result, its deadline, its client going away: the first ends it, and what comes later finds it over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from engines.bundle.variants import compiled_text, match_variant
from engines.errors import Cancelled, DeadlineExceeded, Internal, InvalidInput, Kind, ServingError, error_of
from engines.tensor import NDArray
from frontend.execution import Execution
from frontend.explanation import explanation
from frontend.inference import ExecutableInput, InferRequest, InferResponse, OutputTensor, Parameter, Room
from frontend.kserve.checks import Checked, CheckedInput, check
from frontend.kserve.contract import Contract
from frontend.kserve.memory_tensors import bind_tensors, place_output, release_all
from frontend.serving import Done
from worker.channel.messages import ModelEntry
from worker.channel.placement import Placement, Reply
from worker.channel.records import FLAG_BACKGROUND

if TYPE_CHECKING:
    from frontend.app import FrontendApp

log = logging.getLogger("frontend.app")


class InferCall:
    """One started request. Its states: running, then over; only the step to over answers.

    While it runs, what it has in the arena is a placement, or an execution if that is cut in pieces or made by hooks.
    """

    __slots__ = (
        "_app", "_bound", "_contract", "_done", "_execution", "_explanation", "_over", "_placement", "_request",
        "_task", "arrival_ns", "deadline_ns", "entry",
    )  # fmt: skip

    def __init__(self, app: FrontendApp, request: InferRequest, arrival_ns: int, done: Done) -> None:
        self._app = app
        self._request = request
        self._done = done
        self._execution: Execution | None = None
        self._placement: Placement | None = None
        self._task: asyncio.Task[None] | None = None
        self._over = False
        self._bound: list[Room] | None = None
        self._explanation: dict[str, Parameter] | None = None
        self._contract: Contract | None = None
        self.arrival_ns = arrival_ns
        self.deadline_ns = 0
        self.entry: ModelEntry | None = None

    def begin(self) -> None:
        """Check, place and submit; any mistake becomes the answer."""
        app = self._app
        app.traffic.in_flight += 1
        try:
            self._run(self._check())
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

    def _check(self) -> Checked:
        """Compare the request with its model as it is now."""
        app = self._app
        entry = self.entry = app.entry(self._request.model, self._request.version)
        if app.memory.enabled:
            self._bound = bind_tensors(self._request, app.memory, app.limits)
        checked = check(self._request, entry, app.limits)
        self._contract = checked.contract
        self.deadline_ns = app.deadline_ns(self._request, checked, self.arrival_ns)
        self._refuse_late()
        return checked

    def _refuse_late(self) -> None:
        if self.deadline_ns <= self._app.clock_ns():
            raise DeadlineExceeded(expired_text(self))

    def _run(self, checked: Checked) -> None:
        entry = self.entry
        assert entry is not None
        if entry.model_py:
            self._task = self._app.loop.create_task(self._run_hooked(checked))
        elif checked.rows > checked.contract.whole_rows:
            self._execute([given.executable() for given in checked.inputs], checked.rows, self._on_executed)
        else:
            self._submit(entry, checked)

    def _submit(self, entry: ModelEntry, checked: Checked) -> None:
        """Have all rows executed in one piece."""
        channel = self._app.channel
        inputs = checked.inputs
        placement = channel.place(entry, self._variant(inputs), checked.rows)
        try:
            _fill(placement, inputs)
            flags = FLAG_BACKGROUND if self._request.background else 0
            channel.submit(placement, self.deadline_ns, self.arrival_ns, self._on_reply, flags)
        except BaseException:
            placement.release()
            raise
        self._placement = placement

    def _on_reply(self, placement: Placement, reply: Reply) -> None:
        try:
            if reply.kind is not Kind.OK:
                raise error_of(reply.kind, reply.text)
            if self._request.explain:
                self._explanation = explanation(reply, 1)
            response = self.respond(placement.outputs(), placement.release)
        except ServingError as error:
            self._finish(error)
            return
        self._finish(response)

    def _variant(self, inputs: Sequence[ExecutableInput]) -> int:
        """Return the served variant that fits the shapes of executable inputs."""
        contract = self._contract
        assert contract is not None
        variant = contract.variant
        if variant < 0:
            shapes = [array.shape for array in inputs]
            variant = match_variant(contract.signature, shapes)
            if variant < 0:
                raise InvalidInput(compiled_text(contract.signature, shapes))
        return variant

    def _execute(
        self, inputs: Sequence[ExecutableInput], rows: int, on_done: Callable[[Execution, ServingError | None], None]
    ) -> None:
        assert self.entry is not None
        variant = self._variant(inputs)
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
        self._explain(execution)
        try:
            response = self.respond(execution.outputs, execution.release)
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

    def respond(
        self, arrays: list[NDArray], release: Callable[[], None], made: dict[str, NDArray] | None = None
    ) -> InferResponse:
        """Return the response with the outputs the client asked for, in its order; all of them if it named none.

        Outputs for the client's memory are written there now, while the request is not over.

        Args:
            arrays: the executable outputs.
            made: by name the client outputs, if hooks make them.

        Raises:
            InvalidInput: one does not fit there, or the memory is gone; the caller releases.
        """
        entry, request, contract = self.entry, self._request, self._contract
        assert entry is not None and contract is not None
        wanted = contract.wanted if request.outputs is None else request.outputs
        outputs: list[OutputTensor] = []
        for one in wanted:
            _, wire, index = contract.outputs[one.name]
            array = arrays[index] if made is None else made[one.name]
            output = OutputTensor(one.name, wire, array, one.binary, one.classification)
            outputs.append(output if one.room is None else place_output(output, one.room))
        told = self._explanation
        return InferResponse(
            entry.name, entry.version, request.request_id, outputs, told or {}, release, explained=told is not None
        )

    def _finish(self, outcome: InferResponse | ServingError) -> None:
        if self._over:
            return
        app = self._app
        latency_ns = app.clock_ns() - self.arrival_ns
        if isinstance(outcome, ServingError):
            app.traffic.count(self._request.model, outcome.kind, latency_ns)
        else:
            app.traffic.count(self._request.model, Kind.OK, latency_ns)
            # The response owns the memory from here on.
            self._execution = None
            self._placement = None
        self._close()
        self._done(outcome)

    def _close(self) -> None:
        self._over = True
        self._app.traffic.in_flight -= 1
        if self.deadline_ns:
            self._app.deadlines.discard(self)
        if self._bound:
            release_all(self._bound)
        if self._placement is not None:
            # Of what is still at the worker the rows come back with the reply.
            self._placement.release()
            self._placement = None
        if self._execution is not None:
            self._execution.abandon()
            self._execution = None
        if self._task is not None:
            if not self._task.done() and self._task is not asyncio.current_task():
                self._task.cancel()
            self._task = None


def _fill(placement: Placement, inputs: Sequence[CheckedInput]) -> None:
    """Bring the elements of all inputs to where the worker reads them."""
    memory = placement.memory
    rooms: list[NDArray] | None = None
    for index, given in enumerate(inputs):
        raw = given.raw
        if raw is not None:
            # The same rows lie there without gaps, so bytes will do; numpy would take three times as long.
            at = placement.place_of(index)
            memory[at : at + len(raw)] = raw
            continue
        if rooms is None:
            rooms = placement.inputs
        if given.room is None:
            rooms[index][...] = given.as_array()
        else:
            given.fill(rooms[index])


class Budgeted(Protocol):
    """What has a deadline, counted from its arrival."""

    arrival_ns: int
    deadline_ns: int


def expired_text(call: Budgeted) -> str:
    """Return the message for a passed deadline: the budget it had, with its unit."""
    budget_ms = (call.deadline_ns - call.arrival_ns) / 1e6
    return f"Request timeout expired: no answer within {budget_ms:.3f} ms"
