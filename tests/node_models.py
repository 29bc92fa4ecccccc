"""The model repository that tests of a whole node serve."""

from __future__ import annotations

from pathlib import Path

import onnx_models

ECHO_DTYPES = ("bool", "u8", "u16", "u32", "u64", "i8", "i16", "i32", "i64", "f16", "f32", "f64")


def rows_manifest(dtype: str = "f32", columns: int = 4, sizes: str = "[1, 8, 32]") -> str:
    """Return a manifest for a model INPUT -> OUTPUT of rows."""
    tensor = f"dtype: {dtype}, shape: nc, dims: {{c: {columns}}}"
    return (
        'format_version: "1"\nkind: model\n'
        f"executable_inputs:\n  - {{name: INPUT, {tensor}}}\n"
        f"executable_outputs:\n  - {{name: OUTPUT, {tensor}}}\n"
        f"batching: {{compiled_batch_sizes: {sizes}}}\n"
    )


TEXT_MANIFEST = """format_version: "1"
kind: model
executable_inputs:
  - {name: INPUT, dtype: f32, shape: nc, dims: {c: 4}}
executable_outputs:
  - {name: OUTPUT, dtype: f32, shape: nc, dims: {c: 4}}
batching: {compiled_batch_sizes: [1, 8, 32]}
client_inputs:
  - {name: TEXT, dtype: bytes, shape: n}
client_outputs:
  - {name: UPPER, dtype: bytes, shape: n}
  - {name: LENGTH, dtype: f32, shape: n}
"""

TEXT_MODEL_PY = """
import numpy as np
from engines.errors import InvalidInput


def load(path):
    return {"loaded": True}


def preprocess(inputs, ctx):
    texts = inputs["TEXT"]
    if any(text == b"refuse" for text in texts):
        raise InvalidInput("TEXT: 'refuse' is not wanted")
    if any(text == b"raise" for text in texts):
        raise RuntimeError("secret detail")
    ctx.texts = texts
    rows = np.zeros((len(texts), 4), np.float32)
    rows[:, 0] = [len(text) for text in texts]
    return {"INPUT": rows}


def postprocess(outputs, ctx):
    if any(text == b"post" for text in ctx.texts):
        raise InvalidInput("TEXT: 'post' is refused afterwards")
    upper = np.array([text.upper() for text in ctx.texts], dtype=object)
    return {"UPPER": upper, "LENGTH": outputs["OUTPUT"][:, 0]}
"""


def write_models(root: Path) -> Path:
    """Write the models these tests use; return the repository."""
    for dtype in ECHO_DTYPES:
        onnx_models.identity(root / f"echo_{dtype}", dtype)
    onnx_models.simple(root / "simple")
    for name, path in (
        ("affine", onnx_models.affine(root / "affine", columns=4)),
        ("poison", onnx_models.poison(root / "poison")),
        ("slow", onnx_models.slow(root / "slow", 60.0)),
        ("text", onnx_models.identity(root / "text")),
    ):
        (path.parent / "manifest.yaml").write_text(TEXT_MANIFEST if name == "text" else rows_manifest())
    (root / "text" / "model.py").write_text(TEXT_MODEL_PY)
    onnx_models.mlp(root / "mlp", 3, 64)
    onnx_models.unbatched(root / "unbatched")
    (root / "unbatched" / "manifest.yaml").write_text(
        'format_version: "1"\nkind: model\n'
        "executable_inputs:\n  - {name: INPUT, dtype: f32, shape: c, dims: {c: 6}}\n"
        "executable_outputs:\n  - {name: OUTPUT, dtype: f32, shape: c, dims: {c: 6}}\n"
    )
    onnx_models.identity(root / "versions" / "1")
    onnx_models.affine(root / "versions" / "3", 2.0, 1.0, 4)
    return root
