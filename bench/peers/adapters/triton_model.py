"""Triton's Python backend: the requests of a batch as one execution. Copied into a model repository as ``model.py``."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import onnxruntime
import triton_python_backend_utils as backend


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        parameters = json.loads(args["model_config"])["parameters"]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        path = parameters["onnx"]["string_value"]
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def execute(self, requests: list[Any]) -> list[Any]:
        inputs = [backend.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        outputs = self._session.run(None, {"X": inputs[0] if len(inputs) == 1 else np.concatenate(inputs)})[0]
        answers, start = [], 0
        for rows in inputs:
            end = start + len(rows)
            answers.append(backend.InferenceResponse([backend.Tensor("Y", outputs[start:end])]))
            start = end
        return answers
