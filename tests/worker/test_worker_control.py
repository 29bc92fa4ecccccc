"""What the worker answers to operators: weights, status and counts; mistakes are told and change nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.bundle.signature import Signature, Variant
from engines.errors import Kind
from engines.tensor import TensorSpec
from worker.channel.messages import Answer, Ask, ModelEntry
from worker.config import MAX_WEIGHT
from worker.control import Control
from worker.metrics import ModelCounters
from worker.models import LOADING, READY, UNAVAILABLE, LoadedModel
from worker.registry import Registry
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.types import Dispatch, ModelSpec, Request, SchedulerOptions

ENTRIES = [("twice", "1", LOADING), ("twice", "2", LOADING), ("other", "1", LOADING), ("broken", "1", UNAVAILABLE)]


class World:
    """A worker's control with models that load when a test says so."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(SchedulerOptions())
        self.registry = Registry([
            ModelEntry(model_id=number, name=name, version=version, state=state, reason="no good file")
            for number, (name, version, state) in enumerate(ENTRIES, 1)
        ])  # fmt: skip
        self.control = Control("worker0", self.registry, self.scheduler, SimpleNamespace(series=list))

    def load(self, model_id: int, weight: float = 1.0, axis: int | None = 1) -> None:
        name, version, _ = ENTRIES[model_id - 1]
        shape = (-1, 3) if axis == 0 else (3, -1)
        tensor, scalar = TensorSpec("X", "f32", shape, axis), TensorSpec("S", "f32", (1,), None)
        variant = Variant((), ((1,), shape), (shape,), (False,))
        signature = Signature((scalar, tensor), (tensor,), (scalar, tensor), (tensor,), (1, 8), (variant,))
        spec = ModelSpec(model_id, name, (1, 8), 1, coalesces=False, weight=weight)
        entry = ModelEntry(model_id=model_id, name=name, version=version, state=READY)
        model: Any = None
        loaded = LoadedModel(entry, model, signature, spec, (), ModelCounters(name, version), False)
        self.scheduler.add_model(spec)
        self.registry.add(loaded)
        self.control.loaded(loaded, 0)

    def ask(self, what: str, **args: Any) -> Answer:
        return self.control.answer(Ask(id=7, what=what, args=args), 0)

    def weights(self) -> dict[int, float]:
        return {one.model_id: one.weight for one in self.scheduler.snapshot(0).models}


@pytest.fixture
def world() -> World:
    world = World()
    for model_id in (1, 2, 3):
        world.load(model_id)
    return world


def test_rule_29_a_weight_is_in_force_for_every_version_when_the_answer_comes(world: World) -> None:
    answer = world.ask("set_policy", model="twice", weight=2)
    assert (answer.id, answer.kind) == (7, Kind.OK)
    assert answer.value == {"model": "twice", "weight": 2.0, "versions": ["1", "2"]}
    assert world.weights() == {1: 2.0, 2: 2.0, 3: 1.0}


@pytest.mark.parametrize(
    "weight",
    [0, -1, 0.0, -0.0, float("nan"), float("inf"), float("-inf"), MAX_WEIGHT * 2, 10**400, True, None, "2", [2]],
)
def test_rule_29_what_is_no_weight_is_refused_and_nothing_is_changed(world: World, weight: object) -> None:
    answer = world.ask("set_policy", model="twice", weight=weight)
    assert answer.kind == Kind.INVALID_INPUT
    assert answer.text.startswith("weight: expected a number above 0 and at most 1099511627776, got ")
    assert len(answer.text) < 200
    assert world.weights() == {1: 1.0, 2: 1.0, 3: 1.0}


@pytest.mark.parametrize(
    ("args", "kind", "text"),
    [
        ({"model": "nowhere", "weight": 1}, Kind.NOT_FOUND, "Request for unknown model: 'nowhere' is not found"),
        ({"model": "", "weight": 1}, Kind.NOT_FOUND, "Request for unknown model: '' is not found"),
        ({"weight": 1}, Kind.INVALID_INPUT, "model: expected a name, got None"),
        ({"model": ["twice"], "weight": 1}, Kind.INVALID_INPUT, "model: expected a name, got ['twice']"),
        ({"model": "broken", "weight": 1}, Kind.NOT_READY, "model 'broken' is UNAVAILABLE: no good file"),
        ({"model": "twice"}, Kind.INVALID_INPUT, "weight: expected a number above 0"),
    ],
)
def test_rule_29_refusals(world: World, args: dict[str, Any], kind: Kind, text: str) -> None:
    answer = world.ask("set_policy", **args)
    assert answer.kind == kind
    assert answer.text.startswith(text)
    assert world.weights() == {1: 1.0, 2: 1.0, 3: 1.0}


def test_a_weight_waits_for_the_versions_that_still_load() -> None:
    world = World()
    world.load(1)
    assert world.ask("set_policy", model="twice", weight=4).value["versions"] == ["1"]
    assert world.ask("set_policy", model="other", weight=5).value["versions"] == []
    world.load(2)
    world.load(3, weight=3.0)
    assert world.weights() == {1: 4.0, 2: 4.0, 3: 5.0}


@given(st.floats(min_value=1e-300, max_value=MAX_WEIGHT))
def test_any_weight_in_range_lets_decisions_be_made(weight: float) -> None:
    world = World()
    for model_id in (1, 3):
        world.load(model_id)
    assert world.ask("set_policy", model="twice", weight=weight).kind == Kind.OK
    for key, model_id in ((1, 1), (2, 3)):
        assert world.scheduler.offer(Request(key, model_id, 0, 1, key), key) is None
    first = world.scheduler.next(10)
    assert isinstance(first, Dispatch)
    world.scheduler.record(first, 1_000_000, 20)
    assert isinstance(world.scheduler.next(30), Dispatch)


def test_rule_32_control_status(world: World) -> None:
    status = world.ask("control_status").value
    assert {key: status[key] for key in ("worker", "residency_mode", "discipline", "sizing")} == {
        "worker": "worker0", "residency_mode": "static", "discipline": "fair", "sizing": status["sizing"],
    }  # fmt: skip
    assert [(one["name"], one["version"]) for one in status["models"]] == [
        ("twice", "1"),
        ("twice", "2"),
        ("other", "1"),
    ]
    # The first client input that has the axis, counted from 1.
    assert all(one["batch_axis"] == {"input": "X", "axis": 2} for one in status["models"])
    only = world.ask("control_status", model="other").value
    assert [one["name"] for one in only["models"]] == ["other"]
    assert world.ask("control_status", model="nowhere").kind == Kind.NOT_FOUND


def test_rule_30_scheduler_metrics_count_what_ran_and_what_was_refused(world: World) -> None:
    world.scheduler.offer(Request(1, 3, 0, 3, 0), 0)
    dispatch = world.scheduler.next(2_000_000)
    assert isinstance(dispatch, Dispatch)
    world.scheduler.record(dispatch, 5_000_000, 8_000_000)
    assert world.scheduler.offer(Request(2, 3, 0, 1, 0, deadline_ns=1), 9_000_000) is not None
    metrics = world.ask("scheduler_metrics", model="other").value
    assert set(metrics) == {"other/1"}
    one = metrics["other/1"]
    assert (one["dispatch_count"], one["requests_served"], one["rows_served"], one["padding_rows"]) == (1, 1, 3, 5)
    assert (one["batch_sizes"], one["shed"], one["queue_depth"]) == ({"8": 1}, {"deadline": 1}, 0)
    assert one["total_compute_seconds"] == 0.005
    assert one["residency"] == "device"
    assert 0.0015 < one["queue_wait_p50_seconds"] <= one["queue_wait_p99_seconds"] < 0.003
    statistics = world.ask("statistics", model="other", version="1").value
    assert [(s["inference_count"], s["execution_count"]) for s in statistics] == [(3, 1)]


def test_an_unknown_question_is_told_those_that_exist(world: World) -> None:
    answer = world.ask("set_polcy")
    assert answer.kind == Kind.UNSUPPORTED
    assert "set_policy" in answer.text
