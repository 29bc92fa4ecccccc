"""Whether a line's model is there, asked of the gateway's routing from the threads that validate."""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import Final

from engines.errors import Unavailable
from frontend.batches.validation import ModelAnswer
from frontend.openai.calls import MODEL_ENDPOINTS, Executor

ASK_TIMEOUT_S: Final = 10.0


class PlannedModels:
    """Provides ``Models``. A model whose routes are only cooling down is there: its lines wait."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Remember the loop that the executor lives on; called there."""
        self._loop = asyncio.get_running_loop()

    def __call__(self, endpoint: str, model: str) -> ModelAnswer:
        """Return whether the model serves the endpoint. From another thread than the loop's."""
        assert self._loop is not None, "not started"
        answer: concurrent.futures.Future[ModelAnswer] = concurrent.futures.Future()
        # On the loop: routes and the table of our own models change there, and are read by nobody else.
        self._loop.call_soon_threadsafe(self._tell, answer, endpoint, model)
        try:
            return answer.result(ASK_TIMEOUT_S)
        except concurrent.futures.TimeoutError:
            raise Unavailable("models cannot be looked up now; retry later") from None

    def _tell(self, answer: concurrent.futures.Future[ModelAnswer], endpoint: str, model: str) -> None:
        try:
            answer.set_result(_answer(self._executor, endpoint, model))
        except Exception as error:
            answer.set_exception(error)


def _answer(executor: Executor, endpoint: str, model: str) -> ModelAnswer:
    if _served(executor, endpoint, model):
        return "ok"
    others = (other for other in MODEL_ENDPOINTS if other != endpoint)
    return "unsupported" if any(_served(executor, other, model) for other in others) else "not_found"


def _served(executor: Executor, endpoint: str, model: str) -> bool:
    plan = executor.plan(endpoint, model)
    return bool(plan.route) or plan.cooling_s is not None
