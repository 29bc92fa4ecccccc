"""Requests through a real node whose worker uses the device."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from statistics import median

import numpy as np

import onnx_models
from bench.gpu.world import World
from node_models import rows_manifest

SECONDS = 4.0
CONNECTIONS = 32


def node(world: World) -> None:
    """Serve two models, compare answers, and load the node for a while."""
    report = world.report
    command = [sys.executable, "-c", "import frontend.cli, frontend.process, worker.__main__, real_node"]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    if tried.returncode:
        report.left_out("a real node", (tried.stderr.strip().splitlines() or ["it does not start"])[-1])
        return
    from bench.load import binary_infer, closed_loop, connect, http_senders
    from real_node import Node, raw_output

    root = world.work_dir / "node"
    for path in (
        onnx_models.affine(root / "models" / "affine", columns=4),
        onnx_models.mlp(root / "models" / "mlp", 3, 4),
    ):
        (path.parent / "manifest.yaml").write_text(rows_manifest() + "engine: array\n")
    backend = "cuda" if report.is_gpu else "cpu"
    # Most of the device is held by this process while it checks.
    (root / "node.yaml").write_text(
        f"global: {{runtime: {{backend: {backend}, weight_cache_fraction: 0.05}}, control: {{}}}}\n"
    )

    async def drive(port: int) -> None:
        connection = await connect("127.0.0.1", port)
        right = True
        for _ in range(50):
            rows = world.random.standard_normal((int(world.random.integers(1, 9)), 4)).astype(np.float32)
            status, body = await connection.call(binary_infer("affine", {"INPUT": ("FP32", rows)}))
            right &= status == 200 and np.allclose(raw_output(body, 4), rows * 2 + 1, rtol=1e-6)
        assert connection.transport is not None
        connection.transport.close()
        report.check("answers of a real node are right", right)
        rows = np.ones((1, 4), np.float32)
        senders = await http_senders("127.0.0.1", port, binary_infer("affine", {"INPUT": ("FP32", rows)}), CONNECTIONS)
        result = await closed_loop(senders, SECONDS if report.is_gpu else 0.5, 0.5)
        done = result.statuses["ok"]
        report.check("all requests under load are answered", done > 0 and set(result.statuses) == {"ok"})
        report.figure(f"requests, {CONNECTIONS} connections", done / result.seconds, "req/s")
        if result.latencies_s:
            report.figure("p50 of them", median(result.latencies_s) * 1e3, "ms")

    with Node(root / "models", Path(world.work_dir) / "run", node_file=root / "node.yaml") as running:
        log = running.log()
        if report.is_gpu:
            report.check("the node's worker uses the device", "device.opened" in log)
        asyncio.run(drive(running.ports["http_port"]))
