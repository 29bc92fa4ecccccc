"""Settings of one worker and of its channels: frozen values, parsed once by the node and handed to children.

Children read no files and no environment; they get one of these as JSON on an inherited descriptor. Defaults are
those of the scheduling page; where each value came from is known to ``frontend.config`` only.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Positive = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1)]
PLAN_FOLDER_OF_REPOSITORY = ".plans"
"""Directory inside a model repository with models that were compiled ahead of time; no bundle, since it is hidden."""
MAX_WEIGHT = float(1 << 40)
"""Largest weight of a model: sums of any number of them stay exact enough to divide by."""


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Per-model overrides under ``scheduler.models``. ``max_batch_size`` 0 means uncapped."""

    weight: Positive = 1.0
    max_batch_size: Annotated[int, Meta(ge=0)] = 0
    max_queue_delay_ms: Annotated[float, Meta(ge=0, le=60_000)] = 0.0


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``global.scheduler`` of the node file."""

    discipline: str = "fair"
    sizing: str = "learned"
    ema_halflife_seconds: Positive = 30.0
    recency_penalty_cap: Fraction = 0.25
    coalescing_discount: Annotated[float, Meta(ge=0, lt=1)] = 0.10
    cost_ema_alpha: Annotated[float, Meta(gt=0, le=1)] = 0.2
    max_queue_depth: Count = 1024
    dispatch_timeout_seconds: Positive = 30.0
    compaction_interval: Annotated[int, Meta(ge=0)] = 0
    models: dict[str, ModelSettings] = {}


class RuntimeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``global.runtime``: the device side.

    Attributes:
        backend: what computes; see ``engines.select``.
        weight_cache_fraction: part of the device memory free at start, less the wiggle fraction, that weights get.
        threads: on a CPU; 0 lets the engine choose from the CPUs it may use.
    """

    backend: str = "auto"
    weight_cache_fraction: Fraction = 1.0
    weight_cache_wiggle_fraction: Fraction = 0.1
    numerics: str = "auto"
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0


class ChannelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``global.channel``: shared memory between one frontend and the worker.

    Attributes:
        arena_bytes: tensors of one frontend's requests in flight.
        max_in_flight: requests one frontend may have in flight; the rings hold as many records, so they never fill.
        max_channels: frontends that may be attached at once.
        worker_spin_us: how long the worker looks for work before it sleeps; up to twice that after long executions.
    """

    arena_bytes: Annotated[int, Meta(ge=1 << 20, le=1 << 40)] = 256 * 1024 * 1024
    max_in_flight: Annotated[int, Meta(ge=1, le=1 << 16)] = 4096
    max_channels: Annotated[int, Meta(ge=1, le=60)] = 32
    worker_spin_us: Annotated[int, Meta(ge=0, le=10_000)] = 100


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All a worker process is told. ``gpus`` empty means any, if ``runtime.backend`` asks for one."""

    name: str
    run_dir: str
    model_repo: str
    control_mode: str = "static"
    poll_seconds: Positive = 15.0
    generation: int = 1
    gpus: tuple[int, ...] = ()
    scheduler: SchedulerSettings = SchedulerSettings()
    runtime: RuntimeSettings = RuntimeSettings()
    channel: ChannelSettings = ChannelSettings()
