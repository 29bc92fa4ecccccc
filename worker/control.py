"""Answers to what the node, frontends and operators ask of the worker. No data path; every mistake is a clear error."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any, Protocol

from engines.errors import InvalidInput, Kind, NotFound, NotReady, ServingError
from worker.channel.messages import Answer, Ask
from worker.channel.node_link import Status
from worker.channel.series import Series
from worker.config import MAX_WEIGHT
from worker.metrics import model_series
from worker.models import UNAVAILABLE, LoadedModel
from worker.registry import Registry
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.types import ModelSnapshot

RESIDENCY = "device"
"""Where every loaded model's weights are, until they can be elsewhere."""


class Figures(Protocol):
    """What the loop adds to the models' own figures."""

    def series(self) -> list[Series]: ...


class Control:
    """Carries out one question at a time, on the loop's thread, before the next selection (rule 29)."""

    def __init__(self, worker: str, registry: Registry, scheduler: Scheduler, figures: Figures) -> None:
        self._worker = worker
        self._registry = registry
        self._scheduler = scheduler
        self._figures = figures
        self._weights: dict[str, float] = {}
        self._answers: dict[str, Callable[[dict[str, Any], int], Any]] = {
            "models": self._models,
            "statistics": self._statistics,
            "scheduler_metrics": self._scheduler_metrics,
            "control_status": self._control_status,
            "set_policy": self._set_policy,
        }

    def answer(self, ask: Ask, now_ns: int) -> Answer:
        """Return the answer to any question; unknown ones name those that exist."""
        handler = self._answers.get(ask.what)
        if handler is None:
            text = f"unknown question '{ask.what}', expected one of {sorted(self._answers)}"
            return Answer(id=ask.id, kind=int(Kind.UNSUPPORTED), text=text)
        try:
            return Answer(id=ask.id, value=handler(ask.args, now_ns))
        except ServingError as error:
            return Answer(id=ask.id, kind=int(error.kind), text=str(error))

    def series(self, now_ns: int) -> list[Series]:
        """Return every series of this worker."""
        found = self._figures.series()
        for loaded, snapshot in self._snapshots(now_ns):
            found.extend(model_series(loaded.counters, snapshot, self._worker))
        return found

    def status(self, now_ns: int) -> Status:
        """Return what ``ringserve status`` shows of the models."""
        depths = {loaded.entry.model_id: snapshot.queue_depth for loaded, snapshot in self._snapshots(now_ns)}
        return Status(models=self._registry.status(depths))

    def loaded(self, model: LoadedModel, now_ns: int) -> None:
        """Give a model that has just been loaded the weight that was set while it was not."""
        weight = self._weights.get(model.entry.name)
        if weight is not None:
            self._scheduler.set_weight(model.entry.model_id, weight, now_ns)

    def _chosen(self, args: dict[str, Any], now_ns: int) -> list[tuple[LoadedModel, ModelSnapshot]]:
        """Return the loaded versions of ``args["model"]``; of every model if it is empty or not given."""
        model = args.get("model", "")
        if model:
            self._known(model)
        return [pair for pair in self._snapshots(now_ns) if model in ("", pair[0].entry.name)]

    def _known(self, model: object) -> None:
        """Raise NotFound for a model that is not in the repository, NotReady for one of which no version can serve."""
        entries = [entry for entry in self._registry.entries() if entry.name == model]
        if not entries:
            raise NotFound(f"Request for unknown model: '{model}' is not found")
        if all(entry.state == UNAVAILABLE for entry in entries):
            raise NotReady(f"model '{model}' is {entries[0].state}: {entries[0].reason}")

    def _snapshots(self, now_ns: int) -> list[tuple[LoadedModel, ModelSnapshot]]:
        pairs = []
        for snapshot in self._scheduler.snapshot(now_ns).models:
            loaded = self._registry.loaded(snapshot.model_id)
            if loaded is not None:
                pairs.append((loaded, snapshot))
        return pairs

    def _models(self, args: dict[str, Any], now_ns: int) -> Any:
        return [
            {"name": entry.name, "version": entry.version, "state": entry.state, "reason": entry.reason}
            for entry in self._registry.entries()
        ]

    def _statistics(self, args: dict[str, Any], now_ns: int) -> Any:
        model, version = args.get("model", ""), args.get("version", "")
        found = [
            loaded.counters.statistics(snapshot)
            for loaded, snapshot in self._snapshots(now_ns)
            if model in ("", loaded.entry.name) and version in ("", loaded.entry.version)
        ]
        if model and not found:
            raise NotFound(f"Request for unknown model: '{model}' is not found")
        return found

    def _scheduler_metrics(self, args: dict[str, Any], now_ns: int) -> Any:
        return {
            _label(loaded): {
                "weight": snapshot.weight,
                "queue_depth": snapshot.queue_depth,
                "dispatch_count": snapshot.dispatches,
                "requests_served": snapshot.requests,
                "rows_served": snapshot.rows,
                "padding_rows": snapshot.padding_rows,
                "total_compute_seconds": snapshot.compute_ns / 1e9,
                "recent_compute_ema_seconds": snapshot.recent_compute_s,
                "queue_wait_p50_seconds": snapshot.wait_p50_ns / 1e9,
                "queue_wait_p99_seconds": snapshot.wait_p99_ns / 1e9,
                "batch_sizes": {str(size): count for size, count in sorted(snapshot.dispatched_sizes.items())},
                "shed": snapshot.sheds,
                "effective_max_batch": snapshot.max_batch_rows,
                "residency": RESIDENCY,
            }
            for loaded, snapshot in self._chosen(args, now_ns)
        }

    def _control_status(self, args: dict[str, Any], now_ns: int) -> Any:
        whole = self._scheduler.snapshot(now_ns)
        return {
            "worker": self._worker,
            "residency_mode": "static",
            "discipline": whole.discipline.value,
            "sizing": whole.sizing.value,
            "models": [
                {
                    "name": loaded.entry.name,
                    "version": loaded.entry.version,
                    "weight": snapshot.weight,
                    "queue_depth": snapshot.queue_depth,
                    "dispatch_count": snapshot.dispatches,
                    "requests_served": snapshot.requests,
                    "rows_served": snapshot.rows,
                    "compute_seconds": snapshot.compute_ns / 1e9,
                    "effective_max_batch": snapshot.max_batch_rows,
                    "residency": RESIDENCY,
                    "batch_axis": _wire_axis(loaded),
                }
                for loaded, snapshot in self._chosen(args, now_ns)
            ],
        }

    def _set_policy(self, args: dict[str, Any], now_ns: int) -> Any:
        model, weight = args.get("model"), args.get("weight")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= MAX_WEIGHT:
            shown = reprlib.repr(weight)
            raise InvalidInput(f"weight: expected a number above 0 and at most {MAX_WEIGHT:.0f}, got {shown}")
        if not isinstance(model, str):
            raise InvalidInput(f"model: expected a name, got {reprlib.repr(model)}")
        # Checked first, then changed: a mistake leaves nothing half-applied.
        self._known(model)
        self._weights[model] = float(weight)
        targets = [loaded for loaded in self._registry.all_loaded() if loaded.entry.name == model]
        for loaded in targets:
            self._scheduler.set_weight(loaded.entry.model_id, float(weight), now_ns)
        return {"model": model, "weight": float(weight), "versions": [loaded.entry.version for loaded in targets]}


def _label(loaded: LoadedModel) -> str:
    return f"{loaded.entry.name}/{loaded.entry.version}"


def _wire_axis(loaded: LoadedModel) -> dict[str, Any] | None:
    """Return the client input and 1-based axis on which rows can be counted without decoding a request (rule 32)."""
    for spec in loaded.signature.client_inputs:
        if spec.batch_axis is not None:
            return {"input": spec.name, "axis": spec.batch_axis + 1}
    return None
