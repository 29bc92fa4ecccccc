"""A sleeping worker is woken once per turn of the loop, or after a few records, but always."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from channel_client import Frontend, frontend, run
from channel_worker import EchoWorker, WorkerThread

from worker.channel.attachment import MAX_UNANNOUNCED
from worker.channel.doorbell import Bell

pytestmark = pytest.mark.interpreted


class Rings:
    """Counts rings; the worker is said to sleep, whatever it does."""

    wanted = True

    def __init__(self, bell: Bell) -> None:
        self.count = 0
        self._bell = bell

    def ring_if_asleep(self) -> None:
        self.count += 1
        self._bell.ring_if_asleep()


def counted(one: Frontend) -> Rings:
    attachment = one.channel._attachment
    assert attachment is not None
    rings = Rings(attachment._bell)
    attachment._bell = rings  # type: ignore[assignment]
    return rings


@pytest.fixture
def socket_path(tmp_path: Path) -> str:
    return str(tmp_path / "worker.sock")


@pytest.mark.parametrize("requests", [1, 2, MAX_UNANNOUNCED - 1, MAX_UNANNOUNCED, 3 * MAX_UNANNOUNCED + 1])
def test_one_ring_per_turn_or_per_few_records(socket_path: str, requests: int) -> None:
    async def main() -> None:
        async with frontend(socket_path) as one:
            rings = counted(one)
            placements = [one.channel.place(one.entry, 0, 1) for _ in range(requests)]
            replies = [one.reply_to(placement) for placement in placements]
            assert rings.count == requests // MAX_UNANNOUNCED
            await asyncio.gather(*replies)
            assert rings.count == -(-requests // MAX_UNANNOUNCED)
            for placement in placements:
                placement.release()

    with WorkerThread(EchoWorker(socket_path)):
        run(main)


def test_nothing_is_rung_for_a_worker_that_is_gone(socket_path: str) -> None:
    async def main() -> None:
        async with frontend(socket_path) as one:
            rings = counted(one)
            placement = one.channel.place(one.entry, 0, 1)
            reply = one.reply_to(placement)
            assert one.channel._attachment is not None
            one.channel._attachment.fail_all("gone")
            await asyncio.sleep(0)
            assert rings.count == 0
            assert (await reply).text == "gone"
            placement.release()

    with WorkerThread(EchoWorker(socket_path)):
        run(main)
