"""The Magika bundle's model and label table, from the files that its wheel carries.

The model is changed in two ways, neither of which changes what it means. One byte per row is passed through, see
``_add_verdict``. And its two normalisations are replaced: they take the variance as the mean of squares minus the
square of the mean, which loses most digits when bytes hardly vary, as in a short file full of padding. ONNX Runtime
sums in another order for another number of rows, so a file's score depended on how many others it was batched with (by
up to 0.005 between 1 and 16 rows; 1e-7 with LayerNormalization, at the same speed).
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

MODEL = "magika/models/standard_v3_3/model.onnx"
_CONFIG = "magika/models/standard_v3_3/config.min.json"
_KNOWLEDGE = "magika/config/content_types_kb.min.json"
_LAYER_NORMALIZATION_OPSET = 17


def make(bundle: Path) -> None:
    """Write ``model.onnx`` and ``labels.json`` into ``bundle``."""
    (bundle / "labels.json").write_text(json.dumps(_label_table(), indent=1) + "\n")
    model = onnx.load(str(wheel_file(MODEL)))
    _replace_normalisations(model)
    _add_verdict(model.graph)
    onnx.checker.check_model(model)
    onnx.save(model, str(bundle / "model.onnx"))


def wheel_file(name: str) -> Path:
    """Return where the installed wheel's file lies, without importing the package."""
    return Path(str(importlib.metadata.distribution("magika").locate_file(name)))


def _label_table() -> dict[str, object]:
    config = json.loads(wheel_file(_CONFIG).read_text())
    knowledge = json.loads(wheel_file(_KNOWLEDGE).read_text())
    labels = config["target_labels_space"]
    possible = sorted({*labels, *config["overwrite_map"].values()})
    keys = ("thresholds", "overwrite_map", "medium_confidence_threshold")
    sizes = ("beg_size", "end_size", "block_size", "padding_token", "min_file_size_for_dl")
    return {
        "labels": labels,
        "text_labels": [label for label in possible if knowledge[label]["is_text"]],
        **{key: config[key] for key in keys + sizes},
    }


def _replace_normalisations(model: onnx.ModelProto) -> None:
    """Put LayerNormalization where the graph builds it from sums; the parts are found by the names of their outputs."""
    graph = model.graph
    made = {node.output[0].rpartition("MagikaV2/")[2]: node for node in graph.node}
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for at, axis in (("LayerNorm_0", 1), ("LayerNorm_1", -1)):
        source = made[f"{at}/Sub_1:0"].input[0]  # what the mean is subtracted from
        scale = made[f"{at}/Mul:0"].input[1]
        epsilon = float(numpy_helper.to_array(constants[made[f"{at}/AddV2:0"].input[1]]))
        width = numpy_helper.to_array(constants[scale]).size
        for name, value in (("one", np.ones), ("zero", np.zeros)):
            graph.initializer.append(numpy_helper.from_array(value(width, np.float32), f"{at}/{name}"))
        if axis == 1:  # [n, width, channels]: the operator normalises over the last axis
            graph.node.append(helper.make_node("Transpose", [source], [f"{at}/turned"], perm=[0, 2, 1]))
            source = f"{at}/turned"
        normalised = f"{at}/normalised"
        graph.node.append(
            helper.make_node(
                "LayerNormalization", [source, f"{at}/one", f"{at}/zero"], [normalised], axis=-1, epsilon=epsilon
            )
        )
        if axis == 1:
            graph.node.append(helper.make_node("Transpose", [normalised], [f"{at}/back"], perm=[0, 2, 1]))
            normalised = f"{at}/back"
        made[f"{at}/Mul_1:0"].input[:] = [normalised, scale]
    _keep_what_is_needed(graph)
    for opset in model.opset_import:
        if opset.domain == "":
            opset.version = _LAYER_NORMALIZATION_OPSET


def _keep_what_is_needed(graph: onnx.GraphProto) -> None:
    """Leave the nodes that lead to an output, each after those it needs, and the constants they use."""
    producer = {output: node for node in graph.node for output in node.output}
    ordered: list[onnx.NodeProto] = []
    done: set[str] = set()
    stack = [output.name for output in graph.output]
    while stack:
        name = stack[-1]
        node = producer.get(name)
        missing = [] if node is None or name in done else [need for need in node.input if need not in done]
        if missing:
            stack.extend(missing)
            continue
        stack.pop()
        if node is not None and name not in done:
            ordered.append(node)
        done.add(name)
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in ordered]
    used = [tensor for tensor in graph.initializer if tensor.name in done]
    constants = [onnx.TensorProto.FromString(tensor.SerializeToString()) for tensor in used]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend(constants)


def _add_verdict(graph: onnx.GraphProto) -> None:
    """Pass one more byte per row through the model.

    Content too short for the model is decided before it. The decision travels with its row, because postprocess sees
    nothing but what the model put out.
    """
    batch = graph.input[0].type.tensor_type.shape.dim[0].dim_param
    graph.input.append(helper.make_tensor_value_info("verdict", TensorProto.UINT8, [batch]))
    graph.output.append(helper.make_tensor_value_info("verdict_out", TensorProto.UINT8, [batch]))
    graph.node.append(helper.make_node("Identity", ["verdict"], ["verdict_out"]))
