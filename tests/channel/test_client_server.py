"""Both ends of a channel together: a real server in a thread, a real client on an event loop."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from pathlib import Path

import pytest
from channel_client import Frontend, frontend, run
from channel_worker import SETTINGS, EchoWorker, WorkerThread, echo_entry

from engines.errors import ArenaFull, Kind, NotFound, NotReady, QueueFull, TooLarge, Unavailable
from worker.channel import control_client
from worker.channel.client import Placement, Reply
from worker.channel.doorbell import Barrier
from worker.channel.messages import ModelEntry
from worker.channel.reception import Events
from worker.channel.records import NO_DEADLINE, Reason
from worker.channel.server import ChannelServer
from worker.config import ChannelSettings


@pytest.fixture
def socket_path(tmp_path: Path) -> str:
    return str(tmp_path / "worker.sock")


def test_a_request_comes_back_with_its_own_rows_and_figures(socket_path: str) -> None:
    async def main() -> None:
        async with frontend(socket_path) as one:
            assert (one.channel.state, one.entry.name) == ("attached", "echo")
            reply, seen = await one.infer(3, 41.0)
            assert seen == [42.0] * 3
            assert (reply.kind, reply.reason, reply.batch_size) == (Kind.OK, Reason.QUEUE_DRAINED, 8)
            assert (reply.queue_ns, reply.compute_ns, reply.batch_rows, reply.batch_requests) == (10, 20, 3, 1)
            assert (reply.finished_ns, reply.dispatch_seq, reply.text) == (30, 1, "")
            assert (one.channel.in_flight, one.channel.arena_bytes_used) == (0, 0)

    with WorkerThread(EchoWorker(socket_path)):
        run(main)


def test_many_requests_each_get_their_own_answer_over_many_turns_of_the_rings(socket_path: str) -> None:
    async def main() -> None:
        async with frontend(socket_path) as one:

            async def caller(number: int) -> None:
                for turn in range(60):
                    value = float(number * 1000 + turn)
                    reply, seen = await one.infer(turn % 5, value)
                    assert reply.kind is Kind.OK
                    assert seen == [value + 1] * (turn % 5)

            await asyncio.gather(*(caller(number) for number in range(16)))
            assert one.channel.late_replies == 0

    worker = EchoWorker(socket_path)
    with WorkerThread(worker):
        run(main)
    assert worker.served == 16 * 60


def test_several_frontends_share_a_worker_and_come_and_go(socket_path: str) -> None:
    async def main() -> None:
        async with frontend(socket_path) as stays:
            for turn in range(3 * SETTINGS.max_channels):
                async with frontend(socket_path) as leaves:
                    (_, mine), (_, yours) = await asyncio.gather(leaves.infer(1, turn), stays.infer(1, -turn))
                    assert (mine, yours) == ([turn + 1], [-turn + 1])

    worker = EchoWorker(socket_path)
    with WorkerThread(worker):
        run(main)
    assert len(worker.attached) == len(worker.detached) == 3 * SETTINGS.max_channels + 1


def test_failures_carry_their_kind_and_text(socket_path: str) -> None:
    worker = EchoWorker(socket_path)
    worker.fail_with = "node 'relu_1' said no: ü" + "x" * 2000

    async def main() -> None:
        async with frontend(socket_path) as one:
            reply, _ = await one.infer(1, 0)
            assert (reply.kind, reply.queue_ns) == (Kind.ENGINE_FAILED, 5)
            assert reply.text.startswith("node 'relu_1' said no: ü")
            assert len(reply.text.encode()) <= 1016

    with WorkerThread(worker):
        run(main)


def test_limits_refuse_at_once_and_say_which(socket_path: str) -> None:
    worker = EchoWorker(socket_path)
    worker.hold = True

    async def main() -> None:
        async with frontend(socket_path) as one:
            with pytest.raises(TooLarge, match=r"the limit global.channel.arena_bytes is 4194304"):
                one.channel.place(one.entry, 0, 1 << 16)
            big = one.channel.place(one.entry, 0, 7000)
            with pytest.raises(ArenaFull, match="arena_bytes = 4194304"):
                one.channel.place(one.entry, 0, 7000)
            big.release()
            placed = [one.channel.place(one.entry, 0, 1) for _ in range(SETTINGS.max_in_flight)]
            with pytest.raises(QueueFull, match=r"the limit global.channel.max_in_flight is 64"):
                one.channel.place(one.entry, 0, 1)
            placed[0].release()
            one.channel.place(one.entry, 0, 1).release()
            for placement in placed[1:]:
                placement.release()
            assert one.channel.arena_bytes_used == 0

    with WorkerThread(worker):
        run(main)


def test_the_ring_holds_every_request_and_its_cancel(socket_path: str) -> None:
    worker = EchoWorker(socket_path)
    worker.hold = True

    async def main() -> None:
        async with frontend(socket_path) as one:
            placed = [one.channel.place(one.entry, 0, 1) for _ in range(SETTINGS.max_in_flight)]
            ids = [one.channel.submit(placement, NO_DEADLINE, 1, lambda *_: None) for placement in placed]
            assert all(one.channel.cancel(request_id) for request_id in ids)
            assert not any(one.channel.cancel(request_id) for request_id in ids)
            assert one.channel.in_flight == SETTINGS.max_in_flight
            # The answer proves that the worker has read what was pushed before.
            await one.channel.ask("anything")
            while worker.cancels < SETTINGS.max_in_flight:
                await one.channel.ask("anything")
            assert worker.attached[0].in_flight == SETTINGS.max_in_flight

    with WorkerThread(worker):
        run(main)


def test_sm_07_late_answers_are_counted_and_their_rows_come_back(socket_path: str) -> None:
    async def main() -> None:
        async with frontend(socket_path) as one:
            called: list[Reply] = []
            for _ in range(5):
                placement = one.channel.place(one.entry, 0, 2)
                request_id = one.channel.submit(placement, NO_DEADLINE, 1, lambda _, reply: called.append(reply))
                one.channel.abandon(request_id)
            released_early = one.channel.place(one.entry, 0, 2)
            one.channel.submit(released_early, NO_DEADLINE, 1, lambda _, reply: called.append(reply))
            released_early.release()
            assert one.channel.arena_bytes_used > 0
            reply, seen = await one.infer(1, 1.0)
            assert (reply.kind, seen) == (Kind.OK, [2.0])
            while one.channel.in_flight:
                await one.infer(1, 1.0)
            assert (one.channel.late_replies, called) == (6, [])
            assert one.channel.arena_bytes_used == 0

    with WorkerThread(EchoWorker(socket_path)):
        run(main)


def test_a_callback_that_raises_costs_the_others_nothing(socket_path: str, caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: Placement, __: Reply) -> None:
        raise RuntimeError("a caller's mistake")

    async def main() -> None:
        async with frontend(socket_path) as one:
            futures = []
            for number in range(10):
                placement = one.channel.place(one.entry, 0, 1)
                if number % 2:
                    one.channel.submit(placement, NO_DEADLINE, 1, broken)
                else:
                    futures.append(one.reply_to(placement))
            assert [reply.kind for reply in await asyncio.gather(*futures)] == [Kind.OK] * 5
            reply, _ = await one.infer(1, 0)
            assert reply.kind is Kind.OK

    with WorkerThread(EchoWorker(socket_path)):
        run(main)
    assert caplog.text.count("channel.callback_failed") == 5


def test_questions_get_their_answer_or_its_error(socket_path: str) -> None:
    async def main() -> None:
        async with frontend(socket_path) as one:
            answers = await asyncio.gather(*(one.channel.ask("status", number=number) for number in range(20)))
            assert answers == [{"what": "status", "args": {"number": number}} for number in range(20)]
            with pytest.raises(NotFound, match="no such thing"):
                await one.channel.ask("fail")
            loop = asyncio.get_running_loop()
            assert await loop.run_in_executor(None, lambda: control_client.ask(socket_path, "status", 10.0, a=1)) == {
                "what": "status",
                "args": {"a": 1},
            }
            with pytest.raises(NotFound, match="no such thing"):
                await loop.run_in_executor(None, lambda: control_client.ask(socket_path, "fail", 10.0))

    with WorkerThread(EchoWorker(socket_path)):
        run(main)


def test_the_control_client_says_that_nobody_listens(socket_path: str) -> None:
    with pytest.raises(Unavailable, match="no worker answers"):
        control_client.ask(socket_path, "status", 1.0)


def test_an_entry_of_another_worker_or_an_unloaded_model_is_not_placed(socket_path: str) -> None:
    async def main() -> None:
        async with frontend(socket_path) as one:
            with pytest.raises(NotReady, match="'other' version 1 was unloaded or its worker restarted"):
                one.channel.place(echo_entry(name="other"), 0, 1)
            with pytest.raises(NotReady, match="was unloaded"):
                one.channel.place(echo_entry(width=2), 0, 1)
            with pytest.raises(NotReady, match="'echo' version 1 is LOADING: soon"):
                one.channel.place(
                    ModelEntry(model_id=1, name="echo", version="1", state="LOADING", reason="soon"), 0, 1
                )
            # An equal entry that was decoded another time is the same model.
            one.channel.place(echo_entry(), 0, 1).release()

    with WorkerThread(EchoWorker(socket_path)):
        run(main)


def test_a_draining_worker_takes_no_more_and_answers_what_it_has(socket_path: str) -> None:
    async def main() -> None:
        async with frontend(socket_path) as one:
            placement = one.channel.place(one.entry, 0, 1)
            await one.channel.ask("drain")
            await one.until(lambda: one.channel.state == "draining")
            with pytest.raises(Unavailable, match="draining"):
                one.channel.place(one.entry, 0, 1)
            assert (await one.reply_to(placement)).kind is Kind.OK
            placement.release()

    with WorkerThread(EchoWorker(socket_path)):
        run(main)


def test_after_a_restart_everything_in_flight_fails_and_the_channel_attaches_again(socket_path: str) -> None:
    async def main() -> None:
        first = WorkerThread(EchoWorker(socket_path, generation=1))
        first.worker.hold = True
        first.__enter__()
        async with frontend(socket_path) as one:
            placed = [one.channel.place(one.entry, 0, 1) for _ in range(5)]
            futures = [one.reply_to(placement) for placement in placed]
            asking = asyncio.ensure_future(one.channel.ask("status"))
            await asking
            unsubmitted = one.channel.place(one.entry, 0, 1)
            await asyncio.get_running_loop().run_in_executor(None, first.__exit__, None, None, None)
            replies = await asyncio.gather(*futures)
            assert [reply.kind for reply in replies] == [Kind.UNAVAILABLE] * 5
            assert "gone" in replies[0].text
            for placement in placed:
                placement.release()
            with pytest.raises(Unavailable):
                one.channel.submit(unsubmitted, NO_DEADLINE, 1, lambda *_: None)
            unsubmitted.release()
            with WorkerThread(EchoWorker(socket_path, generation=2)):
                await one.until(lambda: one.states.count("attached") == 2)
                reply, seen = await one.infer(2, 1.0)
                assert (reply.kind, seen) == (Kind.OK, [2.0, 2.0])
            assert one.states[:3] == ["attached", "connecting", "attached"]
        assert one.states[-1] == "closed"

    run(main)


def test_the_channel_waits_for_a_worker_that_is_not_there_yet(socket_path: str) -> None:
    async def main() -> None:
        one = Frontend(socket_path)
        starting = asyncio.ensure_future(one.channel.start())
        await asyncio.sleep(0)
        with pytest.raises(Unavailable):
            one.channel.place(echo_entry(), 0, 1)
        with WorkerThread(EchoWorker(socket_path)):
            await starting
            assert (await one.infer(1, 0))[0].kind is Kind.OK
            await one.channel.close()
            await one.channel.close()
        assert one.states == ["attached", "closed"]

    run(main)


def test_nothing_is_left_open(socket_path: str) -> None:
    async def main() -> None:
        async with frontend(socket_path) as one:
            await one.infer(1, 0)

    def once() -> None:
        with WorkerThread(EchoWorker(socket_path)):
            run(main)

    once()
    gc.collect()
    before = sorted(os.listdir("/proc/self/fd"))
    once()
    gc.collect()
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert not os.path.exists(socket_path)


def test_an_unloaded_model_gives_its_blocks_back(socket_path: str) -> None:
    async def main() -> None:
        async with frontend(socket_path) as one:
            old = one.entry
            placement = one.channel.place(old, 0, 1)
            await one.channel.ask("unload")
            await one.until(lambda: len(one.models) == 2)
            with pytest.raises(NotReady, match="'echo' version 1 was unloaded"):
                one.channel.place(old, 0, 1)
            arena = placement.attachment.arena
            assert (arena.statistics().lanes, arena.statistics().blocks) == (0, 1)
            placement.release()
            assert arena.statistics().bytes_free == arena.arena_bytes

    with WorkerThread(EchoWorker(socket_path)):
        run(main)


def test_more_failures_at_once_than_texts_still_tell_the_kind(socket_path: str) -> None:
    settings = ChannelSettings(arena_bytes=4 << 20, max_in_flight=256, max_channels=1)
    worker = EchoWorker(socket_path, settings=settings)
    worker.fail_with = "no"

    async def main() -> None:
        async with frontend(socket_path, settings) as one:
            futures = [one.reply_to(one.channel.place(one.entry, 0, 1)) for _ in range(256)]
            replies = await asyncio.gather(*futures)
            assert {reply.kind for reply in replies} == {Kind.ENGINE_FAILED}
            texts = {reply.text for reply in replies}
            assert texts <= {"no", "engine failed (too many failures at once to keep each one's text)"}
            assert "no" in texts

    with WorkerThread(worker):
        run(main)


def test_a_short_poll_ends_in_time_and_a_look_does_not_wait(socket_path: str) -> None:
    server = ChannelServer(socket_path, SETTINGS, 1)
    server.open()
    try:
        began_ns = time.monotonic_ns()
        assert server.poll(0) == Events()
        assert server.poll(300_000) == Events()
        assert time.monotonic_ns() - began_ns >= 300_000
    finally:
        server.close()


def test_without_membarrier_the_channel_works_by_ringing_always(
    socket_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Barrier, "start", lambda _: None)

    async def main() -> None:
        async with frontend(socket_path) as one:
            for turn in range(300):
                reply, seen = await one.infer(1, turn)
                assert (reply.kind, seen) == (Kind.OK, [turn + 1])

    with WorkerThread(EchoWorker(socket_path)):
        run(main)
