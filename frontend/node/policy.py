"""Live scheduling policy of a node: asked of its workers, changed in them, and kept for the lives that follow.

A weight that was set live holds until the node ends: a worker that is started again gets it with its settings, in place
of the node file's, since nobody who set a weight expects a crash to take it back. A node that is started again reads
its node file and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from engines.errors import Kind, ServingError
from frontend.node.link import Call, Told
from worker.channel import control_client
from worker.config import ModelSettings, WorkerSettings

ANSWER_TIMEOUT_S: Final = 3.0
"""A worker's loop comes round within milliseconds; below the door's own limit, so that the caller learns the reason."""

AskWorker = Callable[..., Any]


class Policy:
    """What operators ask and change. ``workers`` maps names to control sockets."""

    def __init__(self, workers: Mapping[str, str], ask: AskWorker = control_client.ask) -> None:
        self._workers = workers
        self._ask = ask
        self._weights: dict[str, float] = {}
        self._lives = 0
        self._changing = asyncio.Lock()

    def worker_settings(self, settings: WorkerSettings) -> WorkerSettings:
        """Return the settings of a worker's next life, with the weights that were set live."""
        self._lives += 1
        models = dict(settings.scheduler.models)
        for model, weight in self._weights.items():
            models[model] = msgspec.structs.replace(models.get(model, ModelSettings()), weight=weight)
        return msgspec.structs.replace(settings, scheduler=msgspec.structs.replace(settings.scheduler, models=models))

    async def control_status(self, model: str = "") -> list[dict[str, Any]]:
        """Return every worker's discipline and models (rule 32); of one model if it is named.

        Raises:
            ServingError: the model is unknown or cannot serve, or a worker did not answer.
        """
        return [await self._one(worker, "control_status", model=model) for worker in self._workers]

    async def scheduler_metrics(self, model: str = "") -> dict[str, dict[str, Any]]:
        """Return each worker's counters per model (rule 30); raises like ``control_status``."""
        return {worker: await self._one(worker, "scheduler_metrics", model=model) for worker in self._workers}

    async def set_weight(self, model: Any, weight: Any) -> dict[str, Any]:
        """Change a model's weight before the next selection; return what is in force once it is.

        Raises:
            ServingError: nothing was changed: the value is wrong, the model unknown, or a worker did not answer.
        """
        # A caller that stops waiting does not stop what the worker has been told already.
        return await asyncio.shield(asyncio.ensure_future(self._set_weight(model, weight)))

    async def _set_weight(self, model: Any, weight: Any) -> dict[str, Any]:
        # One at a time, so that what is kept is what was applied last.
        async with self._changing:
            lives, before = self._lives, dict(self._weights)
            try:
                # Kept first: a worker that is started while this waits must not come up with the old weight.
                if isinstance(model, str) and isinstance(weight, float):
                    self._weights[model] = weight
                done = [await self._one(worker, "set_policy", model=model, weight=weight) for worker in self._workers]
            except BaseException:
                # A life that began meanwhile was handed the new weight and keeps it, and so does its successor.
                if self._lives == lives:
                    self._weights = before
                raise
        result: dict[str, Any] = done[0]
        return result

    async def answer(self, call: Call) -> Told:
        """Return the answer to ``policy`` or ``metrics`` on the node's own socket; every failure is told in it."""
        args = call.args
        try:
            unknown = sorted(args.keys() - ({"model", "weight"} if call.ask == "policy" else {"model"}))
            if unknown:
                return Told(kind=Kind.INVALID_INPUT, text=f"{call.ask}: unknown arguments {', '.join(unknown)}")
            if call.ask == "metrics":
                return Told(value=await self.scheduler_metrics(args.get("model", "")))
            if "weight" in args:
                return Told(value=await self.set_weight(args.get("model"), _as_float(args["weight"])))
            return Told(value=await self.control_status(args.get("model", "")))
        except ServingError as error:
            return Told(kind=error.kind, text=str(error))

    async def _one(self, worker: str, what: str, **args: Any) -> Any:
        # The client blocks, and the node's loop must not.
        return await asyncio.to_thread(self._ask, self._workers[worker], what, ANSWER_TIMEOUT_S, **args)


def _as_float(weight: Any) -> Any:
    """Return a whole number as the float it means; anything else as it is, for the worker to judge."""
    if isinstance(weight, int) and not isinstance(weight, bool):
        return float(max(-1, min(weight, 1 << 63)))
    return weight
