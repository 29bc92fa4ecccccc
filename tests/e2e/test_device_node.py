"""A real node on a device: the worker's threads, frontends that come and go, and a device that is lost.

The device is the host device, put in the GPU's place, so the whole life of the node runs under its checks: registered
arenas, the loader beside the loop, executions on the device thread. What it finds ends the worker, and is in the log.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import onnx_models
from bench.load import binary_infer, connect
from node_models import rows_manifest
from real_node import Node, raw_output, shared_memory_unchanged, until

pytestmark = pytest.mark.process

_IN_THE_GPUS_PLACE = '''
import os
import re

import engines.device.opening as opening
from engines.device.errors import DeviceLost
from engines.device.host import HostDevice

LOSE = os.environ.get("LOSE_DEVICE_FILE", "")


class Fragile(HostDevice):
    """Is lost once if a file says so."""

    def copy_in(self, target, source, stream):
        if LOSE and os.path.exists(LOSE):
            os.unlink(LOSE)
            self.lose("an illegal address was used")
        super().copy_in(target, source, stream)


opening.open_device = lambda index: Fragile(32 << 20)
'''


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the stand-in, the node file and the models lie."""
    root = tmp_path_factory.mktemp("device")
    (root / "site").mkdir()
    (root / "site" / "sitecustomize.py").write_text(_IN_THE_GPUS_PLACE)
    (root / "node.yaml").write_text("gpus: [0]\nglobal: {runtime: {backend: cuda}}\n")
    for path in (
        onnx_models.affine(root / "models" / "affine", columns=4),
        onnx_models.mlp(root / "models" / "mlp", width=4),
    ):
        (path.parent / "manifest.yaml").write_text(rows_manifest() + "engine: array\n")
    return root


@pytest.fixture(scope="module")
def node(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    environment = {"PYTHONPATH": str(place / "site"), "LOSE_DEVICE_FILE": str(place / "lose")}
    run_dir = tmp_path_factory.mktemp("run")
    with shared_memory_unchanged():
        with Node(place / "models", run_dir, node_file=place / "node.yaml", env=environment) as node:
            yield node
        log = node.log()
        assert "DeviceMisuse" not in log, log
        assert node.process is not None
        assert node.process.returncode == 0, log


async def ask(port: int, model: str, rows: np.ndarray) -> tuple[int, bytes]:
    connection = await connect("127.0.0.1", port)
    try:
        return await connection.call(binary_infer(model, {"INPUT": ("FP32", rows)}))
    finally:
        connection.transport.close()


async def many(
    port: int, model: str, seed: int, clients: int = 8, requests: int = 12
) -> list[tuple[np.ndarray, bytes]]:
    """Return what clients that ask beside each other got, with what they asked."""

    async def client(number: int) -> list[tuple[np.ndarray, bytes]]:
        random = np.random.default_rng((seed, number))
        connection = await connect("127.0.0.1", port)
        answers = []
        for _ in range(12):
            rows = random.standard_normal((int(random.integers(1, 9)), 4)).astype(np.float32)
            status, body = await connection.call(binary_infer(model, {"INPUT": ("FP32", rows)}))
            assert status == 200, body
            answers.append((rows, body))
        connection.transport.close()
        return answers

    gathered = await asyncio.gather(*(client(number) for number in range(8)))
    return [answer for answers in gathered for answer in answers]


def check(port: int, seed: int) -> None:
    for rows, body in asyncio.run(many(port, "affine", seed)):
        np.testing.assert_array_equal(raw_output(body, 4), rows * 2 + 1)


def test_requests_of_many_clients_are_answered_from_the_device(node: Node) -> None:
    assert "device.opened name='host'" in node.log()
    check(node.ports["http_port"], 0)


def test_a_killed_frontend_takes_its_registration_along(node: Node) -> None:
    node.wait_full_strength()
    start = node.line_count()
    os.kill(node.pids("frontend")[0], signal.SIGKILL)
    node.wait_line("channel.detached", start=start)
    node.wait_full_strength()
    check(node.ports["http_port"], 10)


def test_a_lost_device_costs_one_answer_and_a_new_worker(node: Node, place: Path) -> None:
    node.wait_full_strength()
    port = node.ports["http_port"]
    before = node.pids("worker")
    start = node.line_count()
    (place / "lose").touch()
    status, body = asyncio.run(ask(port, "affine", np.ones((1, 4), np.float32)))
    assert status == 503, body
    assert b"the device is lost: an illegal address was used" in body
    node.wait_line("worker.device_lost reason=.*illegal address", start=start)
    until("a new worker", lambda: node.full_strength() and node.pids("worker") != before)
    check(port, 20)


def test_cuda_without_a_gpu_stops_the_node_and_says_which_piece_is_missing(
    few_models: Path, tmp_path: Path, place: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['cupy'] = None\n")
    environment = {"PYTHONPATH": str(tmp_path)}
    with Node(few_models, tmp_path / "run", node_file=place / "node.yaml", env=environment, wait_ready=False) as node:
        assert node.process is not None
        assert node.process.wait(60) == 78
    log = node.log()
    assert re.search(
        r"worker0 .*runtime\.backend: cuda: the library CuPy does not load: .*pip install 'cupy-cuda12x", log
    )
    assert "Traceback" not in log
