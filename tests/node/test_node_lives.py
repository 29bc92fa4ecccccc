"""The node with fake children: start, restart, drain, hang, orphans, ports, joining."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_node_process import LIMIT_S, NodeProcess, Watched, environment

from frontend.node.link import join_node
from worker.channel.node_link import EXIT_CONFIG, Report, State, SyncLink

pytestmark = pytest.mark.process


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    with NodeProcess(tmp_path) as process:
        process.wait_ready()
        yield process


def test_status_has_exactly_the_documented_fields(node: NodeProcess) -> None:
    command = [sys.executable, "-m", "frontend.cli", "status", "--run-dir", str(node.run_dir), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    status = json.loads(done.stdout)
    assert list(status) == [
        "run_dir", "state", "http_port", "grpc_port", "metrics_port", "processes", "channels", "models",
    ]  # fmt: skip
    assert status["state"] == "ready"
    assert [(p["role"], p["name"], p["state"], p["restarts"]) for p in status["processes"]] == [
        ("supervisor", "node", "ready", 0),
        ("worker", "worker0", "ready", 0),
        ("frontend", "frontend0", "ready", 0),
    ]
    assert all(set(p) == {"role", "name", "pid", "state", "restarts", "started_at"} for p in status["processes"])
    assert status["channels"] == [
        {"frontend": "frontend0", "worker": "worker0", "in_flight": 3, "arena_bytes_used": 0, "arena_bytes": 1 << 20}
    ]
    assert status["models"] == [
        {"name": "m", "version": "1", "state": "READY", "reason": "", "batch_sizes": [1, 8], "queue_depth": 0}
    ]
    assert len({status["http_port"], status["grpc_port"], status["metrics_port"]} - {0}) == 3


def test_status_tables_and_exit_status_without_a_node(node: NodeProcess, tmp_path: Path) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "frontend.cli", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=LIMIT_S, check=False)
        return done.returncode, done.stdout + done.stderr

    code, text = run("status", "--run-dir", str(node.run_dir))
    assert code == 0
    assert "frontend0 -> worker0" in text
    code, text = run("models", "--run-dir", str(node.run_dir))
    assert (code, text.splitlines()[1].split()) == (0, ["m", "1", "READY", "1,8", "0"])
    code, text = run("status", "--run-dir", str(tmp_path / "nowhere"))
    assert code == 2
    assert f"no node runs in {tmp_path}/nowhere" in text
    code, text = run("frontend", "--attach", str(tmp_path / "nowhere"))
    assert code == 1
    assert text.startswith("ringserve: cannot join the node of")


def test_sigterm_drains_frontends_before_the_worker_and_exits_0(node: NodeProcess) -> None:
    node.signal(signal.SIGTERM)
    assert node.wait_exit() == 0
    ended = [line.split("name=")[1].split()[0] for line in node.lines if "process.ended" in line]
    assert ended == ["frontend0", "worker0"]
    assert not (node.run_dir / "node.sock").exists()


def test_sm_05_starting_and_stopping_leaves_no_warning(tmp_path: Path) -> None:
    for _ in range(2):
        with NodeProcess(tmp_path, "", "--frontends", "3") as process:
            process.wait_ready()
            process.signal(signal.SIGINT)
            assert process.wait_exit() == 0
            assert [line for line in process.lines if "Traceback" in line or "WARNING" in line] == []


def test_second_signal_kills_at_once(tmp_path: Path) -> None:
    with NodeProcess(tmp_path, "frontend0=stubborn") as process:
        process.wait_ready()
        children = [Watched(process.pid(name)) for name in ("worker0", "frontend0")]
        process.signal(signal.SIGTERM)
        process.wait_line("frontend0 . I would rather not")
        process.signal(signal.SIGTERM)
        assert process.wait_exit() == 128 + signal.SIGTERM
        assert all(child.ended_within(0) for child in children)
        for child in children:
            child.close()


@pytest.mark.slow
def test_a_process_that_does_not_drain_is_cut_off_and_the_exit_status_says_so(tmp_path: Path) -> None:
    node_file = tmp_path / "node.yaml"
    node_file.write_text("global: {endpoints: {drain_timeout_seconds: 0.1}}")
    with NodeProcess(tmp_path, "frontend0=stubborn", "--node", str(node_file)) as process:
        process.wait_ready()
        process.signal(signal.SIGTERM)
        assert process.wait_exit() == 1
        assert any("node.drain_cut role=frontend names=frontend0" in line for line in process.lines)


@pytest.mark.parametrize("name", ["worker0", "frontend0"])
def test_sm_06_a_killed_process_is_replaced_and_readiness_tells_the_truth(tmp_path: Path, name: str) -> None:
    with NodeProcess(tmp_path, f"{name}=gate") as process:
        process.wait_ready()
        os.mkfifo(process.run_dir / "gate")
        assert process.get("/readyz")[0] == 200
        Watched(process.pid(name)).kill()
        process.wait_line(f"process.started name={name}")
        code, body, _ = process.get("/readyz")
        assert code == 503
        assert json.loads(body) == {
            "ready": False, "state": "degraded", "reasons": [f"{name} is starting"],
        }  # fmt: skip
        assert process.get("/healthz")[0] == 200
        (process.run_dir / "gate").write_bytes(b"")
        process.wait_line("node.state ready")
        assert process.get("/readyz")[0] == 200
        assert {p.name: p.restarts for p in process.status().processes}[name] == 1


def test_a_process_that_keeps_crashing_is_started_later_and_later(tmp_path: Path) -> None:
    with NodeProcess(tmp_path, "worker0=crash") as process:
        waits = [float(process.wait_line(r"process.restart name=worker0 in_s=([\d.]+)")[1]) for _ in range(4)]
        assert waits == [0.1, 0.2, 0.4, 0.8]
        assert process.status().state == "starting"
        process.signal(signal.SIGTERM)
        assert process.wait_exit() == 0


def test_ml_09_a_worker_with_a_broken_model_is_never_ready(tmp_path: Path) -> None:
    with NodeProcess(tmp_path, "worker0=broken") as process:
        process.wait_line("node.state degraded reasons=.'worker0 is degraded: model broken'.")
        assert process.get("/readyz")[0] == 503
        assert process.answer().reasons == ("worker0 is degraded: model broken",)
        process.signal(signal.SIGTERM)
        process.wait_exit()
        assert not any("is ready" in line for line in process.lines)


@pytest.mark.parametrize("name", ["worker0", "frontend0"])
def test_a_configuration_that_can_never_work_stops_the_node(tmp_path: Path, name: str) -> None:
    with NodeProcess(tmp_path, f"{name}=config") as process:
        assert process.wait_exit() == EXIT_CONFIG
        assert f"{name} | nothing here can be served" in process.lines
        assert any(f"{name} cannot start with this configuration" in line for line in process.lines)


@pytest.mark.parametrize(
    ("behaviour", "what", "limit_s"), [("hang@1", "device execution", 0.5), ("frozen@1", "loop", 5.0)]
)
def test_rule_24_do_08_a_hanging_worker_is_killed_and_replaced(
    tmp_path: Path, behaviour: str, what: str, limit_s: float
) -> None:
    node_file = tmp_path / "node.yaml"
    node_file.write_text("global: {scheduler: {dispatch_timeout_seconds: 0.25}}")
    with NodeProcess(tmp_path, f"worker0={behaviour}", "--node", str(node_file)) as process:
        process.wait_ready()
        reason = process.wait_line(r"process.hang name=worker0 pid=\d+ reason=(.*) action=kill")[1]
        assert what in reason
        assert f"limit {limit_s} s" in reason
        process.wait_line("process.ended name=worker0 .* status=-9")
        process.wait_line("node.state ready")
        assert process.get("/readyz")[0] == 200


def test_sm_06_a_stopped_worker_is_not_ready_but_not_killed(tmp_path: Path) -> None:
    node_file = tmp_path / "node.yaml"
    node_file.write_text("global: {scheduler: {dispatch_timeout_seconds: 0.25}}")
    with NodeProcess(tmp_path, "", "--node", str(node_file)) as process:
        process.wait_ready()
        worker = Watched(process.pid("worker0"))
        worker.kill(signal.SIGSTOP)
        process.wait_line("node.state degraded reasons=.'worker0 is stopped by a signal or a debugger'")
        assert not worker.ended_within(1.5)
        worker.kill(signal.SIGCONT)
        process.wait_line("node.state ready")
        assert process.pid("worker0") == worker.pid
        worker.close()


def test_sm_12_no_process_survives_a_killed_node(tmp_path: Path) -> None:
    # The worker sleeps in the middle of nowhere and never looks at its link.
    with NodeProcess(tmp_path, "worker0=frozen", "--frontends", "2") as process:
        process.wait_ready()
        children = [Watched(process.pid(name)) for name in ("worker0", "frontend0", "frontend1")]
        process.signal(signal.SIGKILL)
        assert all(child.ended_within(5.0) for child in children)
        for child in children:
            child.close()


def test_a_new_node_takes_over_the_run_directory_of_a_killed_one(tmp_path: Path) -> None:
    with NodeProcess(tmp_path) as first:
        first.wait_ready()
        first.signal(signal.SIGKILL)
        first.wait_exit()
    assert (tmp_path / "run" / "node.sock").exists()
    with NodeProcess(tmp_path) as second:
        second.wait_ready()


def test_two_nodes_cannot_share_a_run_directory(node: NodeProcess, tmp_path: Path) -> None:
    with NodeProcess(tmp_path) as second:
        assert second.wait_exit() == 1
        expected = f"run_dir: a node (pid {node.process.pid}) runs in {node.run_dir} already; choose another"
        assert second.lines[-1].startswith("ringserve: " + expected)
    assert node.get("/readyz")[0] == 200


def test_a_port_of_another_node_is_refused_by_name(node: NodeProcess, tmp_path: Path) -> None:
    port = node.status().http_port
    with socket.socket() as frontend:
        # What a frontend of the first node does on its port.
        frontend.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        frontend.bind(("127.0.0.1", port))
        frontend.listen()
        (tmp_path / "other").mkdir()
        with NodeProcess(tmp_path / "other", "", "--http-port", str(port)) as second:
            assert second.wait_exit() == 1
            assert second.lines[-1] == (
                f"ringserve: global.endpoints.http_port: 127.0.0.1:{port} is already in use; choose another with"
                " --http-port or INFERENCE_SERVER_ENDPOINTS_HTTP_PORT, 0 picks a free one"
            )


def test_a_port_reserved_but_not_yet_listened_on_is_refused_too(node: NodeProcess, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with NodeProcess(tmp_path / "other", "", "--http-port", str(node.status().http_port)) as second:
        assert second.wait_exit() == 1


def test_output_of_children_is_prefixed_line_by_line(tmp_path: Path) -> None:
    with NodeProcess(tmp_path, "frontend0=talk") as process:
        process.wait_line(r"^frontend0 \| half a line$")
        assert len(process.wait_line(r"^frontend0 \| (y+)$")[1]) == 16 * 1024
        process.wait_ready()
        process.signal(signal.SIGTERM)
        assert process.wait_exit() == 0
        assert "frontend0 | no newline at the end" in process.lines


def test_a_process_that_breaks_the_link_is_replaced(tmp_path: Path) -> None:
    with NodeProcess(tmp_path, "frontend0=garbage@1") as process:
        assert process.wait_line("process.ended name=frontend0 pid=.* status=(.*)")[1] == "75"
        process.wait_line("process.started name=frontend0")
        process.wait_ready()


def test_a_frontend_joins_by_hand_and_leaves(node: NodeProcess) -> None:
    sock, settings = join_node(str(node.run_dir))
    assert settings.name == "joined0"
    assert settings.endpoints.http_port == node.status().http_port
    assert settings.worker_sockets == (str(node.run_dir / "worker0.sock"),)
    link = SyncLink(sock.detach())
    link.send(Report(state=State.READY))
    node.wait_line(f"frontend.joined name=joined0 pid={os.getpid()}")
    row = next(p for p in node.status().processes if p.name == "joined0")
    assert (row.role, row.pid, row.restarts) == ("frontend", os.getpid(), 0)
    link.close()
    node.wait_line("frontend.left name=joined0")
    assert "joined0" not in [p.name for p in node.status().processes]


def test_joining_is_refused_above_the_channel_limit_and_seen_by_draining(tmp_path: Path) -> None:
    node_file = tmp_path / "node.yaml"
    node_file.write_text("global: {channel: {max_channels: 2}}")
    with NodeProcess(tmp_path, "", "--node", str(node_file)) as process:
        process.wait_ready()
        sock, _ = join_node(str(process.run_dir))
        with pytest.raises(ConnectionRefusedError, match=r"2 frontends run; global.channel.max_channels is 2"):
            join_node(str(process.run_dir))
        process.signal(signal.SIGTERM)
        sock.settimeout(LIMIT_S)
        received = b""
        while b'"drain"' not in received:
            received += sock.recv(4096)
        sock.close()
        assert process.wait_exit() == 0


def test_a_stranger_on_the_socket_is_turned_away(node: NodeProcess) -> None:
    for noise in (b"GET / HTTP/1.1\r\n\r\n", b"x" * 70_000, b'{"ask": 1}\n', b""):
        with socket.socket(socket.AF_UNIX) as caller:
            caller.settimeout(LIMIT_S)
            caller.connect(str(node.run_dir / "node.sock"))
            caller.sendall(noise)
            caller.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                assert caller.recv(100) == b""
    assert node.status().state == "ready"
