"""The Magika bundle's model and label table, from the files that its wheel carries."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import onnx
from onnx import TensorProto, helper

_MODEL = "magika/models/standard_v3_3"
_KNOWLEDGE = "magika/config/content_types_kb.min.json"


def make(bundle: Path) -> None:
    """Write ``model.onnx`` and ``labels.json`` into ``bundle``."""
    wheel = importlib.metadata.distribution("magika")
    config = json.loads(Path(str(wheel.locate_file(f"{_MODEL}/config.min.json"))).read_text())
    knowledge = json.loads(Path(str(wheel.locate_file(_KNOWLEDGE))).read_text())
    labels = config["target_labels_space"]
    possible = sorted({*labels, *config["overwrite_map"].values()})
    table = {
        "labels": labels,
        "text_labels": [label for label in possible if knowledge[label]["is_text"]],
        **{
            key: config[key]
            for key in (
                *("thresholds", "overwrite_map", "medium_confidence_threshold"),
                *("beg_size", "end_size", "block_size", "padding_token", "min_file_size_for_dl"),
            )
        },
    }
    (bundle / "labels.json").write_text(json.dumps(table, indent=1) + "\n")
    model = onnx.load(str(wheel.locate_file(f"{_MODEL}/model.onnx")))
    onnx.save(_with_verdict(model), str(bundle / "model.onnx"))


def _with_verdict(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with one more byte per row, passed through.

    Content too short for the model is decided before it. The decision travels with its row, because postprocess sees
    nothing but what the model put out.
    """
    graph = model.graph
    batch = graph.input[0].type.tensor_type.shape.dim[0].dim_param
    graph.input.append(helper.make_tensor_value_info("verdict", TensorProto.UINT8, [batch]))
    graph.output.append(helper.make_tensor_value_info("verdict_out", TensorProto.UINT8, [batch]))
    graph.node.append(helper.make_node("Identity", ["verdict"], ["verdict_out"]))
    onnx.checker.check_model(model)
    return model
