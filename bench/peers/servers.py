"""The servers under comparison: how each is started with one model, where it answers, and how it is stopped.

Every server listens on loopback, at free ports, with one model, one model process and batches of up to 32. What a
server needs to be at its best is written at its builder. Traps that cost an hour each are named there too.
"""

from __future__ import annotations

import functools
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench.peers import install, probe, processes
from bench.peers.models import BATCH, Spec

ADAPTERS = Path(__file__).with_name("adapters")
ROOT = Path(__file__).resolve().parents[2]
TWO = 2
"""Frontends of our node where that is asked for; otherwise as many as it chooses, which is one on two cores."""
READY_TIMEOUT_S = 60.0
POLL_S = 0.05
GOOD_ANSWERS = 8
"""In a row, each over a connection of its own: one frontend of several may be ready before another."""
LOG_TAIL_BYTES = 1500


class NotStarted(Exception):
    """A server did not come to answer; the text says why, with the end of its log."""


@dataclass(frozen=True)
class Plan:
    """How to start one server.

    Attributes:
        paths: URL path of every HTTP format it takes.
        grpc_port: 0 if it speaks no gRPC.
        isolated: run in a network namespace that has only its own loopback.
    """

    command: list[str]
    paths: dict[str, str]
    http_port: int
    grpc_port: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    isolated: bool = False


@dataclass(frozen=True)
class Peer:
    """A server by name.

    Attributes:
        venv: what must be installed; empty for our own.
        exclusive: polls or keeps many processes awake: never left running while another is measured.
        formats: in the order of measuring.
    """

    name: str
    venv: str
    formats: tuple[str, ...]
    plan: Callable[[Path, Path, Spec], Plan]
    exclusive: bool = False


def free_ports(count: int) -> list[int]:
    """Return ports that nobody uses now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def scratch(home: Path, name: str) -> Path:
    """Return an empty directory for one server's files."""
    folder = home / "run" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _v2_paths(spec: Spec) -> dict[str, str]:
    path = f"/v2/models/{spec.name}/infer"
    return {"v2bin": path, "v2json": path, "shm": path}


def _adapter_environment(spec: Spec, model_file: Path, port: int) -> dict[str, str]:
    return {
        "PEER_MODEL_FILE": str(model_file),
        "PEER_ROW_SHAPE": ",".join(map(str, spec.row_in)),
        "PEER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def _ringserve(home: Path, model_file: Path, spec: Spec, frontends: int = 0) -> Plan:
    http, grpc, metrics = free_ports(3)
    run_dir = scratch(home, "ringserve")
    node_file = run_dir / "node.yaml"
    # Off by default, since it lets clients name memory of the machine; Triton has it on.
    node_file.write_text("global: {endpoints: {system_shared_memory: {enabled: true}}}\n")
    command = [
        sys.executable, "-P", "-m", "frontend.cli", "serve", "--models", str(model_file.parents[1]),
        "--node", str(node_file), "--run-dir", str(run_dir / "node"),
        *(("--frontends", str(frontends)) if frontends else ()),
        "--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics),
    ]  # fmt: skip
    return Plan(command, _v2_paths(spec), http, grpc, {"PYTHONPATH": str(served_tree())})


def served_tree() -> Path:
    """Return the tree that ``scripts/serve`` would run: compiled where that can be and RINGSERVE_COMPILED is not 0."""
    if os.environ.get("RINGSERVE_COMPILED") == "0":
        return ROOT
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "compile.py")], check=False)
    return Path(sys.prefix) / "compiled" if done.returncode == 0 else ROOT


def _inline(home: Path, model_file: Path, spec: Spec) -> Plan:
    """Our HTTP stack with the model on its event loop: what one process without batching can do."""
    (http,) = free_ports(1)
    command = [
        sys.executable, str(ROOT / "bench" / "inline_server.py"),
        "--models", str(model_file.parents[1]), "--port", str(http),
    ]  # fmt: skip
    return Plan(command, _v2_paths(spec), http, 0, {"PYTHONPATH": str(ROOT)})


def _fastapi(home: Path, model_file: Path, spec: Spec) -> Plan:
    (http,) = free_ports(1)
    command = [str(install.python_of(home, "fastapi")), str(ADAPTERS / "fastapi_app.py")]
    return Plan(command, {"raw": "/raw", "json": "/json"}, http, 0, _adapter_environment(spec, model_file, http))


def _mosec(home: Path, model_file: Path, spec: Spec) -> Plan:
    """With ``--wait 0``: the same throughput as a window of 1 ms, and a lower latency at one caller."""
    (http,) = free_ports(1)
    command = [
        str(install.python_of(home, "mosec")), str(ADAPTERS / "mosec_server.py"), "--address", "127.0.0.1",
        "--port", str(http), "--timeout", "30000", "--log-level", "warning", "--wait", "0",
    ]  # fmt: skip
    return Plan(command, {"raw": "/raw", "json": "/json"}, http, 0, _adapter_environment(spec, model_file, http))


def _litserve(home: Path, model_file: Path, spec: Spec) -> Plan:
    (http,) = free_ports(1)
    command = [str(install.python_of(home, "litserve")), str(ADAPTERS / "litserve_server.py")]
    return Plan(command, {"json": "/json"}, http, 0, _adapter_environment(spec, model_file, http))


def _ray(home: Path, model_file: Path, spec: Spec) -> Plan:
    """HAProxy, off by default, instead of Ray's Python proxy, which takes a whole core for 200 requests/s."""
    (http,) = free_ports(1)
    python = install.python_of(home, "ray")
    environment = _adapter_environment(spec, model_file, http) | {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray's sockets live below it, and a Unix socket's path is short.
        "PEER_SCRATCH": str(scratch(Path("/tmp"), f"ringserve-ray-{os.getpid()}")),
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ADAPTERS),
    }
    return Plan([str(python), str(ADAPTERS / "ray_server.py")], {"raw": "/", "json": "/"}, http, 0, environment, True)


def _triton(window_us: int) -> Callable[[Path, Path, Spec], Plan]:
    """Triton out of the PyTriton wheel with a plain model repository and its Python backend.

    The stub is copied beside the backend, where the server looks for it; it dies in silence unless it finds the wheel's
    own libraries and libpython on LD_LIBRARY_PATH.
    """

    def plan(home: Path, model_file: Path, spec: Spec) -> Plan:
        http, grpc, metrics = free_ports(3)
        folder = scratch(home, f"triton-{window_us}")
        packages = next((install.environment(home, "triton") / "lib").glob("python3.*")) / "site-packages"
        wheel = packages / "pytriton" / "tritonserver"
        backends = folder / "backends"
        shutil.copytree(wheel / "backends" / "python", backends / "python")
        version = packages.parent.name.removeprefix("python")
        stub = backends / "python" / "triton_python_backend_stub"
        shutil.copy(wheel / "python_backend_stubs" / version / stub.name, stub)
        server = wheel / "bin" / "tritonserver"
        for file in (stub, server):
            file.chmod(0o755)
        model = folder / "models" / spec.name
        (model / "1").mkdir(parents=True)
        shutil.copy(ADAPTERS / "triton_model.py", model / "1" / "model.py")
        (model / "config.pbtxt").write_text(triton_config(spec, model_file, window_us))
        libraries = [str(packages / "nvidia_pytriton.libs"), str(sysconfig.get_config_var("LIBDIR"))]
        environment = {
            "PATH": f"{install.python_of(home, 'triton').parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(packages),
            "LD_LIBRARY_PATH": os.pathsep.join(libraries),
            "OMP_NUM_THREADS": "1",
        }
        command = [
            str(server), "--model-repository", str(folder / "models"), "--backend-directory", str(backends),
            "--http-address", "127.0.0.1", "--grpc-address", "127.0.0.1", "--metrics-address", "127.0.0.1",
            "--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics),
            "--backend-config=python,shm-default-byte-size=67108864",
        ]  # fmt: skip
        return Plan(command, _v2_paths(spec), http, grpc, environment)

    return plan


def triton_config(spec: Spec, model_file: Path, window_us: int) -> str:
    """Return the config.pbtxt of a model."""

    def dims(row: tuple[int, ...]) -> str:
        return ", ".join(map(str, row))

    return (
        f'name: "{spec.name}"\nbackend: "python"\nmax_batch_size: {BATCH}\n'
        f'input [ {{ name: "X" data_type: TYPE_FP32 dims: [ {dims(spec.row_in)} ] }} ]\n'
        f'output [ {{ name: "Y" data_type: TYPE_FP32 dims: [ {dims(spec.row_out)} ] }} ]\n'
        "instance_group [ { kind: KIND_CPU count: 1 } ]\n"
        f"dynamic_batching {{ max_queue_delay_microseconds: {window_us} }}\n"
        f'parameters {{ key: "onnx" value: {{ string_value: "{model_file}" }} }}\n'
    )


OURS = "ringserve"
PEERS = {
    peer.name: peer
    for peer in (
        Peer(OURS, "", ("v2bin", "v2json", "grpc", "shm"), _ringserve),
        Peer("inline", "", ("v2bin", "v2json"), _inline),
        Peer("mosec", "mosec", ("raw", "json"), _mosec),
        Peer("triton-w0", "triton", ("v2bin", "v2json", "grpc", "shm"), _triton(0)),
        Peer("triton-w1ms", "triton", ("v2bin", "v2json", "grpc", "shm"), _triton(1000)),
        Peer("fastapi", "fastapi", ("raw", "json"), _fastapi),
        Peer("litserve", "litserve", ("json",), _litserve, exclusive=True),
        Peer("ray", "ray", ("raw", "json"), _ray, exclusive=True),
    )
}
TWO_FRONTENDS = Peer(OURS, "", PEERS[OURS].formats, functools.partial(_ringserve, frontends=TWO))
"""Ours as it is watched, not compared: with more than one of each kind of process that there may be."""


class Running:
    """A started server; ``stop`` ends every process of it."""

    def __init__(self, peer: Peer, plan: Plan, process: subprocess.Popen[bytes], log: Path, ready_s: float) -> None:
        self.peer = peer
        self.plan = plan
        self.ready_s = ready_s
        self._process = process
        self._log = log
        self._members = processes.tree(process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def namespace_pid(self) -> int | None:
        """Whose network namespace clients must enter; None: they are in it."""
        return self.pid if self.plan.isolated else None

    def members(self) -> dict[int, processes.Stat]:
        """Return the processes now; also remembers them for ``stop``."""
        found = processes.tree(self.pid)
        self._members |= found
        return found

    def alive(self) -> bool:
        return self._process.poll() is None

    def tail(self) -> str:
        """Return the end of its log."""
        return self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")

    def stop(self) -> None:
        """End it, whatever state it is in."""
        self.members()
        processes.stop_tree(self.pid, self._members)
        self._process.wait(processes.KILL_TIMEOUT_S)


def start(peer: Peer, home: Path, model_file: Path, spec: Spec) -> Running:
    """Start a server and wait until it gives a right answer in its first format.

    Raises:
        NotStarted: it ended, or did not answer within READY_TIMEOUT_S.
    """
    plan = peer.plan(home, model_file, spec)
    (home / "logs").mkdir(parents=True, exist_ok=True)
    log = home / "logs" / f"{peer.name}.log"
    command = ["unshare", "--net", *plan.command] if plan.isolated else plan.command
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            env=os.environ | plan.environment, process_group=0, preexec_fn=processes.die_with_parent,
            cwd=log.parent,
        )  # fmt: skip
    running = Running(peer, plan, process, log, 0.0)
    try:
        _wait_ready(running, spec, began)
    except BaseException:
        running.stop()
        raise
    running.ready_s = time.monotonic() - began
    running.members()
    return running


def _wait_ready(running: Running, spec: Spec, began: float) -> None:
    form = running.peer.formats[0]
    why, good = "no try yet", 0
    while time.monotonic() - began < READY_TIMEOUT_S:
        if not running.alive():
            raise NotStarted(f"{running.peer.name} ended while starting:\n{running.tail()}")
        try:
            status, _, body = probe.ask(running, spec, form)
        except OSError as error:
            why, good = str(error), 0
        else:
            if status == 200:
                good += 1
                if good == GOOD_ANSWERS:
                    return
                continue
            why, good = f"status {status}: {body[:200]!r}", 0
        time.sleep(POLL_S)
    raise NotStarted(f"{running.peer.name} gave no answer within {READY_TIMEOUT_S:.0f} s ({why}):\n{running.tail()}")
