"""A manifest's rules: from plain YAML values to a ``Manifest``, or to every mistake in them.

Choices
    ``compiled_batch_sizes`` that are not ascending and unique are refused, not sorted: a list in a surprising order is
    more often a slip than a preference, and the fix in the message can be pasted.
    ``format_version`` may be the number 1 as well as the text "1": nothing else could be meant.
    A model with a batch axis and no ``batching`` gets ``DEFAULT_BATCH_SIZES``; one without any batch axis gets (0,).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from engines.bundle.document import read_document, shown
from engines.bundle.manifest import (
    BATCH_LETTER,
    DEFAULT_BATCH_SIZES,
    DEFAULT_MODEL_FILE,
    MAX_AXIS_SIZE,
    MAX_BATCH_SIZE,
    MAX_BATCH_SIZES,
    MAX_MANIFEST_BYTES,
    MAX_VARIANTS,
    Manifest,
    ManifestError,
    Problem,
    variable_axes,
)
from engines.bundle.tensors import Notes, close_match, is_integer, tensor_list
from engines.tensor import TensorSpec

ENGINES: Final = ("auto", "onnxruntime", "tensorrt", "array")
HOOK_MODES: Final = ("thread", "inline")
TASKS: Final = ("embedding",)
TENSOR_LISTS: Final = ("executable_inputs", "executable_outputs", "client_inputs", "client_outputs")
LATER_KEYS: Final = {"pad_to_variant": "requests of other sizes are refused", "meta": "serve the models one by one"}
"""Keys of the format that this version does not offer, and what happens without them."""
KEYS: Final = (
    "format_version", "kind", "engine", *TENSOR_LISTS, "batching", "input_shapes", "hooks", "task", "model",
    *LATER_KEYS,
)  # fmt: skip
_FLOATS: Final = ("f16", "bf16", "f32", "f64")


def read_manifest(path: Path, *, has_model_py: bool) -> Manifest:
    """Return the manifest in the file at ``path``.

    Args:
        has_model_py: whether the bundle has a ``model.py``; client tensors need one.

    Raises:
        ManifestError: the file cannot be read or is wrong; lists every mistake.
    """
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        why = error.strerror or str(error)
        raise ManifestError([Problem(str(path), "", "a readable file", why, "check the file's permissions")]) from None
    return parse_manifest(raw, str(path), has_model_py=has_model_py)


def parse_manifest(raw: bytes, file: str, *, has_model_py: bool) -> Manifest:
    """Return the manifest that ``raw`` holds; ``file`` names it in messages.

    Raises:
        ManifestError: lists every mistake.
    """
    value, problems = read_document(raw, file)
    if value is None and problems:
        raise ManifestError(problems)
    notes = Notes(file)
    notes.problems += problems
    manifest = _validate(value, notes, has_model_py=has_model_py)
    if manifest is None or notes.problems:
        raise ManifestError(notes.problems)
    return manifest


def model_file_name(raw: bytes) -> str:
    """Return the ``model`` key of a manifest that may be wrong otherwise; the default where it cannot be told."""
    value, _ = read_document(raw, "")
    name = value.get("model") if isinstance(value, dict) else None
    return name if isinstance(name, str) and _is_file_name(name) else DEFAULT_MODEL_FILE


def _validate(value: Any, notes: Notes, *, has_model_py: bool) -> Manifest | None:
    if not isinstance(value, dict):
        found = "an empty file" if value is None else shown(value)
        notes.add("", "a mapping of keys", found, 'begin with format_version: "1" and executable_inputs')
        return None
    notes.unknown_keys(value, KEYS, "")
    for key, instead in LATER_KEYS.items():
        if key in value:
            notes.add(key, "nothing", f"{key}, which is not supported yet", f"remove it; until then {instead}")
    _format_version(value, notes)
    kind = _kind(value, notes)
    tensors = {key: _tensors(value, key, notes) for key in TENSOR_LISTS}
    _client_lists(value, notes, has_model_py=has_model_py)
    inputs, outputs = tensors["executable_inputs"], tensors["executable_outputs"]
    executable = None if inputs is None or outputs is None else (*inputs, *outputs)
    manifest = Manifest(
        kind=kind,
        engine=_choice(value, "engine", ENGINES, "auto", notes),
        inputs=inputs or (),
        outputs=outputs or (),
        client_inputs=(tensors["client_inputs"] if "client_inputs" in value else inputs) or (),
        client_outputs=(tensors["client_outputs"] if "client_outputs" in value else outputs) or (),
        batch_sizes=_batching(value, executable, notes),
        input_shapes=_input_shapes(value, inputs, notes),
        hooks=_hooks(value, notes),
        task=_choice(value, "task", TASKS, "", notes),
        model_file=_model_file(value, notes),
    )
    if manifest.task == "embedding" and manifest.client_inputs and manifest.client_outputs:
        _embedding(manifest, notes)
    return manifest


def _format_version(value: dict[Any, Any], notes: Notes) -> None:
    version = value.get("format_version")
    if version != "1" and not (is_integer(version) and version == 1):
        notes.add("format_version", '"1"', shown(version), 'write format_version: "1"')


def _kind(value: dict[Any, Any], notes: Notes) -> str:
    if value.get("kind") == "meta":
        notes.add("kind", "model", "'meta', which is not supported yet", "serve the models one by one")
        return "meta"
    return _choice(value, "kind", ("model",), "model", notes)


def _choice(value: dict[Any, Any], key: str, choices: Sequence[str], default: str, notes: Notes) -> str:
    """Return the key's value if it is one of ``choices``, the default if it is absent."""
    if key not in value:
        return default
    chosen = value[key]
    if isinstance(chosen, str) and chosen in choices:
        return chosen
    meant = close_match(chosen, choices)
    notes.add(
        key, f"one of {', '.join(choices)}", shown(chosen), f"write {meant}" if meant else "choose one, or remove it"
    )
    return default


def _tensors(value: dict[Any, Any], key: str, notes: Notes) -> tuple[TensorSpec, ...] | None:
    if key in value:
        return tensor_list(value[key], key, notes)
    if key.startswith("executable") and value.get("kind") != "meta":
        fix = "list the model file's tensors; without a manifest they are read from the .onnx file"
        notes.add(key, "a list of tensors", "nothing", fix)
    return None


def _client_lists(value: dict[Any, Any], notes: Notes, *, has_model_py: bool) -> None:
    if has_model_py or value.get("kind") == "meta":
        return
    for key, hook in (("client_inputs", "preprocess"), ("client_outputs", "postprocess")):
        if key in value:
            found = "no model.py in the bundle"
            notes.add(key, f"a model.py whose {hook} makes the difference", found, f"add model.py, or remove {key}")


def _batching(value: dict[Any, Any], executable: tuple[TensorSpec, ...] | None, notes: Notes) -> tuple[int, ...]:
    has_batch = executable is None or any(spec.batch_axis is not None for spec in executable)
    default = DEFAULT_BATCH_SIZES if has_batch else (0,)
    if "batching" not in value:
        return default
    batching = value["batching"]
    if not isinstance(batching, dict):
        notes.add("batching", "a mapping", shown(batching), "write batching: {compiled_batch_sizes: [1, 8, 32]}")
        return default
    notes.unknown_keys(batching, ("compiled_batch_sizes",), "batching")
    if "compiled_batch_sizes" not in batching:
        return default
    key = "batching.compiled_batch_sizes"
    sizes = batching["compiled_batch_sizes"]
    if not isinstance(sizes, list) or not sizes:
        notes.add(key, "a list of row counts", "an empty list" if sizes == [] else shown(sizes), "write [1, 8, 32]")
        return default
    if len(sizes) > MAX_BATCH_SIZES:
        notes.add(key, f"at most {MAX_BATCH_SIZES} sizes", f"{len(sizes)}", "keep the sizes that pay")
        return default
    wrong = [index for index, size in enumerate(sizes) if not (is_integer(size) and 1 <= size <= MAX_BATCH_SIZE)]
    for index in wrong:
        notes.add(f"{key}[{index}]", f"1 to {MAX_BATCH_SIZE} rows", shown(sizes[index]), "correct or remove it")
    if wrong:
        return default
    tidy = sorted(set(sizes))
    if tidy != sizes:
        notes.add(key, "ascending sizes, each once", shown(sizes), f"write {tidy}")
    if not has_batch:
        fix = f"write {BATCH_LETTER} in the shapes, or remove batching"
        notes.add(key, f"a batch axis {BATCH_LETTER} in some executable tensor", "none", fix)
    return tuple(tidy)


def _input_shapes(
    value: dict[Any, Any], inputs: tuple[TensorSpec, ...] | None, notes: Notes
) -> tuple[tuple[int, ...], ...]:
    key = "input_shapes"
    shapes = value.get(key)
    axes = [] if inputs is None else variable_axes(inputs)
    order = ", ".join(f"{inputs[index].name} axis {axis}" for index, axis in axes) if inputs else ""
    example = f"[{', '.join(['64'] * max(1, len(axes)))}]"
    if shapes is None or shapes == []:
        if axes:
            fix = f"add input_shapes: [{example}] with one list per served size"
            notes.add(key, f"sizes of the variable axes ({order})", "nothing", fix)
        return ()
    if not isinstance(shapes, list):
        notes.add(key, "a list of lists of sizes", shown(shapes), f"write [{example}]")
        return ()
    if len(shapes) > MAX_VARIANTS:
        notes.add(key, f"at most {MAX_VARIANTS} entries", f"{len(shapes)}", "serve fewer sizes")
        return ()
    if inputs is not None and not axes:
        fix = "write -1 in dims for the axes that vary, or remove input_shapes"
        notes.add(key, "nothing, since no executable input has a variable axis", shown(shapes), fix)
        return ()
    first: dict[tuple[int, ...], int] = {}
    for index, entry in enumerate(shapes):
        here = f"{key}[{index}]"
        if axes and isinstance(entry, list) and len(entry) != len(axes):
            count = f"{len(axes)} {'size' if len(axes) == 1 else 'sizes'} ({order})"
            notes.add(here, count, f"{len(entry)}: {shown(entry)}", "write one size per variable axis, in this order")
        elif not isinstance(entry, list) or not all(is_integer(size) and 1 <= size <= MAX_AXIS_SIZE for size in entry):
            notes.add(here, f"a list of sizes from 1 to {MAX_AXIS_SIZE}", shown(entry), f"write {example}")
        elif first.setdefault(tuple(entry), index) != index:
            notes.add(here, "every entry once", f"{entry}, also at {key}[{first[tuple(entry)]}]", "remove one of them")
    return tuple(first)


def _hooks(value: dict[Any, Any], notes: Notes) -> str:
    if "hooks" not in value:
        return HOOK_MODES[0]
    hooks = value["hooks"]
    if not isinstance(hooks, dict):
        notes.add("hooks", "a mapping", shown(hooks), "write hooks: {mode: thread}")
        return HOOK_MODES[0]
    notes.unknown_keys(hooks, ("mode",), "hooks")
    mode = hooks.get("mode", HOOK_MODES[0])
    if isinstance(mode, str) and mode in HOOK_MODES:
        return mode
    meant = close_match(mode, HOOK_MODES) or HOOK_MODES[0]
    notes.add("hooks.mode", f"one of {', '.join(HOOK_MODES)}", shown(mode), f"write {meant}")
    return HOOK_MODES[0]


def _model_file(value: dict[Any, Any], notes: Notes) -> str:
    name = value.get("model", DEFAULT_MODEL_FILE)
    if isinstance(name, str) and _is_file_name(name):
        return name
    fix = "put the file beside the manifest and write its name alone"
    notes.add("model", "the name of a file inside the bundle", shown(name), fix)
    return DEFAULT_MODEL_FILE


def _is_file_name(name: str) -> bool:
    plain = bool(name) and name.isprintable() and "/" not in name and "\\" not in name and not name.startswith(".")
    return plain and len(name.encode("utf-8", "replace")) <= 255


def _embedding(manifest: Manifest, notes: Notes) -> None:
    texts, vectors = manifest.client_inputs, manifest.client_outputs
    if len(texts) != 1 or texts[0].dtype != "bytes" or texts[0].shape != (-1,) or texts[0].batch_axis != 0:
        found = "; ".join(f"{spec.name} {spec.dtype} {list(spec.shape)}" for spec in texts)
        fix = "declare client_inputs: [{name: TEXT, dtype: bytes, shape: n}], or remove task"
        notes.add("task", "one client input of dtype bytes and shape n", shown(found), fix)
    if len(vectors) != 1 or vectors[0].dtype not in _FLOATS or len(vectors[0].shape) != 2 or vectors[0].batch_axis != 0:
        found = "; ".join(f"{spec.name} {spec.dtype} {list(spec.shape)}" for spec in vectors)
        fix = "declare client_outputs: [{name: EMBEDDING, dtype: f32, shape: nd, dims: {d: 384}}], or remove task"
        notes.add("task", "one client output of a float dtype and shape nd", shown(found), fix)
