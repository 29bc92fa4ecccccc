"""The exact input shapes of every (variant, batch size): one optimization profile each.

A profile whose smallest, usual and largest shape are one shape lets the builder choose kernels for that very shape, and
makes every buffer's size known before the first run. Profile index = variant x number of batch sizes + batch size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from engines.bundle.manifest import Manifest, variable_axes
from engines.errors import NotReady

MAX_PROFILES: Final = 128
"""Profiles of one engine: each costs build time, a context and a graph."""


@dataclass(frozen=True, slots=True)
class Profile:
    """One (variant, batch size).

    Attributes:
        shapes: per input of the manifest, in its order, its name and full shape.
    """

    index: int
    variant: int
    batch_size: int
    shapes: tuple[tuple[str, tuple[int, ...]], ...]


def profiles_of(manifest: Manifest) -> tuple[Profile, ...]:
    """Return every profile in index order.

    Raises:
        NotReady: there are more than ``MAX_PROFILES``.
    """
    variants = manifest.input_shapes or ((),)
    count = len(variants) * len(manifest.batch_sizes)
    if count > MAX_PROFILES:
        raise NotReady(
            f"input_shapes: {len(variants)} shapes x {len(manifest.batch_sizes)} batch sizes are {count} profiles, "
            f"TensorRT engines here have at most {MAX_PROFILES}; list fewer shapes or fewer compiled_batch_sizes"
        )
    axes = variable_axes(manifest.inputs)
    profiles: list[Profile] = []
    for variant, sizes in enumerate(variants):
        size_of = dict(zip(axes, sizes, strict=True))
        for batch_size in manifest.batch_sizes:
            shapes = tuple(
                (
                    spec.name,
                    tuple(
                        batch_size if axis == spec.batch_axis else size_of.get((index, axis), size)
                        for axis, size in enumerate(spec.shape)
                    ),
                )
                for index, spec in enumerate(manifest.inputs)
            )
            profiles.append(Profile(len(profiles), variant, batch_size, shapes))
    return tuple(profiles)
