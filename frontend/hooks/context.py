"""What a hook is told about the request it works for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from frontend.inference import Parameter


@dataclass
class Context:
    """The ``ctx`` of ``preprocess(inputs, ctx)`` and ``postprocess(outputs, ctx)``.

    Both hooks of a request get the same object, so what ``preprocess`` stores on it (``ctx.sizes = ...``) is there in
    ``postprocess``.

    Attributes:
        request_id: as the client sent it; empty if it sent none.
        parameters: the request's own parameters.
        deadline_ns: absolute, CLOCK_MONOTONIC; None without a deadline.
        state: what ``load(path)`` returned, shared by all requests of this process.
    """

    model: str
    version: str
    request_id: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    deadline_ns: int | None = None
    state: Any = field(default=None, repr=False)
