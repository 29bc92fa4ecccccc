"""Generators of manifests and of arbitrary YAML values."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from engines.bundle.manifest import MAX_AXIS_SIZE, Manifest, variable_axes
from engines.tensor import BY_NAME, TensorSpec

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
FIXED_DTYPES = st.sampled_from([name for name in BY_NAME if name != "bytes"])
CLIENT_DTYPES = st.sampled_from(list(BY_NAME))
SIZES = st.integers(1, 5) | st.integers(1, MAX_AXIS_SIZE)


@st.composite
def specs(draw: st.DrawFn, dtypes: st.SearchStrategy[str], *, limited: bool = False) -> TensorSpec:
    """One tensor with up to five axes, the batch axis anywhere or nowhere."""
    shape = draw(st.lists(st.just(-1) | SIZES, max_size=5))
    batch_axis = draw(st.none() | st.integers(0, len(shape) - 1)) if shape else None
    if batch_axis is not None:
        shape[batch_axis] = -1
    limits: tuple[int, ...] = ()
    if limited:
        drawn = [
            draw(st.integers(0, 100)) if size == -1 and axis != batch_axis else 0 for axis, size in enumerate(shape)
        ]
        limits = tuple(drawn) if any(drawn) else ()
    return TensorSpec(draw(NAMES), draw(dtypes), tuple(shape), batch_axis, limits)


def tensor_tuples(
    dtypes: st.SearchStrategy[str], *, limited: bool = False
) -> st.SearchStrategy[tuple[TensorSpec, ...]]:
    """One to four tensors with different names."""
    return st.lists(specs(dtypes, limited=limited), min_size=1, max_size=4, unique_by=lambda spec: spec.name).map(tuple)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Any manifest that can be written."""
    inputs = draw(tensor_tuples(FIXED_DTYPES))
    outputs = draw(tensor_tuples(FIXED_DTYPES, limited=True))
    batched = any(spec.batch_axis is not None for spec in inputs + outputs)
    sizes = draw(st.sets(st.integers(1, 65_536), min_size=1, max_size=5)) if batched else {0}
    axes = len(variable_axes(inputs))
    shapes: tuple[tuple[int, ...], ...] = ()
    if axes:
        shapes = tuple(draw(st.lists(st.tuples(*[SIZES] * axes), min_size=1, max_size=4, unique=True)))
    file_names = st.text(st.characters(categories=["L", "N"], include_characters="._- :#'"), min_size=1, max_size=9)
    return Manifest(
        kind="model",
        engine=draw(st.sampled_from(["auto", "onnxruntime", "tensorrt", "array"])),
        inputs=inputs,
        outputs=outputs,
        client_inputs=draw(st.just(inputs) | tensor_tuples(CLIENT_DTYPES)),
        client_outputs=draw(st.just(outputs) | tensor_tuples(CLIENT_DTYPES)),
        batch_sizes=tuple(sorted(sizes)),
        input_shapes=shapes,
        hooks=draw(st.sampled_from(["thread", "inline"])),
        model_file=draw(st.just("model.onnx") | file_names.filter(lambda name: not name.startswith("."))),
    )


SCALARS: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8) | st.just("n")
)
KEYS = st.sampled_from(
    ["name", "dtype", "shape", "dims", "max", "mode", "compiled_batch_sizes", "n", "c", "h"]
) | st.text(max_size=4) | st.integers() | st.none()  # fmt: skip
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)
