"""Loaded models, and the thread that loads them while the loop already answers.

Loading reads files, builds sessions, probes and warms up: seconds of work that must not hold up attaching frontends or
health. The loader thread hands finished models to the loop through a queue and a descriptor; only the loop changes the
registry. A bundle that does not load becomes an entry with its reason, never a missing one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from engines.base import Engine, Executable, Model
from engines.bundle.manifest import Manifest
from engines.bundle.repository import BrokenBundle, Bundle, load_manifest, scan
from engines.bundle.signature import BlockLayout, Signature
from engines.errors import ServingError
from engines.probe import resolve
from worker.channel.messages import ModelEntry
from worker.config import ModelSettings, WorkerSettings
from worker.metrics import ModelCounters
from worker.scheduling.types import ModelSpec

log = logging.getLogger("worker.models")

READY = "READY"
LOADING = "LOADING"
UNAVAILABLE = "UNAVAILABLE"


@dataclass(slots=True)
class LoadedModel:
    """A model version that can execute.

    Attributes:
        warm_ns: measured device time per (variant, batch size), from the warm-up.
    """

    entry: ModelEntry
    model: Model
    signature: Signature
    spec: ModelSpec
    layouts: tuple[BlockLayout, ...]
    counters: ModelCounters
    shares_blocks: bool
    warm_ns: dict[tuple[int, int], int] = field(default_factory=dict)
    executables: dict[tuple[int, int], Executable] = field(default_factory=dict)

    def executable(self, variant: int, batch_size: int) -> Executable:
        """Return the executable for one compiled size; the lookup is cached here because it happens per dispatch."""
        key = (variant, batch_size)
        found = self.executables.get(key)
        if found is None:
            found = self.executables[key] = self.model.executable(variant, batch_size)
        return found


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """A bundle that will not serve, as an entry that says why."""

    entry: ModelEntry


LoadOutcome = LoadedModel | LoadFailed
EngineFor = Callable[[Manifest], Engine]


class Loader:
    """Loads a repository once, on a thread of its own.

    ``fileno()`` becomes readable when ``take()`` has something. Outcomes keep the repository's order.
    """

    def __init__(self, settings: WorkerSettings, engine_for: EngineFor) -> None:
        self._settings = settings
        self._engine_for = engine_for
        self._outcomes: deque[LoadOutcome] = deque()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None
        self._stop = False
        self._next_id = 1

    def fileno(self) -> int:
        return self._event

    def start(self) -> list[ModelEntry]:
        """Scan the repository and begin loading; return an entry per bundle, LOADING or already UNAVAILABLE.

        Raises:
            ServingError: the repository itself cannot be read.
        """
        found = scan(Path(self._settings.model_repo))
        work: list[tuple[int, Bundle]] = []
        entries: list[ModelEntry] = []
        for bundle in found:
            model_id = self._next_id
            self._next_id += 1
            if isinstance(bundle, BrokenBundle):
                entries.append(_failed(model_id, bundle.name, bundle.version or "1", bundle.reason))
                log.error("model.failed model=%s version=%s reason=%s", bundle.name, bundle.version, bundle.reason)
            else:
                entries.append(ModelEntry(model_id=model_id, name=bundle.name, version=bundle.version, state=LOADING))
                work.append((model_id, bundle))
        names = {entry.name for entry in entries}
        for name in self._settings.scheduler.models:
            if name not in names:
                # Not a mistake: the model may come later. But a name that is only misspelt has no other symptom.
                log.warning(
                    "config.unknown_model setting=global.scheduler.models.%s: no model '%s' in %s",
                    name, name, self._settings.model_repo,
                )  # fmt: skip
        self._thread = threading.Thread(target=self._load_all, args=(work,), name="loader", daemon=True)
        self._thread.start()
        return entries

    def take(self) -> list[LoadOutcome]:
        """Return the outcomes since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        outcomes: list[LoadOutcome] = []
        while self._outcomes:
            outcomes.append(self._outcomes.popleft())
        return outcomes

    @property
    def loading(self) -> bool:
        """Whether the thread may still hold a model that nobody has taken."""
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Stop after the model being loaded; do not wait for it."""
        self._stop = True

    def _load_all(self, work: Sequence[tuple[int, Bundle]]) -> None:
        for model_id, bundle in work:
            if self._stop:
                return
            for note in bundle.notes:
                log.info("bundle.note model=%s version=%s note=%s", bundle.name, bundle.version, note)
            outcome = self._load(model_id, bundle)
            self._outcomes.append(outcome)
            os.eventfd_write(self._event, 1)

    def _load(self, model_id: int, bundle: Bundle) -> LoadOutcome:
        started_ns = time.monotonic_ns()
        try:
            manifest = load_manifest(bundle)
            engine = self._engine_for(manifest)
            model = engine.open(manifest, bundle.model_file)
            try:
                loaded = self._resolve(model_id, bundle, manifest, engine, model)
            except BaseException:
                model.close()
                raise
        except ServingError as error:
            log.error("model.failed model=%s version=%s reason=%s", bundle.name, bundle.version, error)
            return LoadFailed(_failed(model_id, bundle.name, bundle.version, str(error)))
        except Exception as error:
            # A library's own exception type must not end the loader: the other models still have to load.
            log.exception("model.failed model=%s version=%s", bundle.name, bundle.version)
            reason = f"loading failed: {type(error).__name__}: {error}"
            return LoadFailed(_failed(model_id, bundle.name, bundle.version, reason))
        load_s = (time.monotonic_ns() - started_ns) / 1e9
        log.info("model.ready model=%s version=%s load_s=%.2f", bundle.name, bundle.version, load_s)
        return loaded

    def _resolve(self, model_id: int, bundle: Bundle, manifest: Manifest, engine: Engine, model: Model) -> LoadedModel:
        signature = resolve(model, manifest)
        model.prepare(signature)
        settings = self._settings.scheduler.models.get(bundle.name, ModelSettings())
        spec = ModelSpec(
            model_id=model_id,
            name=bundle.name,
            batch_sizes=signature.batch_sizes,
            variants=len(signature.variants),
            coalesces=signature.coalesces,
            weight=settings.weight,
            max_batch_size=settings.max_batch_size,
            max_queue_delay_ns=int(settings.max_queue_delay_ms * 1e6),
        )
        entry = ModelEntry(
            model_id=model_id,
            name=bundle.name,
            version=bundle.version,
            state=READY,
            path=str(bundle.path),
            platform=engine.name,
            signature=signature,
            hooks=manifest.hooks,
            model_py=str(bundle.model_py or ""),
            max_batch_size=settings.max_batch_size or signature.max_rows,
            task=manifest.task,
        )
        layouts = tuple(BlockLayout.of(signature, index) for index in range(len(signature.variants)))
        counters = ModelCounters(bundle.name, bundle.version)
        loaded = LoadedModel(entry, model, signature, spec, layouts, counters, signature.shares_blocks)
        warm_up(loaded)
        return loaded


def warm_up(loaded: LoadedModel) -> None:
    """Run every executable twice on zeros and remember the second time; a failure is logged and not fatal (rule 25).

    The first run pays for lazy allocation inside the engine and would overstate the cost.
    """
    for variant in range(len(loaded.signature.variants)):
        for batch_size in loaded.signature.batch_sizes:
            try:
                loaded.warm_ns[variant, batch_size] = min(_run_zeros(loaded, variant, batch_size) for _ in range(2))
            except ServingError as error:
                log.warning(
                    "model.warm_up_failed model=%s variant=%d batch_size=%d reason=%s",
                    loaded.entry.name, variant, batch_size, error,
                )  # fmt: skip


def _run_zeros(loaded: LoadedModel, variant: int, batch_size: int) -> int:
    executable = loaded.executable(variant, batch_size)
    slot = executable.slot()
    for array in slot.inputs:
        array[...] = np.zeros((), dtype=array.dtype)
    executable.stage(slot)
    executable.launch(slot)
    return executable.finish(slot).compute_ns


def _failed(model_id: int, name: str, version: str, reason: str) -> ModelEntry:
    return ModelEntry(model_id=model_id, name=name, version=version, state=UNAVAILABLE, reason=reason)
