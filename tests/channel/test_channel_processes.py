"""Real processes, killed at bad moments: nothing torn, nothing lost, nothing left."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop
from channel_worker import SETTINGS

from engines.errors import Kind
from worker.channel import control_client
from worker.channel.client import Placement, Reply, WorkerChannel
from worker.channel.layout import WORKER_PAGE_BYTES, SegmentLayout
from worker.channel.messages import ModelEntry
from worker.channel.records import NO_DEADLINE, RECORD_WORDS
from worker.channel.ring import Consumer, Producer, record_block
from worker.channel.segment import NoSharedMemory, Segment, WorkerPage, reserve

pytestmark = pytest.mark.process

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{HERE}", "PYTHONUNBUFFERED": "1"}
Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def socket_path(tmp_path: Path) -> str:
    return str(tmp_path / "worker.sock")


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Start one of the scripts beside this file; whatever still runs at the end is killed."""
    children: list[subprocess.Popen[str]] = []

    def start(script: str, *arguments: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        command = [*prefix, sys.executable, str(HERE / script), *arguments]
        child = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


@pytest.fixture(autouse=True)
def nothing_new_in_dev_shm() -> Iterator[None]:
    def ours() -> set[str]:
        return {name for name in os.listdir("/dev/shm") if name.startswith("ringserve-")}

    before = ours()
    yield
    assert ours() <= before


def line_of(child: subprocess.Popen[str], start: str) -> str:
    """Return the child's next line that starts so; its end is a failure."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith(start):
            return line.strip()
    raise AssertionError(f"{child.args} ended with {child.wait()} before it said {start!r}")


def worker_at(spawn: Spawn, socket_path: str, generation: int, *options: str) -> subprocess.Popen[str]:
    child = spawn("channel_worker.py", socket_path, str(generation), *options)
    line_of(child, "ready")
    return child


def push_for_ever(page: WorkerPage, segment: Segment) -> None:
    """Publish records whose words all tell their position, one by one and in bulk."""
    producer = Producer(segment.request_ring(page.request_tail(0)))
    consumed = segment.words
    while True:
        seq = producer.published
        if seq - consumed[8] > segment.layout.capacity - 8:
            continue
        producer.push((seq,) * RECORD_WORDS)  # type: ignore[arg-type]
        producer.publish(record_block([(seq + more,) * RECORD_WORDS for more in range(1, 4)]))  # type: ignore[misc]


def test_a_producer_killed_at_any_instant_leaves_no_torn_record() -> None:
    layout = SegmentLayout.of(16, 4096)
    segment_fd, page_fd = reserve(layout.segment_bytes), reserve(WORKER_PAGE_BYTES)
    page, segment = WorkerPage(page_fd), Segment(segment_fd, layout)
    consumer = Consumer(segment.request_ring(page.request_tail(0)))
    seed = random.randrange(1 << 32)
    instants = random.Random(seed)
    expected = 0
    for _ in range(40):
        pid = os.fork()
        if pid == 0:
            try:
                push_for_ever(page, segment)
            finally:
                os._exit(1)
        quota = expected + instants.randrange(1, 600)
        killed = False
        while True:
            waiting = consumer.waiting()
            for words in consumer.take().tolist():
                assert words == [expected] * RECORD_WORDS, f"{seed=}"
                expected += 1
            if killed and not waiting:
                break
            if not killed and expected >= quota:
                os.kill(pid, signal.SIGKILL)
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
                killed = True
    assert expected > 40
    os.close(segment_fd)
    os.close(page_fd)


def test_sm_06_a_killed_worker_fails_everything_in_flight_and_the_next_one_serves(
    spawn: Spawn, socket_path: str
) -> None:
    async def main() -> None:
        models: list[list[ModelEntry]] = []
        attached = asyncio.Event()

        def on_state(state: str) -> None:
            if state == "attached":
                attached.set()

        channel = WorkerChannel(socket_path, "test", SETTINGS, models.append, on_state)
        loop = asyncio.get_running_loop()

        def submit(placement: Placement) -> asyncio.Future[Reply]:
            future: asyncio.Future[Reply] = loop.create_future()
            channel.submit(placement, NO_DEADLINE, 1, lambda _, reply: future.set_result(reply))
            return future

        first = worker_at(spawn, socket_path, 1, "hold")
        async with asyncio.timeout(60):
            await channel.start()
            placements = [channel.place(models[-1][0], 0, 1) for _ in range(50)]
            futures = [submit(placement) for placement in placements]
            await loop.run_in_executor(None, line_of, first, "holding 50")
            attached.clear()
            first.kill()
            replies = await asyncio.gather(*futures)
            assert {reply.kind for reply in replies} == {Kind.UNAVAILABLE}
            assert channel.in_flight == 0
            for placement in placements:
                placement.release()
            await loop.run_in_executor(None, worker_at, spawn, socket_path, 2)
            await attached.wait()
            placement = channel.place(models[-1][0], 0, 4)
            placement.inputs[0][:] = 1.0
            assert (await submit(placement)).kind is Kind.OK
            assert (placement.outputs()[0] == 2.0).all()
            placement.release()
            assert channel.arena_bytes_used == 0
        await channel.close()

    uvloop.run(main())


def test_killed_frontends_are_detached_once_and_cost_the_others_nothing(spawn: Spawn, socket_path: str) -> None:
    worker = worker_at(spawn, socket_path, 1)
    arena = str(SETTINGS.arena_bytes)
    stays = spawn("channel_frontend.py", socket_path, "stays", "load", arena)
    line_of(stays, "ok")
    line_of(worker, "attached 0 stays")
    seed = random.randrange(1 << 32)
    instants = random.Random(seed)
    for number in range(6):
        name = f"leaves{number}"
        leaves = spawn("channel_frontend.py", socket_path, name, "load", arena)
        for _ in range(instants.randrange(1, 6)):
            line_of(leaves, "ok")
        line_of(worker, f"attached 1 {name}")
        leaves.kill()
        # The same id each time: the last one was given back. A second report would come before the next attach.
        assert line_of(worker, "").startswith(f"detached 1 {name}"), f"{seed=}"
        line_of(stays, "ok")
    assert stays.poll() is None
    assert control_client.ask(socket_path, "status", 30.0)["what"] == "status"


def test_a_killed_frontend_is_detached_with_what_it_had_in_flight(spawn: Spawn, socket_path: str) -> None:
    worker = worker_at(spawn, socket_path, 1, "hold")
    frontend = spawn("channel_frontend.py", socket_path, "waits", "wait", str(SETTINGS.arena_bytes))
    line_of(frontend, "submitted")
    line_of(worker, "holding 5")
    frontend.kill()
    assert line_of(worker, "detached") == "detached 0 waits 5"


def test_sm_04_a_frontend_that_cannot_map_fails_clearly_and_leaves_others_alone(spawn: Spawn, socket_path: str) -> None:
    worker_at(spawn, socket_path, 1)
    stays = spawn("channel_frontend.py", socket_path, "stays", "load", str(SETTINGS.arena_bytes))
    line_of(stays, "ok")
    tight = spawn("channel_frontend.py", socket_path, "tight", "tight", str(256 << 20))
    assert "cannot map" in line_of(tight, "NoSharedMemory")
    assert tight.wait() == 3
    line_of(stays, "ok")
    assert stays.poll() is None


def test_sm_04_a_worker_that_cannot_map_refuses_that_frontend_only(spawn: Spawn, socket_path: str) -> None:
    worker_at(spawn, socket_path, 1, "tight")
    stays = spawn("channel_frontend.py", socket_path, "stays", "load", str(SETTINGS.arena_bytes))
    line_of(stays, "ok")
    large = spawn("channel_frontend.py", socket_path, "large", "load", str(256 << 20))
    assert "refused to attach: cannot map" in line_of(large, "AttachRefused")
    assert large.wait() == 3
    line_of(stays, "ok")


def test_sm_11_more_than_the_machine_has_is_refused_with_both_numbers() -> None:
    with pytest.raises(NoSharedMemory, match=r"needs 1099511627776 bytes .* /dev/shm has \d+ available, .*arena_bytes"):
        reserve(1 << 40)


def test_sm_11_a_small_dev_shm_is_not_used_beyond_its_size(spawn: Spawn, socket_path: str) -> None:
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-m", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to make a mount namespace")
    worker_at(spawn, socket_path, 1)
    # 16 MiB of /dev/shm, a 64 MiB arena: served from a memfd, of which nothing lies there.
    mount = 'mount -t tmpfs -o size=16m tmpfs /dev/shm && exec "$@"'
    prefix = (unshare, "-m", "sh", "-c", mount, "sh")
    frontend = spawn("channel_frontend.py", socket_path, "small", "load", str(64 << 20), prefix=prefix)
    line_of(frontend, "ok")
