"""What really runs on the device: rows count, only compiled sizes run, a cap and a window mean what they say."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.load import HttpConnection
from real_node import Node, raw_output, until
from scheduler_node import (
    add_affine,
    add_slow,
    ask,
    close_all,
    connections,
    counted,
    node_file,
    request,
    ringserve,
    rows,
    scrape,
    total,
    until_queued,
)

pytestmark = pytest.mark.process

HOLD_MS = 1000


@pytest.fixture(scope="module")
def batch_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """``fill`` sizes batches, so that which sizes run follows from what waits."""
    directory = tmp_path_factory.mktemp("batches")
    models = directory / "models"
    add_slow(models, "hold", HOLD_MS)
    add_affine(models, "sizes", [1, 2, 4, 8])
    add_affine(models, "few", [1, 4, 8])
    add_affine(models, "lone", [1])
    add_affine(models, "capped", [1, 8, 32])
    add_slow(models, "patient", 30, [1, 8])
    settings = node_file(
        directory,
        sizing="fill",
        models={
            "capped": {"max_batch_size": 1, "max_queue_delay_ms": 60_000},
            "lone": {"max_queue_delay_ms": 60_000},
            "patient": {"max_batch_size": 1, "max_queue_delay_ms": 5},
        },
    )
    with Node(models, directory / "run", frontends=1, node_file=settings) as node:
        yield node


async def hold(node: Node, connection: HttpConnection) -> asyncio.Task[tuple[int, bytes]]:
    """Occupy the device; return the call that does, once it runs."""
    ports = node.ports
    before = total(scrape(ports), "worker_queue_wait_seconds_count", model="hold")
    task = asyncio.ensure_future(connection.call(request("hold", rows(1))))

    def running() -> bool:
        return total(scrape(ports), "worker_queue_wait_seconds_count", model="hold") > before

    await asyncio.get_running_loop().run_in_executor(None, until, "the device is held", running)
    return task


def ran(
    node: Node, model: str, arrays: list[np.ndarray], *, held: bool = True, answers: tuple[float, float] = (2.0, 1.0)
) -> dict[int, int]:
    """Send all arrays while the device is held; return how many executions of each size they then took."""
    before = Counter(counted(node, model)["batch_sizes"])

    async def run() -> None:
        opened = await connections(node.ports["http_port"], 1 + len(arrays))
        lone, *others = opened
        holding = await hold(node, lone) if held else None
        calls = [
            asyncio.ensure_future(one.call(request(model, array))) for one, array in zip(others, arrays, strict=True)
        ]
        if holding is not None:
            await until_queued(node, model, len(arrays))
            assert not holding.done(), "the device was free before everything was queued"
            assert (await holding)[0] == 200
        for call, array in zip(calls, arrays, strict=True):
            status, body = await call
            assert status == 200, body
            np.testing.assert_array_equal(raw_output(body, 4), array * answers[0] + answers[1])
        close_all(opened)

    asyncio.run(run())
    after = Counter(counted(node, model)["batch_sizes"])
    return {int(size): count for size, count in (after - before).items()}


@pytest.mark.parametrize(
    ("waiting", "sizes"),
    [
        (3, {2: 1, 1: 1}), (12, {8: 1, 4: 1}), (13, {8: 1, 4: 1, 1: 1}),
        pytest.param(5, {4: 1, 1: 1}, marks=pytest.mark.slow),
        pytest.param(7, {4: 1, 2: 1, 1: 1}, marks=pytest.mark.slow),
        pytest.param(16, {8: 2}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_bs_17_only_compiled_sizes_run(batch_node: Node, waiting: int, sizes: dict[int, int]) -> None:
    assert ran(batch_node, "sizes", [rows(1, float(number)) for number in range(waiting)]) == sizes


def test_bs_02_the_limit_counts_rows(batch_node: Node) -> None:
    """Ten requests of 3 rows: never three in one run of 9, always two in a run of 8."""
    arrays = [rows(3, float(number)) for number in range(10)] + [rows(8, 100.0 + number) for number in range(5)]
    sizes = ran(batch_node, "few", arrays)
    assert sizes == {8: 10}
    ports = batch_node.ports
    samples = scrape(ports)
    assert total(samples, "worker_batch_rows_bucket", model="few", le="8.0") == total(
        samples, "worker_batch_rows_count", model="few"
    )


def test_bs_02_rule_17_more_rows_than_any_size_are_split_and_joined_in_order(batch_node: Node) -> None:
    array = np.arange(36, dtype=np.float32).reshape(9, 4)
    assert ran(batch_node, "few", [array], held=False) == {8: 1, 1: 1}


@pytest.mark.parametrize("model", ["capped", "lone"])
def test_bs_03_one_row_at_most_runs_alone_and_waits_for_nobody(batch_node: Node, model: str) -> None:
    """A window of a minute could not be waited for within the limit of a test."""
    assert ran(batch_node, model, [rows(1, float(number)) for number in range(6)]) == {1: 6}
    assert ran(batch_node, model, [rows(1)], held=False) == {1: 1}
    assert counted(batch_node, model)["effective_max_batch"] == 1


def test_do_07_a_window_is_no_deadline(batch_node: Node) -> None:
    arrays = [rows(1, float(number)) for number in range(10)]
    assert ran(batch_node, "patient", arrays, held=False, answers=(1.0, 0.0)) == {1: 10}
    assert counted(batch_node, "patient")["shed"] == {}


def test_bs_03_a_window_of_an_hour_is_refused_with_its_limit(tmp_path: Path) -> None:
    settings = node_file(tmp_path, models={"lone": {"max_queue_delay_ms": 3_600_000}})
    code, _, err = ringserve("config", "--node", str(settings))
    assert code == 2
    assert err == (
        "ringserve: global.scheduler.models.lone.max_queue_delay_ms: expected a number from 0 to 60000, got 3600000\n"
    )


def test_rule_29_a_weight_is_in_force_while_an_execution_runs(batch_node: Node) -> None:
    async def run() -> None:
        (lone,) = await connections(batch_node.ports["http_port"], 1)
        holding = await hold(batch_node, lone)
        loop = asyncio.get_running_loop()
        change = await loop.run_in_executor(None, lambda: ask(batch_node, "policy", model="sizes", weight=3))
        assert change["weight"] == 3.0
        assert not holding.done(), "the change waited for the device"
        assert (await holding)[0] == 200
        close_all([lone])

    asyncio.run(run())
    assert counted(batch_node, "sizes")["weight"] == 3.0


async def contend(node: Node, seconds_of_device: float) -> dict[str, dict[str, Any]]:
    """Let a crowd of ``busy`` callers and two ``quiet`` ones call in closed loops; return what each model got."""
    port = node.ports["http_port"]
    groups = {"busy": await connections(port, 64), "quiet": await connections(port, 2)}
    before = {name: counted(node, name) for name in groups}
    stop = asyncio.Event()

    async def caller(connection: HttpConnection, model: str) -> None:
        while not stop.is_set():
            status, body = await connection.call(request(model, rows(1)))
            assert status == 200, body

    tasks = [asyncio.ensure_future(caller(one, name)) for name, group in groups.items() for one in group]

    def enough() -> bool:
        used = sum(
            counted(node, name)["total_compute_seconds"] - before[name]["total_compute_seconds"] for name in groups
        )
        return used >= seconds_of_device

    await asyncio.get_running_loop().run_in_executor(None, until, "enough device time", enough, 60)
    stop.set()
    await asyncio.gather(*tasks)
    after = {name: counted(node, name) for name in groups}
    for group in groups.values():
        close_all(group)
    return {
        name: {
            "compute_s": after[name]["total_compute_seconds"] - before[name]["total_compute_seconds"],
            "runs": after[name]["dispatch_count"] - before[name]["dispatch_count"],
            "wait_p50_s": after[name]["queue_wait_p50_seconds"],
        }
        for name in groups
    }


@pytest.mark.parametrize("discipline", ["fair", pytest.param("fifo", marks=pytest.mark.slow)])
def test_bs_15_a_busy_model_does_not_starve_a_quiet_one(tmp_path: Path, discipline: str) -> None:
    """Two models of equal cost, 64 callers against 2.

    fair: the quiet one asks for at most every other run, and gets them. fifo promises the order of arrival alone: its
    requests come between those of the crowd, which fill far larger batches.
    """
    models = tmp_path / "models"
    for name in ("busy", "quiet"):
        add_slow(models, name, 15, [1, 8])
    settings = node_file(tmp_path, discipline=discipline, ema_halflife_seconds=1)
    with Node(models, tmp_path / "run", frontends=2, node_file=settings) as node:
        node.wait_full_strength()
        got = asyncio.run(contend(node, 2.5))
    mean_s = got["busy"]["compute_s"] / got["busy"]["runs"]
    share = got["quiet"]["compute_s"] / (got["quiet"]["compute_s"] + got["busy"]["compute_s"])
    if discipline == "fair":
        assert share > 0.4, got
        # About one run of the other model, and one of its own that was under way.
        assert got["quiet"]["wait_p50_s"] < 3 * mean_s, got
    else:
        assert 0 < share < 0.4, got
