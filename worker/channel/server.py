"""The worker's end of all channels: waiting for anything to happen, and telling which ring has work.

Theory
    ``poll`` is the only place that waits. It looks at the request tails, which all lie in one page, spins a little, and
    then sleeps in epoll by the doorbell protocol. While work keeps coming it looks at the sockets only every
    ``control_interval_ns``, so that a busy worker pays one read of the page per turn and nothing else.

    Spinning adapts: it is cut in half each time nothing came, down to a sixteenth, and is whole again as soon as it
    paid off or a sleep turns out to have been shorter than a whole spin. After a long execution it may last twice as
    long: the device, which waits too, is worth more than the processor then, and frontends need less of that.

    Resting is sleep that no record ends, so nobody rings for one: for a caller who could do nothing with it yet.
    Watched descriptors and sockets still end it.
"""

from __future__ import annotations

import os
import select
import time
from typing import Final

from engines.errors import Kind
from worker.channel import attach, frames
from worker.channel.channel import Channel
from worker.channel.doorbell import Barrier, Sleeper, answer_doorbell, open_doorbell
from worker.channel.layout import WORKER_PAGE_BYTES
from worker.channel.messages import MAX_FRAME_BYTES, Answer, Draining, ModelEntry, Models
from worker.channel.reception import Connection, Events, Reception
from worker.channel.ring import require_ordered_machine
from worker.channel.segment import WorkerPage, reserve
from worker.channel.table import ChannelTable
from worker.config import ChannelSettings

CONTROL_INTERVAL_NS: Final = 5_000_000
_MOST_CUTS: Final = 4
_SPINS_PER_EXECUTION: Final = 5
"""An execution of this many spins doubles them. (Spins of 100 and of 200 us, alternated, two cores, 64 callers: where a
batch takes 30 us, a p99 of 2.4 against 4.3 ms at the same rate, and 1.1 times the requests beside other load; where it
takes 2 ms, there 0.95 times the requests.)"""
_COARSE_TIMEOUT_NS: Final = 20_000_000
"""From here on epoll's whole milliseconds are exact enough."""
_SELECTABLE_FDS: Final = 1024
"""select takes no descriptor from here on."""
_NOTHING: Final = Events()


class ChannelServer:
    """Listener, channels and doorbell of one worker; used by one thread.

    Args:
        control_interval_ns: how often sockets are looked at while the rings keep the worker busy.
    """

    def __init__(
        self,
        socket_path: str,
        settings: ChannelSettings,
        generation: int,
        control_interval_ns: int = CONTROL_INTERVAL_NS,
    ) -> None:
        self._socket_path = socket_path
        self._settings = settings
        self._generation = generation
        self._control_interval_ns = control_interval_ns
        self._longest_spin_ns = settings.worker_spin_us * 1000
        self._cuts = 0
        self._sockets_seen_ns = 0
        self._watched: set[int] = set()

    def open(self) -> None:
        """Make page and doorbell and listen.

        Raises:
            AlreadyExists: another process listens on the socket.
            InvalidInput: the socket's path is too long for the system.
            UnsupportedMachine: see ``ring``.
            NoSharedMemory: not even a page.
        """
        require_ordered_machine()
        barrier = Barrier()
        barrier.start()
        listener = attach.listen(self._socket_path)
        self._page_fd = reserve(WORKER_PAGE_BYTES)
        page = WorkerPage(self._page_fd)
        page.initialise(self._generation)
        self._sleeper = Sleeper(page.worker_sleeping, barrier)
        self._sleeper.start()
        self._doorbell = open_doorbell()
        self._epoll = select.epoll()
        self._epoll.register(self._doorbell, select.EPOLLIN)
        self._table = ChannelTable(page, self._settings.max_channels)
        self._reception = Reception(
            listener,
            self._epoll,
            self._table,
            page,
            (self._page_fd, self._doorbell),
            self._settings,
            self._generation,
            barrier,
        )

    def close(self) -> None:
        """Cut everybody off and give everything back; channels that are not released stay mapped until they are."""
        self._reception.close()
        attach.stop_listening(self._reception.listener, self._socket_path)
        self._epoll.close()
        os.close(self._doorbell)
        os.close(self._page_fd)

    def watch(self, fd: int) -> None:
        """Report ``fd`` in ``Events.fds`` whenever it is readable; it stays the caller's."""
        self._watched.add(fd)
        self._epoll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        """Undo ``watch``; call it before closing ``fd``."""
        self._watched.discard(fd)
        self._epoll.unregister(fd)

    def poll(self, timeout_ns: int, rest_ns: int = 0, *, spin: bool = True, executed_ns: int = 0) -> Events:
        """Return what happened; waits until something happens or any ring has work.

        The events are the caller's to read, not to change.

        Args:
            timeout_ns: 0 looks and returns; negative waits without limit.
            rest_ns: how long records may wait, because nothing could be done with them; what is watched still ends it.
            spin: whether to look for a while before sleeping; another thread of this process would wait meanwhile.
            executed_ns: how long the last execution took.
        """
        now_ns = time.monotonic_ns()
        if self._reception.has_news:
            return self._look_at_sockets(now_ns)
        if rest_ns > 0 and timeout_ns:
            return self._rest(rest_ns if timeout_ns < 0 else min(rest_ns, timeout_ns))
        ready = timeout_ns == 0 or self._table.has_work()
        if ready and now_ns - self._sockets_seen_ns >= self._control_interval_ns:
            return self._look_at_sockets(now_ns)
        if ready or (spin and self._spin(now_ns, timeout_ns, executed_ns)):
            return _NOTHING
        return self._sleep(now_ns, timeout_ns)

    def rung(self) -> list[Channel]:
        """Return the channels with unread records; they are told again until they are taken."""
        return self._table.rung()

    def publish_models(self, models: list[ModelEntry]) -> None:
        """Send the model table to every frontend, and to those that attach later.

        Raises:
            InvalidInput: the table is larger than a frame.
        """
        payload = frames.encode(Models(models=models))
        attach.check_payload_bytes(payload, "the model table")
        self._reception.models = models
        self._reception.tell_channels(payload)

    def draining(self) -> None:
        """Tell every frontend to send no more; later ones are refused."""
        self._reception.is_draining = True
        self._reception.tell_channels(frames.encode(Draining()))

    def answer(self, connection: Connection, answer: Answer) -> None:
        """Send an Answer without blocking; dropped if the connection has ended."""
        payload = frames.encode(answer)
        if len(payload) > MAX_FRAME_BYTES:
            text = f"the answer has {len(payload)} bytes, a frame holds {MAX_FRAME_BYTES}"
            payload = frames.encode(Answer(id=answer.id, kind=int(Kind.TOO_LARGE), text=text))
        self._reception.send(connection, payload)

    def _spin(self, now_ns: int, timeout_ns: int, executed_ns: int) -> bool:
        """Look at the tails for a while; return whether one moved."""
        spin_ns = self._longest_spin_ns
        if spin_ns == 0:
            return False
        spin_ns = min(max(spin_ns, executed_ns // _SPINS_PER_EXECUTION), 2 * spin_ns) >> self._cuts
        if 0 <= timeout_ns < spin_ns:
            spin_ns = timeout_ns
        end_ns = now_ns + spin_ns
        while time.monotonic_ns() < end_ns:
            if self._table.has_work():
                self._cuts = 0
                return True
        self._cuts = min(self._cuts + 1, _MOST_CUTS)
        return False

    def _rest(self, rest_ns: int) -> Events:
        if self._epoll.fileno() < _SELECTABLE_FDS:
            select.select([self._epoll], [], [], rest_ns / 1e9)
        else:
            time.sleep(rest_ns / 1e9)
        return self._look_at_sockets(time.monotonic_ns())

    def _sleep(self, began_ns: int, timeout_ns: int) -> Events:
        self._sleeper.lie_down()
        # The doorbell protocol's second look: whoever published before the flag was visible did not ring.
        if self._table.has_work():
            self._sleeper.get_up()
            return _NOTHING
        asleep_ns = time.monotonic_ns()
        if timeout_ns < 0:
            ready = self._epoll.poll()
        else:
            left_ns = max(began_ns + timeout_ns - asleep_ns, 0)
            if left_ns < _COARSE_TIMEOUT_NS and self._epoll.fileno() < _SELECTABLE_FDS:
                # select counts microseconds, epoll_wait whole milliseconds: a batching delay may be shorter than one.
                select.select([self._epoll], [], [], left_ns / 1e9)
                left_ns = 0
            ready = self._epoll.poll(left_ns / 1e9)
        self._sleeper.get_up()
        now_ns = time.monotonic_ns()
        if now_ns - asleep_ns < self._longest_spin_ns:
            self._cuts = 0
        return self._sort(ready, now_ns)

    def _look_at_sockets(self, now_ns: int) -> Events:
        return self._sort(self._epoll.poll(0), now_ns)

    def _sort(self, ready: list[tuple[int, int]], now_ns: int) -> Events:
        self._sockets_seen_ns = now_ns
        fds: list[int] = []
        for fd, mask in ready:
            if fd == self._doorbell:
                answer_doorbell(fd)
            elif fd in self._watched:
                fds.append(fd)
            else:
                self._reception.handle(fd, mask, now_ns)
        if not fds and not self._reception.has_news:
            return _NOTHING
        return self._reception.take_news(fds)
