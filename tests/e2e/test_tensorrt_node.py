"""A real node whose models run with TensorRT: the strict fake over the host device, in the place of library and GPU.

Every call of the engine passes the fake, every access the host device, from the worker's real threads.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import onnx_models
from bench.load import binary_infer, connect
from engines.array.engine import ArrayEngine
from engines.device.transfer import DIRECT_BYTES
from manifests import manifest
from node_models import rows_manifest
from real_node import Node, raw_output, shared_memory_unchanged, until

pytestmark = pytest.mark.process

CLIENTS, REQUESTS = 8, 12
WIDTH = 64
WIDE = DIRECT_BYTES // 4
"""Columns of rows that are worth a copy of their own."""
TESTS = Path(__file__).resolve().parents[1]

_IN_THE_LIBRARYS_PLACE = """
import logging

import engines.device.opening as opening
from engines.device.host import HostDevice
from engines.device.transfer import Transfer
from engines.tensorrt.names import Api
from tensorrt_fake.library import World, fake_api

world = World()


def open_device(index):
    world.device = HostDevice(64 << 20)
    return world.device


def copy_out(transfer, source, stream, plainly=Transfer.copy_out):
    plainly(transfer, source, stream)
    if transfer.straight_bytes:
        logging.getLogger("test").warning("straight bytes=%d", transfer.straight_bytes)


Transfer.copy_out = copy_out
opening.open_device = open_device
Api.load = classmethod(lambda cls: fake_api("11.4", world))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tensorrt")
    (root / "site" / "tensorrt").mkdir(parents=True)
    # Whether TensorRT is installed is asked of the path; nobody imports this.
    (root / "site" / "tensorrt" / "__init__.py").write_text("raise AssertionError('imported')\n")
    (root / "site" / "sitecustomize.py").write_text(_IN_THE_LIBRARYS_PLACE)
    # Not the directory of all tests: some of its names are those of packages.
    (root / "site" / "tensorrt_fake").symlink_to(TESTS / "tensorrt_fake")
    (root / "node.yaml").write_text("gpus: [0]\nglobal: {runtime: {backend: cuda}}\n")
    for seed, name in enumerate(("first", "second")):
        path = onnx_models.mlp(root / "models" / name, layers=2, width=WIDTH, seed=seed)
        (path.parent / "manifest.yaml").write_text(rows_manifest(columns=WIDTH))
    path = onnx_models.affine(root / "models" / "wide", columns=WIDE)
    (path.parent / "manifest.yaml").write_text(rows_manifest(columns=WIDE))
    return root


@pytest.fixture(scope="module")
def node(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    environment = {"PYTHONPATH": str(models / "site")}
    run_dir = tmp_path_factory.mktemp("run")
    with shared_memory_unchanged():
        with Node(models / "models", run_dir, node_file=models / "node.yaml", env=environment) as node:
            yield node
        log = node.log()
        assert "DeviceMisuse" not in log, log
        assert node.process is not None
        assert node.process.returncode == 0, log


def check(node: Node, models: Path, seed: int) -> None:
    """Let many clients ask both models beside each other, and compare every answer."""
    names = ("first", "second")
    wanted = manifest([f"INPUT f32 n {WIDTH}"], [f"OUTPUT f32 n {WIDTH}"], (1,))
    reference = [ArrayEngine().open(wanted, models / "models" / name / "model.onnx") for name in names]

    async def client(number: int) -> None:
        random = np.random.default_rng((seed, number))
        connection = await connect("127.0.0.1", node.ports["http_port"])
        for turn in range(REQUESTS):
            rows = random.standard_normal((int(random.integers(1, 9)), WIDTH)).astype(np.float32)
            which = (number + turn) % 2
            status, body = await connection.call(binary_infer(names[which], {"INPUT": ("FP32", rows)}))
            assert status == 200, body
            expected = np.concatenate([reference[which].run([row[np.newaxis]])[0] for row in rows])
            np.testing.assert_allclose(raw_output(body, WIDTH), expected, rtol=1e-4, atol=1e-5)
        connection.transport.close()

    async def everyone() -> None:
        await asyncio.gather(*(client(number) for number in range(CLIENTS)))

    asyncio.run(everyone())
    for model in reference:
        model.close()


def test_requests_of_many_clients_are_answered_by_tensorrt(node: Node, models: Path) -> None:
    assert "tensorrt.opened model=first" in node.log()
    assert f"slab_bytes={2 * WIDTH * WIDTH * 4} " in node.log()
    check(node, models, 0)


def test_large_rows_go_between_arenas_and_device_without_the_host(node: Node) -> None:
    """Of several clients and frontends, in batches with padding: each row from its place, each answer to its place."""
    node.wait_full_strength()
    start = node.line_count()

    async def client(number: int) -> None:
        random = np.random.default_rng(number)
        connection = await connect("127.0.0.1", node.ports["http_port"])
        for _ in range(3):
            rows = random.standard_normal((int(random.integers(1, 4)), WIDE)).astype(np.float32)
            status, body = await connection.call(binary_infer("wide", {"INPUT": ("FP32", rows)}))
            assert status == 200, body
            np.testing.assert_allclose(raw_output(body, WIDE), rows * 2 + 1, rtol=1e-5)
        connection.transport.close()

    async def everyone() -> None:
        await asyncio.gather(*(client(number) for number in range(CLIENTS)))

    asyncio.run(everyone())
    node.wait_line("straight bytes=", timeout_s=60, start=start)


def test_new_worker_takes_the_plans_from_the_cache(node: Node, models: Path) -> None:
    node.wait_full_strength()
    built = node.log().count("tensorrt.built")
    assert built == 3
    before, start = node.pids("worker"), node.line_count()
    os.kill(before[0], signal.SIGKILL)
    node.wait_line("tensorrt.opened model=wide", timeout_s=60, start=start)
    until("a new worker", lambda: node.full_strength() and node.pids("worker") != before)
    assert node.log().count("tensorrt.built") == built
    check(node, models, 1)
