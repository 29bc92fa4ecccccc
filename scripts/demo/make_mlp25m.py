"""The MLP bundle's model: 25.2 million weights, the same ones on every machine.

On a CPU a batch of 32 costs about three times one row, so it shows what batching gains; the weights mean nothing.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_WIDTHS = (1024, 3072, 3072, 3072, 1024)
_SEED = 25


def make(bundle: Path) -> None:
    """Write ``model.onnx`` into ``bundle``: four dense layers with ReLU between them, float32."""
    # RandomState, not Generator: its streams never change between releases.
    random = np.random.RandomState(_SEED)
    nodes, weights = [], []
    name = "INPUT"
    for layer, (fan_in, fan_out) in enumerate(pairwise(_WIDTHS)):
        scale = np.sqrt(2 / fan_in)  # keeps the size of the values from layer to layer
        kernel = (random.standard_normal((fan_in, fan_out)) * scale).astype(np.float32)
        bias = (random.standard_normal(fan_out) * 0.1).astype(np.float32)
        weights += [numpy_helper.from_array(kernel, f"w{layer}"), numpy_helper.from_array(bias, f"b{layer}")]
        last = layer == len(_WIDTHS) - 2
        nodes.append(helper.make_node("Gemm", [name, f"w{layer}", f"b{layer}"], ["OUTPUT" if last else f"h{layer}"]))
        if not last:
            nodes.append(helper.make_node("Relu", [f"h{layer}"], [f"r{layer}"]))
            name = f"r{layer}"
    graph = helper.make_graph(
        nodes,
        "mlp25m",
        [helper.make_tensor_value_info("INPUT", TensorProto.FLOAT, ["n", _WIDTHS[0]])],
        [helper.make_tensor_value_info("OUTPUT", TensorProto.FLOAT, ["n", _WIDTHS[-1]])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, str(bundle / "model.onnx"))
