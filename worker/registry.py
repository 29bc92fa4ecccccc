"""Which models the worker knows: the table frontends get, and what the loop needs to execute them.

Only the loop changes it. Every bundle found has exactly one entry, whatever its state.
"""

from __future__ import annotations

from worker.channel.messages import ModelEntry
from worker.channel.node_link import ModelStatus, State
from worker.metrics import ModelCounters
from worker.models import LOADING, READY, LoadedModel


class Registry:
    """Entries by model id, in repository order, and the loaded models among them."""

    def __init__(self, entries: list[ModelEntry]) -> None:
        self._entries = {entry.model_id: entry for entry in entries}
        self._loaded: dict[int, LoadedModel] = {}
        self._unknown = ModelCounters("", "")

    def add(self, loaded: LoadedModel) -> None:
        """Make a model servable."""
        self._loaded[loaded.entry.model_id] = loaded
        self.replace(loaded.entry)

    def replace(self, entry: ModelEntry) -> None:
        """Change a model's entry."""
        self._entries[entry.model_id] = entry

    def entries(self) -> list[ModelEntry]:
        return list(self._entries.values())

    def loaded(self, model_id: int) -> LoadedModel | None:
        return self._loaded.get(model_id)

    def all_loaded(self) -> list[LoadedModel]:
        return list(self._loaded.values())

    def counters(self, model_id: int) -> ModelCounters:
        """Return a model's counters; a spare set for one that is gone, so that counting never fails."""
        loaded = self._loaded.get(model_id)
        return self._unknown if loaded is None else loaded.counters

    def state(self, draining: bool) -> tuple[State, str]:
        """Return what the worker is, and why it is not READY.

        Every bundle in the repository is required: one that failed keeps the worker DEGRADED, so that a bad roll-out is
        never called ready. An empty repository is READY: it serves what it was given.
        """
        if draining:
            return State.DRAINING, ""
        entries = self._entries.values()
        loading = [entry.name for entry in entries if entry.state == LOADING]
        if loading:
            return State.STARTING, f"loading {', '.join(loading)}"
        failed = [f"{entry.name}/{entry.version}: {entry.reason}" for entry in entries if entry.state != READY]
        if failed:
            return State.DEGRADED, "; ".join(failed)
        return State.READY, ""

    def status(self, queue_depth: dict[int, int]) -> tuple[ModelStatus, ...]:
        """Return every entry as ``ringserve status`` shows it."""
        return tuple(
            ModelStatus(
                name=entry.name,
                version=entry.version,
                state=entry.state,
                reason=entry.reason,
                batch_sizes=() if entry.signature is None else entry.signature.batch_sizes,
                queue_depth=queue_depth.get(entry.model_id, 0),
            )
            for entry in self._entries.values()
        )
