"""From an ONNX network to a serialised plan.

The library raises nothing: ``parse`` gives False, ``build_serialized_network`` None, ``add_optimization_profile`` -1.
Reasons are in the parser's errors and in the log, which ``BuildFailed`` carries together.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from engines.tensorrt.names import Api, MessageLog, Progress, shortened
from engines.tensorrt.network import Network
from engines.tensorrt.profiles import Profile

log = logging.getLogger("engines.tensorrt")

MAX_TOLD: Final = 3
"""Reasons an error message spells out."""


class BuildFailed(Exception):
    """The library does not build this network; ``str`` gives its reasons."""


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What changes a plan beside network and profiles.

    Attributes:
        tf32: whether f32 products may be computed with 10-bit mantissas, as the library does unless told otherwise.
        optimization_level: 0 to 5; 3 is the library's own choice.
        workspace_bytes: most scratch memory a kernel may ask for; 0 leaves it to the library.
    """

    tf32: bool = True
    optimization_level: int = 3
    workspace_bytes: int = 0

    @classmethod
    def of(cls, numerics: str) -> BuildOptions:
        """Return the options for ``runtime.numerics``.

        ``auto`` and ``tf32`` compute f32 products in TF32 where the device has it, ``f32`` never does. Models in f16 or
        bf16 are computed in just that: precision belongs to the file.
        """
        assert numerics in ("auto", "f32", "tf32"), f"unknown numerics {numerics!r}"
        return cls(tf32=numerics != "f32")


@dataclass(frozen=True, slots=True)
class Built:
    """A plan and the timing cache that grew with it (None if the library kept none)."""

    plan: bytes
    timing_cache: bytes | None


def build(
    api: Api,
    network: Network,
    profiles: Sequence[Profile],
    options: BuildOptions,
    timing_cache: bytes = b"",
    progress: Progress | None = None,
) -> Built:
    """Return the plan of ``network`` with one exact profile per entry of ``profiles``.

    Raises:
        BuildFailed: with the library's reasons.
    """
    messages = MessageLog()
    logger = api.logger(messages)
    builder = api.module.Builder(logger)
    definition = builder.create_network(api.network_flags)
    parser = api.module.OnnxParser(definition, logger)
    if not parser.parse(network.model):
        raise BuildFailed("cannot be parsed: " + _reasons(_parser_errors(parser), messages))
    config = builder.create_builder_config()
    _configure(api, config, options)
    monitor = api.progress_monitor(progress) if progress is not None else None
    if monitor is not None:
        config.progress_monitor = monitor
    # RTX measures nothing while it builds, and warns whoever gives it a cache.
    cache = None if api.is_rtx else _use_timing_cache(config, timing_cache)
    _add_profiles(builder, config, definition, profiles, messages)
    plan = builder.build_serialized_network(definition, config)
    if plan is None:
        raise BuildFailed("cannot be built: " + _reasons([], messages))
    if progress is not None:
        progress(1.0)
    grown = cache.serialize() if cache is not None else None
    return Built(bytes(plan), None if grown is None else bytes(grown))


def _configure(api: Api, config: Any, options: BuildOptions) -> None:
    trt = api.module
    config.builder_optimization_level = options.optimization_level
    if options.workspace_bytes:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_bytes)
    if options.tf32:
        config.set_flag(trt.BuilderFlag.TF32)
    else:
        # On unless it is cleared.
        config.clear_flag(trt.BuilderFlag.TF32)


def _use_timing_cache(config: Any, blob: bytes) -> Any:
    """Give the builder measurements of earlier builds; None if it takes none."""
    cache = config.create_timing_cache(blob)
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        if blob:
            log.warning("tensorrt.timing_cache_refused bytes=%d: starting an empty one", len(blob))
            return _use_timing_cache(config, b"")
        return None
    return cache


def _add_profiles(
    builder: Any, config: Any, definition: Any, profiles: Sequence[Profile], messages: MessageLog
) -> None:
    inputs = [definition.get_input(index) for index in range(definition.num_inputs)]
    # Weights and other inputs of one size are no part of a profile.
    varying = {tensor.name for tensor in inputs if any(size < 0 for size in tensor.shape)}
    for profile in profiles:
        shapes = builder.create_optimization_profile()
        for name, dims in profile.shapes:
            if name in varying:
                shapes.set_shape(name, dims, dims, dims)
        index = config.add_optimization_profile(shapes)
        if index != profile.index:
            raise BuildFailed(f"profile {profile.index} {dict(profile.shapes)} is refused: {_reasons([], messages)}")


def _parser_errors(parser: Any) -> list[str]:
    found = []
    for index in range(parser.num_errors):
        error = parser.get_error(index)
        operator, node = error.node_operator(), error.node_name()
        place = f"{operator} node '{node}': " if operator else ""
        found.append(place + shortened(error.desc()))
    return found


def _reasons(first: list[str], messages: MessageLog) -> str:
    # The parser's own errors say it best; the log then repeats each node on the way to the failing one.
    texts = first or [message.text for message in messages.take() if "ERROR" in message.severity]
    told: list[str] = []
    for text in texts:
        if text and text not in told:
            told.append(text)
    if not told:
        return "the library gives no reason"
    more = f" (and {len(told) - MAX_TOLD} more)" if len(told) > MAX_TOLD else ""
    return "; ".join(told[:MAX_TOLD]) + more
