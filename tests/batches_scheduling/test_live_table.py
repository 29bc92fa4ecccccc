"""The table of live calls that the processes of one machine share."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.batches.scheduling import live_file, live_table
from frontend.batches.scheduling.live_table import BOUNDS_S, MIN_ENTRIES, OTHERS, LiveTable, NoLiveTable

NOW_NS = 7
ROUTES = ("a", "b", "c")
WRITER = """
import sys
from pathlib import Path
from frontend.batches.scheduling.live_table import LiveTable
table = LiveTable(Path(sys.argv[1]), 1)
table.start()
for command in sys.stdin:
    route, live = command.split()
    table.set_live(route, int(live), 1)
    print("done", flush=True)
"""


@contextmanager
def opened(directory: Path, routes: int = 4) -> Iterator[LiveTable]:
    table = LiveTable(directory, routes)
    table.start()
    with closing(table):
        yield table


class Writer:
    """Another process with a slot of its own."""

    def __init__(self, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def set_live(self, route: str, live: int) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{route} {live}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 2), st.sampled_from(["set", "leave", "join"]), st.sampled_from(ROUTES), st.integers(0, 9)
        ),
        max_size=30,
    )
)
@settings(max_examples=60, deadline=None)
def test_rule_30_a_count_is_the_sum_over_those_who_are_there(
    steps: list[tuple[int, str, str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("table")
    expected: dict[int, dict[str, int]] = {}
    tables: dict[int, LiveTable] = {}
    with opened(directory) as reader, ExitStack() as stack:
        for who, what, route, live in steps:
            if what == "join" and who not in tables:
                tables[who] = LiveTable(directory, 4)
                tables[who].start()
                stack.callback(tables[who].close)
                expected[who] = {}
            elif what == "leave" and who in tables:
                tables.pop(who).close()
                del expected[who]
            elif what == "set" and who in tables:
                tables[who].set_live(route, live, NOW_NS)
                expected[who][route] = live
            sums = {name: sum(counts.get(name, 0) for counts in expected.values()) for name in ROUTES}
            assert {name: reader.live(name) for name in ROUTES} == sums
            assert reader.totals() == {name: count for name, count in sums.items() if count}
            assert reader.alone() == (not expected)


def test_rule_31_a_killed_process_stops_counting_at_once(tmp_path: Path) -> None:
    with opened(tmp_path) as reader, closing(Writer(tmp_path)) as one, closing(Writer(tmp_path)) as other:
        one.set_live("a", 3)
        other.set_live("a", 2)
        assert reader.live("a") == 5
        os.kill(one.process.pid, signal.SIGKILL)
        one.process.wait()
        assert reader.live("a") == 2
        assert reader.totals() == {"a": 2}


def test_rule_31_a_stopped_process_still_counts(tmp_path: Path) -> None:
    with opened(tmp_path) as reader, closing(Writer(tmp_path)) as one:
        one.set_live("a", 3)
        os.kill(one.process.pid, signal.SIGSTOP)
        # Its calls go on at the upstream, whatever it does itself.
        assert reader.live("a") == 3


def test_a_slot_starts_anew_with_its_next_owner(tmp_path: Path) -> None:
    with opened(tmp_path) as reader:
        with opened(tmp_path) as first:
            first.set_live("a", 3, NOW_NS)
        with opened(tmp_path) as second:
            assert reader.live("a") == 0
            second.set_live("b", 1, NOW_NS)
            assert (reader.live("a"), reader.live("b")) == (0, 1)


def test_routes_without_room_count_for_every_such_route(tmp_path: Path) -> None:
    with opened(tmp_path, 0) as writer, opened(tmp_path, 0) as reader:
        for number in range(MIN_ENTRIES - 1):
            writer.set_live(f"r{number}", 1, NOW_NS)
        writer.set_live("late", 2, NOW_NS)
        writer.set_live("later", 1, NOW_NS)
        assert reader.live("r5") == 1
        # More than there are: batches yield too often, never too seldom.
        assert (reader.live("late"), reader.live("later"), reader.live("unheard")) == (3, 3, 3)
        assert reader.totals()[OTHERS] == 3
        writer.set_live("late", 0, NOW_NS)
        assert reader.live("later") == 1
        writer.set_live("x" * 500, 4, NOW_NS)
        assert reader.live("x" * 500) == 5


def test_room_that_is_left_is_told_to_all(tmp_path: Path) -> None:
    with opened(tmp_path) as one, opened(tmp_path) as other:
        assert other.freed("a") == 0
        one.add_freed("a")
        one.set_live("a", 3, NOW_NS)
        other.add_freed("a")
        one.add_freed("b")
        assert (one.freed("a"), other.freed("a"), other.freed("b"), other.live("a")) == (2, 2, 1, 3)


def test_call_times_never_run_backwards(tmp_path: Path) -> None:
    with opened(tmp_path) as reader:
        with opened(tmp_path) as first:
            for seconds in (0.001, 0.005, 0.0051, 1.0, 1e6):
                first.observe("a", seconds)
            counts = reader.latency_counts("a")
            assert (sum(counts), counts[0], counts[1], counts[-1]) == (5, 2, 1, 1)
        assert reader.latency_counts("a") == counts
        with opened(tmp_path) as second:
            second.observe("a", 1.0)
            assert sum(reader.latency_counts("a")) == 6
            assert sum(reader.latency_counts("b")) == 0
    assert len(counts) == len(BOUNDS_S) + 1


def test_one_process_publishes_and_another_takes_over(tmp_path: Path) -> None:
    def asks(table: LiveTable, now_ns: int) -> bool:
        return table.to_publish(now_ns, 200, 2000, 2600)

    with opened(tmp_path) as other:
        with opened(tmp_path) as one:
            assert one.machine == other.machine
            one.set_live("a", 2, NOW_NS)
            assert asks(one, 10_000)
            assert one.publishing(10_000) == {"a": 2}
            assert not asks(one, 10_300), "nothing has changed"
            one.set_live("a", 1, NOW_NS)
            assert not asks(one, 10_100), "too soon"
            assert not asks(other, 10_300), "the one that did it lives"
            assert asks(one, 10_300)
            one.publishing(10_300)
            assert asks(one, 12_400), "a sign of life"
            assert not asks(other, 12_400)
            # It holds the lock and does nothing, as when it is stopped.
            assert asks(other, 13_000)
        assert asks(other, 12_400)


def test_a_damaged_table_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / live_file.FILE_NAME).write_bytes(b"x" * 100)
    with opened(tmp_path) as table:
        table.set_live("a", 1, NOW_NS)
        assert table.live("a") == 1


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoLiveTable, match="nowhere"):
        LiveTable(tmp_path / "nowhere", 1).start()


def test_a_full_table_says_so(tmp_path: Path) -> None:
    with ExitStack() as stack:
        for _ in range(live_table.SLOTS):
            stack.enter_context(opened(tmp_path))
        with pytest.raises(NoLiveTable, match="room for 128 processes"):
            LiveTable(tmp_path, 1).start()


def test_a_file_system_without_such_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bytes:
        raise OSError(errno.ENOLCK, "No locks available")

    table = LiveTable(tmp_path, 1)
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "fcntl", refuse)
        with pytest.raises(NoLiveTable, match="No locks available"):
            table.start()
    assert not table.is_open
    table.start()
    table.close()


def test_the_last_move_of_a_route_is_told_also_after_its_process(tmp_path: Path) -> None:
    with opened(tmp_path) as reader:
        with opened(tmp_path) as one, opened(tmp_path) as other:
            assert reader.moved_ns("a") is None
            one.set_live("a", 1, 5)
            other.set_live("a", 1, 9)
            one.set_live("b", 1, 12)
            assert (reader.moved_ns("a"), reader.moved_ns("b")) == (9, 12)
        assert reader.moved_ns("a") == 9
        assert reader.live("a") == 0


def test_tables_of_other_releases_go_with_their_last_process(tmp_path: Path) -> None:
    left, used = tmp_path / "live-1.table", tmp_path / "live-99.table"
    broken = tmp_path / f"{live_file.FILE_NAME}.0123456789abcdef"
    others = [tmp_path / name for name in ("live-x.table", "live-1.table.old", "node.sock")]
    for path in (left, used, broken, *others):
        path.write_bytes(bytes(8192))
    with used.open("rb+") as holder:
        # A slot in the middle: that process does not know the layout of this one, nor this one its.
        assert live_file.lock(holder.fileno(), 17)
        with opened(tmp_path):
            assert [path.exists() for path in (left, used, broken)] == [False, True, False]
    with opened(tmp_path) as table:
        assert not used.exists()
        assert all(path.exists() for path in others)
        with opened(tmp_path) as second:
            second.set_live("a", 2, NOW_NS)
            assert table.live("a") == 2


def test_what_cannot_be_removed_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / "live-1.table").mkdir()
    (tmp_path / "live-3.table").symlink_to(tmp_path / "elsewhere")
    with opened(tmp_path) as table:
        table.set_live("a", 1, NOW_NS)
        assert table.live("a") == 1
    assert (tmp_path / "live-1.table").exists()


def test_a_table_taken_for_left_over_while_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve, removed = os.posix_fallocate, []

    def remove_first(fd: int, offset: int, length: int) -> None:
        if not removed:
            (path,) = tmp_path.iterdir()
            path.unlink()
            removed.append(path)
        reserve(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", remove_first)
    with opened(tmp_path) as table:
        table.set_live("a", 1, NOW_NS)
        assert table.live("a") == 1
    assert removed and [path.name for path in tmp_path.iterdir()] == [live_file.FILE_NAME]
