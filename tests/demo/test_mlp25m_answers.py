"""The MLP bundle computes what its description says, with the weights of its seed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from direct_bundle import DirectBundle
from onnx import numpy_helper


@pytest.fixture(scope="session")
def mlp(demo_bundle: Callable[[str], DirectBundle]) -> DirectBundle:
    return demo_bundle("mlp25m")


def test_has_25_million_weights(mlp: DirectBundle) -> None:
    model = onnx.load(str(mlp.directory / "model.onnx"))
    assert sum(numpy_helper.to_array(tensor).size for tensor in model.graph.initializer) == 25_176_064


def test_agrees_with_numpy(mlp: DirectBundle) -> None:
    model = onnx.load(str(mlp.directory / "model.onnx"))
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    rows = np.random.default_rng(1).standard_normal((5, 1024)).astype(np.float32)
    expected = rows
    for layer in range(4):
        expected = expected @ weights[f"w{layer}"] + weights[f"b{layer}"]
        if layer < 3:
            expected = np.maximum(expected, 0)
    np.testing.assert_allclose(mlp.infer({"INPUT": rows}, pad_to=8)["OUTPUT"], expected, rtol=1e-3, atol=1e-3)


def test_weights_are_the_same_on_every_machine(mlp: DirectBundle) -> None:
    rows = np.linspace(-1, 1, 1024, dtype=np.float32)[None, :]
    first = mlp.infer({"INPUT": rows})["OUTPUT"][0, :4]
    np.testing.assert_allclose(first, KNOWN, rtol=1e-4, atol=1e-4)


KNOWN = [1.191221, -0.765136, -1.896713, -0.691576]
"""The first outputs for the row from -1 to 1, as computed when the seed was chosen."""
