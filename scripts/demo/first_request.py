"""Wait until a node that serves the demo bundles is ready, send it one request, print the request and its answer."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

_RINGSERVE = Path(sys.executable).parent / "ringserve"
_WAIT_SECONDS = 300.0
_POLL_SECONDS = 0.25
_REQUEST_SECONDS = 30.0
_CONTENT = "import os\n\n\ndef where():\n    return os.getcwd()\n"
_BODY = {"inputs": [{"name": "CONTENT", "datatype": "BYTES", "shape": [1], "data": [_CONTENT]}]}


def main() -> int:
    """Print request and answer; return 0, or 1 if the node went away or was not ready in time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--node-pid", type=int, required=True)
    parser.add_argument("--http-port", type=int, default=8000)
    parser.add_argument("--metrics-port", type=int, default=8002)
    parser.add_argument("--run-dir", default="")
    arguments = parser.parse_args()
    ports = arguments.http_port, arguments.metrics_port
    for _ in _while_alive(arguments.node_pid):
        if 0 in ports:
            ports = _chosen_ports(arguments.run_dir, arguments.node_pid) or ports
        if 0 not in ports and _is_ready(ports[1]):
            _show(ports[0])
            return 0
    return 1


def _while_alive(pid: int) -> Iterator[None]:
    """Yield every ``_POLL_SECONDS`` while the node runs: another node on these ports must not answer in its place."""
    end = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except OSError:
            return
        yield
        time.sleep(_POLL_SECONDS)


def _chosen_ports(run_dir: str, node_pid: int) -> tuple[int, int] | None:
    """Ask the node which ports it took where it was told to choose; None if it cannot say yet."""
    where = ["--run-dir", run_dir] if run_dir else []
    status = subprocess.run([_RINGSERVE, "status", "--json", *where], capture_output=True, text=True, check=False)
    try:
        told = json.loads(status.stdout)
        if any(process["pid"] == node_pid for process in told["processes"]):
            return told["http_port"], told["metrics_port"]
    except (ValueError, KeyError, TypeError):
        pass
    return None


def _is_ready(metrics_port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/readyz", timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def _show(http_port: int) -> None:
    url = f"http://127.0.0.1:{http_port}/v2/models/magika/infer"
    body = json.dumps(_BODY)
    request = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_REQUEST_SECONDS) as response:
            answer = response.read().decode()
    except urllib.error.HTTPError as error:
        answer = f"{error.code} {error.read().decode()}"
    except (OSError, http.client.HTTPException) as error:
        answer = f"no answer: {error}"
    command = f"curl -s {url} -d '{body}'"
    print(f"\nReady. What kind of file is this? Try:\n\n  {command}\n\nIts answer:\n\n  {answer}\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
