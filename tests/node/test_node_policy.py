"""Live policy as the node keeps it: asked of workers, remembered for their next lives, and nothing half-applied."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engines.errors import InvalidInput, Kind, NotFound, Unavailable
from frontend.node.link import Call
from frontend.node.policy import Policy
from worker.config import ModelSettings, SchedulerSettings, WorkerSettings

FILE = WorkerSettings(
    name="worker0",
    run_dir="/run",
    model_repo="/models",
    scheduler=SchedulerSettings(models={"a": ModelSettings(weight=2.0, max_batch_size=8)}),
)


class Worker:
    """Stands for a worker's control socket."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        self.error: Exception | None = None
        self.during: Any = None

    def ask(self, path: str, what: str, timeout_s: float, **args: Any) -> Any:
        self.asked.append((path, what, args))
        if self.during is not None:
            self.during()
        if self.error is not None:
            raise self.error
        return {"asked": what, **args}


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
def policy(worker: Worker) -> Policy:
    return Policy({"worker0": "/run/worker0.sock"}, worker.ask)


def weights(policy: Policy) -> dict[str, float]:
    return {name: one.weight for name, one in policy.worker_settings(FILE).scheduler.models.items()}


def test_a_weight_that_was_set_goes_into_the_next_life_and_nothing_else_changes(policy: Policy) -> None:
    assert policy.worker_settings(FILE) == FILE
    assert asyncio.run(policy.set_weight("a", 5.0)) == {"asked": "set_policy", "model": "a", "weight": 5.0}
    asyncio.run(policy.set_weight("b", 0.5))
    settings = policy.worker_settings(FILE)
    assert settings.scheduler.models == {
        "a": ModelSettings(weight=5.0, max_batch_size=8), "b": ModelSettings(weight=0.5),
    }  # fmt: skip
    assert FILE.scheduler.models == {"a": ModelSettings(weight=2.0, max_batch_size=8)}


@pytest.mark.parametrize("error", [NotFound("no"), InvalidInput("bad"), Unavailable("away")])
def test_what_the_worker_refused_is_not_kept(policy: Policy, worker: Worker, error: Exception) -> None:
    asyncio.run(policy.set_weight("a", 3.0))
    worker.error = error
    with pytest.raises(type(error)):
        asyncio.run(policy.set_weight("a", 5.0))
    assert weights(policy) == {"a": 3.0}


def test_a_worker_that_starts_while_the_old_one_is_asked_comes_up_with_the_new_weight(
    policy: Policy, worker: Worker
) -> None:
    handed: list[WorkerSettings] = []
    worker.during = lambda: handed.append(policy.worker_settings(FILE))
    worker.error = Unavailable("it died")
    with pytest.raises(Unavailable):
        asyncio.run(policy.set_weight("a", 5.0))
    # The new life runs with 5, so the one after it must not fall back to 2.
    assert [one.scheduler.models["a"].weight for one in handed] == [5.0]
    assert weights(policy) == {"a": 5.0}


def test_changes_are_made_one_at_a_time(policy: Policy, worker: Worker) -> None:
    async def run() -> None:
        await asyncio.gather(*(policy.set_weight("a", float(weight)) for weight in range(1, 9)))

    asyncio.run(run())
    assert weights(policy)["a"] == worker.asked[-1][2]["weight"]


def test_a_caller_that_leaves_does_not_undo_what_is_applied(policy: Policy, worker: Worker) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        asked = asyncio.Event()
        worker.during = lambda: loop.call_soon_threadsafe(asked.set)
        task = asyncio.ensure_future(policy.set_weight("a", 5.0))
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # The next change waits for the one under way.
        worker.during = None
        await policy.set_weight("b", 1.0)

    asyncio.run(run())
    assert weights(policy) == {"a": 5.0, "b": 1.0}


@pytest.mark.parametrize(
    ("call", "what", "args"),
    [
        (Call(ask="policy"), "control_status", {"model": ""}),
        (Call(ask="policy", args={"model": "a"}), "control_status", {"model": "a"}),
        (Call(ask="policy", args={"model": "a", "weight": 2}), "set_policy", {"model": "a", "weight": 2.0}),
        (Call(ask="policy", args={"model": "a", "weight": 10**400}), "set_policy", {"model": "a", "weight": 2.0**63}),
        (Call(ask="policy", args={"weight": "2"}), "set_policy", {"model": None, "weight": "2"}),
        (Call(ask="policy", args={"model": "a", "weight": None}), "set_policy", {"model": "a", "weight": None}),
        (Call(ask="policy", args={"model": "a", "weight": True}), "set_policy", {"model": "a", "weight": True}),
        (Call(ask="metrics", args={"model": "a"}), "scheduler_metrics", {"model": "a"}),
    ],
)
def test_questions_on_the_nodes_socket(
    policy: Policy, worker: Worker, call: Call, what: str, args: dict[str, Any]
) -> None:
    told = asyncio.run(policy.answer(call))
    assert (told.kind, told.text) == (Kind.OK, "")
    assert worker.asked == [("/run/worker0.sock", what, args)]


@pytest.mark.parametrize(
    "call", [Call(ask="metrics", args={"weight": 1}), Call(ask="policy", args={"model": "a", "wieght": 1})]
)
def test_unknown_arguments_are_named_and_nothing_is_asked(policy: Policy, worker: Worker, call: Call) -> None:
    told = asyncio.run(policy.answer(call))
    assert told.kind == Kind.INVALID_INPUT
    assert told.text.endswith(("unknown arguments weight", "unknown arguments wieght"))
    assert worker.asked == []


def test_a_refusal_is_told_with_its_kind(policy: Policy, worker: Worker) -> None:
    worker.error = NotFound("Request for unknown model: 'a' is not found")
    told = asyncio.run(policy.answer(Call(ask="policy", args={"model": "a"})))
    assert (told.kind, told.text) == (Kind.NOT_FOUND, "Request for unknown model: 'a' is not found")
