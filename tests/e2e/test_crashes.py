"""Processes killed and stopped under load: only the killed one's own is lost, nothing is wrong, no hang, no leak."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bench.load import HttpConnection, binary_infer, connect
from real_node import Node, raw_output, shared_memory_unchanged, until

pytestmark = pytest.mark.process

CLIENTS = 16
KILLS = 10
ALL_KILLS = 100


class Load:
    """Closed-loop clients that check every answer; a connection that breaks is opened again and counted."""

    def __init__(self, port: int, model: str) -> None:
        self._port = port
        self._model = model
        self._tasks: list[asyncio.Task[None]] = []
        self.statuses: Counter[str] = Counter()
        self.broken = 0
        self.wrong: list[str] = []
        self.slowest_s = 0.0
        self._stop = False
        self._answered = asyncio.Condition()

    def start(self, clients: int = CLIENTS) -> None:
        self._tasks = [asyncio.get_running_loop().create_task(self._client(number)) for number in range(clients)]

    async def stop(self) -> None:
        self._stop = True
        await asyncio.gather(*self._tasks)

    async def wait_ok(self, more: int, timeout_s: float = 30.0) -> None:
        """Wait until ``more`` further requests were answered with a result."""
        target = self.statuses["200"] + more
        async with asyncio.timeout(timeout_s), self._answered:
            await self._answered.wait_for(lambda: self.statuses["200"] >= target)

    async def _client(self, number: int) -> None:
        draw = np.random.default_rng(number)
        connection: HttpConnection | None = None
        while not self._stop:
            if connection is None:
                with contextlib.suppress(OSError):
                    connection = await connect("127.0.0.1", self._port)
                if connection is None:
                    await asyncio.sleep(0.01)
                    continue
            array = draw.integers(-1000, 1000, (int(draw.integers(1, 8)), 4)).astype(np.float32)
            started = time.monotonic()
            try:
                status, body = await connection.call(binary_infer(self._model, {"INPUT": ("FP32", array)}))
            except OSError:
                self.broken += 1
                connection = None
                continue
            self.slowest_s = max(self.slowest_s, time.monotonic() - started)
            self.statuses[str(status)] += 1
            if status == 200:
                found = raw_output(body, 4)
                if not np.array_equal(found, array * 2 + 1):
                    self.wrong.append(f"sent {array} got {found}")
            async with self._answered:
                self._answered.notify_all()
        if connection is not None and connection.transport is not None:
            connection.transport.close()


async def blocking(call: Callable[[], object]) -> object:
    """Run a blocking probe beside the load."""
    return await asyncio.get_running_loop().run_in_executor(None, call)


def kill_count(request: pytest.FixtureRequest) -> int:
    return ALL_KILLS if request.config.getoption("--all-kills") else KILLS


def test_kill_9_of_a_frontend_under_load(few_models: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    kills = kill_count(request)
    draw = random.Random(11)

    async def run(node: Node) -> Load:
        load = Load(node.ports["http_port"], "affine")
        load.start()
        for _ in range(kills):
            await load.wait_ok(draw.randrange(1, 400))
            status = await blocking(node.full_strength)
            assert status is not None, node.log()
            frontends = [entry["pid"] for entry in status["processes"] if entry["role"] == "frontend"]
            os.kill(draw.choice(frontends), signal.SIGKILL)
            await blocking(lambda: until("full strength", node.full_strength, 30))
        await load.wait_ok(200)
        await load.stop()
        return load

    with shared_memory_unchanged(), Node(few_models, tmp_path / "run", frontends=3) as node:
        load = asyncio.run(run(node))
        assert not load.wrong, load.wrong[0]
        # Only the killed frontend's own requests are lost, as closed connections; no other one sees an error.
        assert set(load.statuses) == {"200"}, load.statuses
        assert load.broken <= kills * CLIENTS
        status = node.status()
        assert status is not None
        assert all(channel["in_flight"] == 0 for channel in status["channels"]), status["channels"]
        assert all(channel["arena_bytes_used"] == 0 for channel in status["channels"]), status["channels"]
        assert node.stop() == 0
        assert "Traceback" not in node.log()


def test_kill_9_of_the_worker_under_load(few_models: Path, tmp_path: Path) -> None:
    async def run(node: Node) -> Load:
        load = Load(node.ports["http_port"], "affine")
        load.start()
        for _ in range(3):
            await load.wait_ok(100)
            (worker,) = await blocking(lambda: node.pids("worker"))
            load.slowest_s = 0.0
            os.kill(worker, signal.SIGKILL)
            await blocking(lambda: until("full strength", node.full_strength, 30))
            assert load.slowest_s < 1.0, "a caller waited longer than a second for UNAVAILABLE"
        await load.wait_ok(200)
        await load.stop()
        return load

    with shared_memory_unchanged(), Node(few_models, tmp_path / "run") as node:
        load = asyncio.run(run(node))
        assert not load.wrong, load.wrong[0]
        assert load.broken == 0, "a worker's death must not close clients' connections"
        assert set(load.statuses) == {"200", "503"}, load.statuses
        assert node.stop() == 0


def test_readiness_tells_the_truth_about_a_dead_worker(few_models: Path, tmp_path: Path) -> None:
    async def run(node: Node) -> None:
        ports = node.ports
        (worker,) = node.pids("worker")
        connection = await connect("127.0.0.1", ports["http_port"])
        get = b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n"
        assert (await connection.call(get))[0] == 200
        os.kill(worker, signal.SIGKILL)
        async with asyncio.timeout(30):
            while (await connection.call(get))[0] == 200:
                pass
        assert (await connection.call(get))[0] == 503
        await blocking(lambda: until("full strength", node.full_strength, 30))
        assert (await connection.call(get))[0] == 200
        connection.transport.close()

    with Node(few_models, tmp_path / "run", frontends=1) as node:
        asyncio.run(run(node))


def test_sm_06_a_stopped_worker_lets_calls_end_by_their_deadline(few_models: Path, tmp_path: Path) -> None:
    async def run(node: Node) -> None:
        (worker,) = node.pids("worker")
        connection = await connect("127.0.0.1", node.ports["http_port"])
        array = np.ones((1, 4), np.float32)
        os.kill(worker, signal.SIGSTOP)
        try:
            request = binary_infer("affine", {"INPUT": ("FP32", array)}, timeout=300_000)
            status, body = await connection.call(request)
            assert status == 504, body
            assert b"timeout expired" in body
        finally:
            os.kill(worker, signal.SIGCONT)
        status, body = await connection.call(binary_infer("affine", {"INPUT": ("FP32", array)}))
        assert status == 200, body
        connection.transport.close()

    with Node(few_models, tmp_path / "run", frontends=1) as node:
        asyncio.run(run(node))


def test_sm_12_no_process_outlives_a_killed_node(few_models: Path, tmp_path: Path) -> None:
    with shared_memory_unchanged(), Node(few_models, tmp_path / "run") as node:
        pids = node.pids("worker") + node.pids("frontend")
        assert node.process is not None
        node.process.kill()
        node.process.wait()
        until("children gone", lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), 6)


def test_sm_05_starting_and_stopping_leaves_no_trace(few_models: Path, tmp_path: Path) -> None:
    with shared_memory_unchanged():
        for round_number in range(2):
            with Node(few_models, tmp_path / "run", frontends=4) as node:
                assert node.stop() == 0
                assert "Traceback" not in node.log(), round_number
                assert "warning" not in node.log().lower().replace("cudnn", "")


def test_one_more_frontend_by_hand_comes_and_goes(few_models: Path, tmp_path: Path) -> None:
    import subprocess
    import sys

    with Node(few_models, tmp_path / "run", frontends=1) as node:
        command = [sys.executable, "-m", "frontend.cli", "frontend", "--attach", str(node.run_dir)]
        extra = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            until("two channels", lambda: len((node.status() or {"channels": []})["channels"]) == 2)
        finally:
            extra.send_signal(signal.SIGTERM)
            output, _ = extra.communicate(timeout=30)
        assert extra.returncode == 0, output
        until("one channel", lambda: len((node.status() or {"channels": []})["channels"]) == 1)
        assert node.stop() == 0
