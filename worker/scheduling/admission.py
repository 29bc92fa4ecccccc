"""Whether a request may wait at all, and whether a model's description makes sense."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from engines.errors import InvalidInput, Kind
from worker.scheduling.model import ModelState
from worker.scheduling.types import ModelSpec, Request, SchedulerOptions, Shed


def refusal(request: Request, model: ModelState | None, max_queue_depth: int, now_ns: int) -> Shed | None:
    """Return why a request must not be queued, or None when it may be (rules 19 and 23)."""
    if model is None:
        text = f"model {request.model_id} is not loaded any more"
        return Shed(request, Kind.NOT_READY, "unloaded", text)
    spec = model.spec
    if request.rows < 1 or not -1 <= request.variant < spec.variants:
        text = (
            f"request to model {spec.name!r} has {request.rows} rows of shape variant {request.variant}; "
            f"at least 1 row and a variant from 0 to {spec.variants - 1}, or -1 for no executable, are needed"
        )
        return Shed(request, Kind.INVALID_INPUT, "invalid", text)
    if request.deadline_ns <= now_ns:
        return expired(request, model)
    if model.queue.depth >= max_queue_depth:
        depth = model.queue.depth
        text = f"queue of model {spec.name!r} is full: {depth} requests wait, max_queue_depth is {max_queue_depth}"
        return Shed(request, Kind.QUEUE_FULL, "queue_full", text)
    return None


def all_fit(requests: Sequence[Request], model: ModelState, max_queue_depth: int, now_ns: int) -> bool:
    """Return whether ``refusal`` would be None for each of ``requests``, all of ``model`` and none committed."""
    spec = model.spec
    model_id, variants = spec.model_id, spec.variants
    if model.queue.depth + len(requests) > max_queue_depth:
        return False
    for request in requests:
        if (
            request.model_id != model_id
            or request.committed
            or request.rows < 1
            or not -1 <= request.variant < variants
            or request.deadline_ns <= now_ns
        ):
            return False
    return True


def expired(request: Request, model: ModelState) -> Shed:
    """Return the outcome of a request whose deadline passed before device work."""
    waited_ms = (request.deadline_ns - request.arrival_ns) / 1e6
    text = f"deadline passed before model {model.spec.name!r} ran: the request had {waited_ms:.1f} ms from its arrival"
    return Shed(request, Kind.DEADLINE_EXCEEDED, "deadline", text)


def hopeless(request: Request, model: ModelState, cost_ns: float, now_ns: int) -> Shed:
    """Return the outcome of a request that could not have finished in time (laxity, rule 19)."""
    left_ms = (request.deadline_ns - now_ns) / 1e6
    text = (
        f"deadline cannot be met: {left_ms:.1f} ms are left and a run of model {model.spec.name!r} takes "
        f"about {cost_ns / 1e6:.1f} ms"
    )
    return Shed(request, Kind.DEADLINE_EXCEEDED, "laxity", text)


def check_spec(spec: ModelSpec) -> None:
    """Raise InvalidInput, naming the field, if ``spec`` cannot be scheduled."""
    sizes = spec.batch_sizes
    wrong = ""
    if sizes != (0,) and (not sizes or sizes[0] < 1 or any(a >= b for a, b in pairwise(sizes))):
        wrong = f"batch_sizes {sizes} must be ascending sizes from 1, or (0,)"
    elif spec.coalesces and sizes == (0,):
        wrong = "coalesces needs a batch axis, but batch_sizes is (0,)"
    elif spec.variants < 1:
        wrong = f"variants is {spec.variants}, at least 1 is needed"
    elif spec.max_batch_size < 0 or spec.max_queue_delay_ns < 0:
        wrong = f"max_batch_size {spec.max_batch_size}, max_queue_delay_ns {spec.max_queue_delay_ns}: 0 or more needed"
    if wrong:
        raise InvalidInput(f"model {spec.name!r}: {wrong}")
    check_weight(spec.name, spec.weight)


def check_weight(name: str, weight: float) -> None:
    """Raise InvalidInput unless ``weight`` is a finite number above 0."""
    if not (math.isfinite(weight) and weight > 0):
        raise InvalidInput(f"weight of model {name!r} is {weight}; a finite number above 0 is needed")


def check_options(options: SchedulerOptions) -> None:
    """Raise InvalidInput, naming the setting, for values that no decision can be made with."""
    checks = {
        "ema_halflife_ns": (options.ema_halflife_ns > 0, "above 0"),
        "recency_penalty_cap": (0 <= options.recency_penalty_cap <= 1, "from 0 to 1"),
        "coalescing_discount": (0 <= options.coalescing_discount < 1, "from 0 to below 1"),
        "cost_ema_alpha": (0 < options.cost_ema_alpha <= 1, "above 0, up to 1"),
        "max_queue_depth": (options.max_queue_depth >= 1, "1 or more"),
        "default_cost_ns": (options.default_cost_ns > 0, "above 0"),
    }
    wrong = [f"{name} is {getattr(options, name)}, must be {need}" for name, (good, need) in checks.items() if not good]
    if wrong:
        raise InvalidInput("; ".join(wrong))
