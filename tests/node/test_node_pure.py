"""The node's decisions without processes: back-off, hangs, readiness, log lines, the link's lines, ports, tables."""

from __future__ import annotations

import itertools
import os
import resource
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.node import ports
from frontend.node.hang_state import STALL_NS, Watch, hang_reason, stall_reason
from frontend.node.node_state import Condition, verdict
from frontend.node.output import MAX_LINE_BYTES, Prefixer
from frontend.node.restart_state import (
    BASE_DELAY_NS,
    MAX_HISTORY,
    MAX_LOSS_DELAY_NS,
    MAX_START_DELAY_NS,
    STABLE_NS,
    Life,
    next_restart,
)
from frontend.node.run_dir import RunDir, RunDirError
from frontend.node.status import Answer, NodeStatus, ProcessStatus, status_text
from worker.channel.node_link import MAX_PENDING_BYTES, Lines, LinkError, ModelStatus, Order, Report, State, SyncLink
from worker.channel.node_link import encode as encode_line
from worker.channel.pulse import Pulse, create_pulse

S = 1_000_000_000


def lives(*kinds: str) -> list[Life]:
    """Return lives that follow each other: ``f`` failed to start, ``l`` was lost early, ``g`` was up for long."""
    found, now_ns = [], 0
    for kind in "".join(kinds):
        up_ns = None if kind == "f" else now_ns + S
        end_ns = now_ns + 2 * S if kind != "g" else now_ns + S + STABLE_NS
        found.append(Life(now_ns, up_ns, end_ns))
        now_ns = end_ns
    return found


@pytest.mark.parametrize(
    ("history", "delay_ns"),
    [
        ("", 0),
        ("g", 0),
        ("fffg", 0),
        ("f", BASE_DELAY_NS),
        ("fff", 4 * BASE_DELAY_NS),
        ("gfff", 4 * BASE_DELAY_NS),
        ("lff", 2 * BASE_DELAY_NS),
        ("f" * MAX_HISTORY, MAX_START_DELAY_NS),
        ("l", BASE_DELAY_NS),
        ("ll", 2 * BASE_DELAY_NS),
        ("ffl", BASE_DELAY_NS),
        ("l" * MAX_HISTORY, MAX_LOSS_DELAY_NS),
    ],
)
def test_restart_delays(history: str, delay_ns: int) -> None:
    past = lives(history)
    end_ns = past[-1].ended_ns if past else 7
    assert next_restart(past, end_ns) == end_ns + delay_ns


@given(st.lists(st.sampled_from("flg"), max_size=MAX_HISTORY), st.integers(0, 1000 * S))
def test_a_restart_is_never_in_the_past_and_never_later_than_the_limit(kinds: list[str], later_ns: int) -> None:
    past = lives(*kinds)
    now_ns = (past[-1].ended_ns if past else 0) + later_ns
    assert now_ns <= next_restart(past, now_ns) <= now_ns + MAX_START_DELAY_NS


@pytest.mark.parametrize(
    ("executing_ns", "beat_ns", "runnable_ns", "hangs"),
    [
        (0, 0, 0, False),  # nothing is judged
        (0, 99 * S, 0, False),
        (39 * S, 99 * S, 0, True),  # the loop is alive, the device is not
        (41 * S, 99 * S, 0, False),
        (0, 39 * S, 0, True),
        (39 * S, 39 * S, 50 * S, False),  # stopped until 50 s: its time counts from there
        (39 * S, 39 * S, 39 * S, True),
    ],
)
def test_rule_24_what_counts_as_hanging(executing_ns: int, beat_ns: int, runnable_ns: int, hangs: bool) -> None:
    reason = hang_reason(executing_ns, beat_ns, runnable_ns, 100 * S, 60 * S)
    assert (reason is not None) is hangs
    assert reason is None or "limit 60.0 s" in reason


def test_a_stopped_process_and_a_watcher_that_could_not_run_start_the_time_anew() -> None:
    watch = Watch(0, 0)
    watch.look(1 * S, stopped=False)
    assert watch.runnable_since_ns == 0
    watch.look(2 * S, stopped=True)
    assert watch.runnable_since_ns == 2 * S
    watch.look(3 * S, stopped=False)
    assert watch.runnable_since_ns == 2 * S
    watch.look(90 * S, stopped=False)
    assert watch.runnable_since_ns == 90 * S


def test_rule_24_a_short_dispatch_timeout_does_not_kill_a_loop_that_beats_once_a_second() -> None:
    assert hang_reason(0, 98 * S, 0, 100 * S, S // 2) is None
    assert "limit 5.0 s" in (hang_reason(0, 94 * S, 0, 100 * S, S // 2) or "")
    assert "limit 0.5 s" in (hang_reason(99 * S, 100 * S, 0, 100 * S, S // 2) or "")


def test_sm_08_a_loop_that_does_not_come_round_is_reported_long_before_it_hangs() -> None:
    assert stall_reason(0, 100 * S, stopped=False) is None
    assert stall_reason(100 * S - STALL_NS, 100 * S, stopped=False) is None
    assert "5.0 s" in (stall_reason(100 * S - STALL_NS - 1, 100 * S, stopped=False) or "")
    assert "stopped" in (stall_reason(100 * S, 100 * S, stopped=True) or "")


W, F = "worker", "frontend"
READY, STARTING, DEGRADED, DRAINING = State.READY, State.STARTING, State.DEGRADED, State.DRAINING
CASES = [
    ([], False, STARTING, ("no worker", "no frontend")),
    ([(W, "w", READY)], False, STARTING, ("no frontend",)),
    ([(W, "w", READY), (F, "f", READY)], False, READY, ()),
    ([(W, "w", READY), (F, "f", READY), (F, "g", None)], True, READY, ()),
    ([(W, "w", READY), (F, "f", STARTING), (F, "g", None)], True, DEGRADED, ("f is starting", "g is not running")),
    ([(W, "w", STARTING), (F, "f", READY)], False, STARTING, ("w is starting",)),
    ([(W, "w", None), (F, "f", READY)], True, DEGRADED, ("w is not running",)),
    ([(W, "w", DEGRADED), (F, "f", READY)], False, DEGRADED, ("w is degraded",)),
    ([(W, "w", DRAINING), (F, "f", READY)], True, DEGRADED, ("w is draining",)),
]


@pytest.mark.parametrize(("processes", "was_ready", "state", "reasons"), CASES)
def test_pi_13_a_node_is_ready_only_if_it_can_answer(
    processes: list[tuple[str, str, State | None]], was_ready: bool, state: State, reasons: tuple[str, ...]
) -> None:
    conditions = [Condition(role, name, said) for role, name, said in processes]
    found = verdict(conditions, was_ready=was_ready, draining=False)
    assert (found.state, found.reasons) == (state, reasons)
    assert verdict(conditions, was_ready=was_ready, draining=True).state is DRAINING


def test_a_stalled_process_does_not_count_as_ready() -> None:
    conditions = [Condition(W, "w", READY, stalled="is stopped"), Condition(F, "f", READY)]
    assert verdict(conditions, was_ready=True, draining=False).reasons == ("w is stopped",)


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=8))
def test_prefixed_lines_hold_every_byte_however_it_arrives(data: bytes, cuts: list[int]) -> None:
    prefixer = Prefixer("worker0")
    edges = [0, *sorted(cuts), len(data)]
    lines = [line for a, b in itertools.pairwise(edges) for line in prefixer.feed(data[a:b])]
    lines += prefixer.finish()
    assert all(line.startswith(b"worker0 | ") and line.endswith(b"\n") for line in lines)
    expected = [line.removesuffix(b"\r") for line in data.split(b"\n")[:-1]] + [data.split(b"\n")[-1]]
    assert [line[10:-1] for line in lines] == expected[:-1] + [expected[-1]] * bool(expected[-1])


def test_a_line_without_an_end_is_cut_and_never_kept_whole() -> None:
    prefixer = Prefixer("f")
    lines = [line for _ in range(10) for line in prefixer.feed(b"x" * MAX_LINE_BYTES)] + prefixer.finish()
    assert [len(line) for line in lines] == [MAX_LINE_BYTES + 5] * 10


@given(st.lists(st.builds(Order, do=st.sampled_from(["drain", "series", "status"]), id=st.integers(0, 99))), st.data())
def test_messages_survive_any_cutting(orders: list[Order], data: st.DataObject) -> None:
    wire = b"".join(map(encode_line, orders))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=6)))
    lines = Lines(Order)
    edges = [0, *cuts, len(wire)]
    found = [order for a, b in itertools.pairwise(edges) for order in lines.feed(wire[a:b])]
    assert found == orders


@pytest.mark.parametrize("line", [b"x\n", b"[]\n", b'{"do": "dance"}\n', b'{"do": "\xff"}\n', b'{"do":' * 9999 + b"\n"])
def test_what_is_no_message_is_refused_by_name(line: bytes) -> None:
    with pytest.raises(LinkError, match="expected Order, got"):
        Lines(Order).feed(line)


def test_a_line_above_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.channel.node_link.MAX_LINE_BYTES", 1000)
    lines = Lines(Order)
    assert lines.feed(b"x" * 1000) == []
    with pytest.raises(LinkError, match="line of more than 1000 bytes"):
        lines.feed(b"x")


def test_a_process_is_not_held_up_by_a_node_that_does_not_read() -> None:
    ours, theirs = socket.socketpair()
    link = SyncLink(theirs.detach())
    report = Report(state=State.READY, detail="d" * (1 << 20))
    outcomes = [link.send(report) for _ in range(MAX_PENDING_BYTES // (1 << 20) + 8)]
    assert outcomes[0] is True
    assert outcomes[-1] is False
    assert link.wants_write
    received = Lines(Report)
    ours.setblocking(False)
    found: list[Report] = []
    while link.wants_write or len(found) < outcomes.count(True):
        found += received.feed(ours.recv(1 << 20))
        link.flush()
    assert found == [report] * outcomes.count(True)
    ours.close()
    assert link.receive() == []
    assert link.gone
    assert link.send(report) is False
    link.close()


def test_pulse_words_are_seen_by_the_other_mapping() -> None:
    descriptor = create_pulse()
    worker, node = Pulse(descriptor), Pulse(descriptor)
    assert (node.executing_since_ns, node.heartbeat_ns) == (0, 0)
    worker.executing(2**63)
    worker.beat(7)
    assert (node.executing_since_ns, node.heartbeat_ns) == (2**63, 7)
    worker.close()
    node.close()
    os.close(descriptor)


def test_a_reserved_port_carries_listeners_that_come_and_go() -> None:
    reserved = ports.reserve("127.0.0.1", 0, "http_port")
    port = reserved.getsockname()[1]
    for _ in range(2):
        listener = socket.create_server(("127.0.0.1", port), reuse_port=True)
        with socket.create_connection(("127.0.0.1", port)) as client, listener:
            server, _ = listener.accept()
            server.close()
            assert client.recv(1) == b""
    # Nobody listens now, yet no ordinary server gets in.
    with pytest.raises(OSError, match="in use"), socket.create_server(("127.0.0.1", port)):
        pass
    reserved.close()
    # What the closed connections left (TIME_WAIT) does not keep the next node out.
    ports.reserve("127.0.0.1", port, "http_port").close()


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7"])
def test_a_host_that_is_not_ours_is_named(host: str) -> None:
    with pytest.raises(ports.PortError, match=host):
        ports.reserve(host, 0, "http_port")


def test_run_directory_is_private_short_and_ours(tmp_path: Path) -> None:
    run_dir = RunDir(str(tmp_path / "a" / "run"))
    run_dir.open(("node.sock",))
    assert os.stat(run_dir.path).st_mode & 0o777 == 0o700
    run_dir.close()
    with pytest.raises(RunDirError, match="the system's limit is 107; choose a shorter one with --run-dir"):
        RunDir(str(tmp_path / ("x" * 100))).open(("node.sock",))
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError, match="is not a directory"):
        RunDir(str(tmp_path / "file")).open(("node.sock",))
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(RunDirError, match="others may write"):
        RunDir(str(tmp_path / "open")).open(("node.sock",))


def test_a_run_directory_without_room_is_named_and_not_kept_locked(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(RunDirError, match=r"run_dir: cannot write .*node\.lock: File too large"):
            RunDir(str(tmp_path)).open(("node.sock",))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    run_dir = RunDir(str(tmp_path))
    run_dir.open(("node.sock",))
    run_dir.close()


def test_stale_sockets_are_removed_and_other_files_kept(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(tmp_path / "worker0.sock"))
    (tmp_path / "notes.sock").write_text("not a socket")
    run_dir = RunDir(str(tmp_path))
    run_dir.open(("node.sock",))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["node.lock", "notes.sock"]
    with socket.socket(socket.AF_UNIX) as of_a_killed_worker:
        of_a_killed_worker.bind(str(tmp_path / "worker0.sock"))
    run_dir.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["node.lock", "notes.sock"]


def test_status_table() -> None:
    processes = (
        ProcessStatus(role="supervisor", name="node", pid=7, state="degraded", restarts=0, started_at=1000),
        ProcessStatus(role="worker", name="worker0", pid=0, state="down", restarts=3, started_at=0),
    )
    models = (ModelStatus(name="m", version="1", state="UNAVAILABLE", reason="bad\nfile"),)
    status = NodeStatus(
        run_dir="/r", state="degraded", http_port=1, grpc_port=2, metrics_port=3, processes=processes, channels=(),
        models=models,
    )  # fmt: skip
    assert status_text(Answer(status=status, reasons=("worker0 is not running",)), 1060.0) == (
        "/r: degraded (worker0 is not running)\n"
        "http 1  grpc 2  metrics 3\n"
        "\n"
        "PROCESS  ROLE        PID  STATE     RESTARTS  UP\n"
        "node     supervisor  7    degraded  0         60s\n"
        "worker0  worker      -    down      3         -\n"
        "\n"
        "MODEL  VERSION  STATE        BATCH SIZES  QUEUED  REASON\n"
        "m      1        UNAVAILABLE  -            0       bad file"
    )
