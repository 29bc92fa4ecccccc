"""Whether a manifest and a model file speak of the same tensors; every difference with the place to mend it.

An engine says what the file declares, this module compares. Dynamic axes of the file agree with any size the
manifest gives them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engines.bundle.manifest import Manifest, variable_axes
from engines.errors import NotReady
from engines.onnx_file import NotOnnx, OnnxFacts, facts_of
from engines.tensor import TensorSpec


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A graph input or output as the model file declares it.

    Attributes:
        dtype: manifest name of the element type, or the file's own name of a type that we cannot carry.
        dims: sizes in axis order, -1 for a dynamic axis; None if the file does not even say the rank.
    """

    name: str
    dtype: str
    dims: tuple[int, ...] | None


def require_agreement(
    manifest: Manifest, inputs: Mapping[str, FileTensor], outputs: Mapping[str, FileTensor], model_file: Path
) -> None:
    """Return if the manifest fits the file.

    Raises:
        NotReady: with every difference, each as file, key path, expected and got.
    """
    problems = differences(manifest, inputs, outputs)
    if problems:
        raise NotReady(f"{model_name(model_file)}: manifest and {model_file.name} disagree: " + "; ".join(problems))


def require_facts(model_file: Path) -> OnnxFacts:
    """Return what the model file holds.

    Raises:
        NotReady: it cannot be read or is no ONNX model.
    """
    try:
        return facts_of(model_file)
    except (OSError, NotOnnx) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise NotReady(f"{model_name(model_file)}: {model_file}: cannot be read as an ONNX model: {reason}") from error


def model_name(model_file: Path) -> str:
    """Return the bundle's name for messages: the directory, without the version directory."""
    folder = model_file.absolute().parent
    return folder.parent.name if folder.name.isdigit() and folder.parent.name else folder.name


def differences(manifest: Manifest, inputs: Mapping[str, FileTensor], outputs: Mapping[str, FileTensor]) -> list[str]:
    """Return every contradiction between the manifest's executable tensors and the file's, empty if there is none."""
    problems: list[str] = []
    for key, specs, tensors in (
        ("executable_inputs", manifest.inputs, inputs),
        ("executable_outputs", manifest.outputs, outputs),
    ):
        declared = {spec.name for spec in specs}
        for index, spec in enumerate(specs):
            tensor = tensors.get(spec.name)
            place = f"{key}[{index}]"
            if tensor is None:
                known = ", ".join(repr(name) for name in tensors) or "none"
                problems.append(f"{place}.name: the file has no '{spec.name}'; it has {known}")
            else:
                problems.extend(_tensor_differences(place, spec, tensor, manifest))
        if key == "executable_inputs":
            # Outputs may be left out: nobody asked for them. A model cannot run without one of its inputs.
            problems.extend(
                f"{key}: the file's '{name}' is missing; declare it" for name in tensors if name not in declared
            )
    if not problems:
        problems.extend(_variant_differences(manifest))
    return problems


def _tensor_differences(place: str, spec: TensorSpec, tensor: FileTensor, manifest: Manifest) -> list[str]:
    problems = []
    if spec.dtype != tensor.dtype:
        problems.append(f"{place}.dtype: '{spec.name}' is {tensor.dtype} in the file, {spec.dtype} in the manifest")
    if tensor.dims is None:
        return problems
    if len(spec.shape) != len(tensor.dims):
        problems.append(
            f"{place}.shape: '{spec.name}' has {len(tensor.dims)} axes in the file {_show(tensor.dims)}, "
            f"{len(spec.shape)} in the manifest {_show(spec.shape)}"
        )
        return problems
    for axis, (ours, theirs) in enumerate(zip(spec.shape, tensor.dims, strict=True)):
        if theirs < 0:
            continue
        if axis == spec.batch_axis:
            if manifest.batch_sizes != (theirs,):
                problems.append(
                    f"batching.compiled_batch_sizes: the file fixes the batch axis of '{spec.name}' at {theirs}, so "
                    f"only [{theirs}] can be served, got {list(manifest.batch_sizes)}; export the model with a "
                    f"dynamic batch axis or write [{theirs}]"
                )
        elif ours < 0 and not _limited(spec, axis):
            if place.startswith("executable_inputs"):
                problems.append(
                    f"{place}.dims: axis {axis} of '{spec.name}' is {theirs} in the file, -1 in the manifest; "
                    f"write {theirs}"
                )
        elif ours >= 0 and ours != theirs:
            problems.append(
                f"{place}.dims: axis {axis} of '{spec.name}' is {theirs} in the file, {ours} in the manifest"
            )
    return problems


def _variant_differences(manifest: Manifest) -> list[str]:
    axes = [(manifest.inputs[index], axis) for index, axis in variable_axes(manifest.inputs)]
    problems = []
    for index, sizes in enumerate(manifest.input_shapes):
        if len(sizes) != len(axes):
            problems.append(
                f"input_shapes[{index}]: expected {len(axes)} sizes, one per variable axis, got {len(sizes)}"
            )
    if axes and not manifest.input_shapes:
        named = ", ".join(f"axis {axis} of '{spec.name}'" for spec, axis in axes)
        problems.append(
            f"input_shapes: {named} vary; list the sizes to serve, such as [[{', '.join('16' for _ in axes)}]]"
        )
    return problems


def _limited(spec: TensorSpec, axis: int) -> bool:
    return axis < len(spec.limits) and spec.limits[axis] > 0


def _show(dims: tuple[int, ...]) -> str:
    return "[" + ", ".join("?" if size < 0 else str(size) for size in dims) + "]"
