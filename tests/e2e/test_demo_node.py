"""The demo bundles through a real node, over both protocols, with the answers they must give."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from real_node import Node

pytestmark = pytest.mark.process

DEMO = Path(__file__).parents[2] / "demo" / "models"
PNG = (
    b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x01\x00\x00\x00\x01\x08\x06\x00\x00\x00\x1f\x15\xc4\x89"
    b"\x00\x00\x00\rIDATx\x9cc\xf8\xcf\xc0\xf0\x1f\x00\x05\x00\x01\xff\x89\x99=\x1d\x00\x00\x00\x00IEND\xaeB`\x82"
)


@pytest.fixture(scope="module")
def demo_ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, int]]:
    assert DEMO.is_dir(), "run scripts/demo_bundles first; scripts/test does"
    with Node(DEMO, tmp_path_factory.mktemp("demo_run"), frontends=2) as node:
        yield node.ports


def clients(ports: dict[str, int]) -> Iterator[tuple[object, object]]:
    with httpclient.InferenceServerClient(f"127.0.0.1:{ports['http_port']}") as http:
        yield httpclient, http
    with grpcclient.InferenceServerClient(f"127.0.0.1:{ports['grpc_port']}") as grpc:
        yield grpcclient, grpc


def infer(module, client, model: str, name: str, array: np.ndarray, datatype: str):
    tensor = module.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return client.infer(model, [tensor])


def test_magika_names_a_python_file_a_json_and_a_png(demo_ports: dict[str, int]) -> None:
    python = Path(__file__).read_bytes()
    json = b'{\n  "name": "ringserve",\n  "values": [1, 2, 3],\n  "nested": {"a": null, "b": true},\n  "text": "x"\n}\n'
    contents = np.array([python, json, PNG], dtype=np.object_)
    for module, client in clients(demo_ports):
        result = infer(module, client, "magika", "CONTENT", contents, "BYTES")
        assert result.as_numpy("LABEL").tolist() == [b"python", b"json", b"png"]
        assert (result.as_numpy("SCORE") > 0.5).all()


def test_minilm_reproduces_a_published_cosine(demo_ports: dict[str, int]) -> None:
    texts = np.array([b"A man is eating food.", b"A man is eating a piece of bread."], dtype=np.object_)
    for module, client in clients(demo_ports):
        vectors = infer(module, client, "minilm", "TEXT", texts, "BYTES").as_numpy("EMBEDDING")
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
        assert float(vectors[0] @ vectors[1]) == pytest.approx(0.7553, abs=5e-4)


def test_mlp25m_is_alike_on_both_protocols(demo_ports: dict[str, int]) -> None:
    array = np.random.default_rng(3).standard_normal((5, 1024)).astype(np.float32)
    answers = [
        infer(module, client, "mlp25m", "INPUT", array, "FP32").as_numpy("OUTPUT")
        for module, client in clients(demo_ports)
    ]
    assert answers[0].shape == (5, 1024)
    assert answers[0].tobytes() == answers[1].tobytes()
