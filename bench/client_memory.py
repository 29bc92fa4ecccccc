"""3 MiB in, 3 MiB out: tensors in HTTP bodies against tensors in registered shared memory, alternating in one run.

    python bench/client_memory.py [--rounds 7] [--seconds 2] [--concurrency 1,4]

Clients are threads of this process on plain sockets with requests made beforehand, so that the server is what is
measured. Both kinds of client have the tensor in an array of their own and want the answer in one: the one copies it
into its region and out again, the other hands it to the socket and receives into it.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from multiprocessing import shared_memory
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import onnx_models
from real_node import Node

COLUMNS = 3 * 1024 * 1024 // 4
TENSOR_BYTES = COLUMNS * 4
MANIFEST = f"""format_version: "1"
kind: model
executable_inputs:
  - {{name: INPUT, dtype: f32, shape: nc, dims: {{c: {COLUMNS}}}}}
executable_outputs:
  - {{name: OUTPUT, dtype: f32, shape: nc, dims: {{c: {COLUMNS}}}}}
batching: {{compiled_batch_sizes: [1, 4]}}
"""
Turn = Callable[[], None]


class Connection:
    """One keep-alive connection that posts bodies and receives answers into memory it is given."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answer = memoryview(bytearray(TENSOR_BYTES + 65536))

    def post(self, head: bytes, body: memoryview | None) -> memoryview:
        """Return the body of the answer; it is valid until the next one."""
        self._socket.sendall(head)
        if body is not None:
            self._socket.sendall(body)
        have = 0
        end = -1
        while end < 0 or have < end:
            count = self._socket.recv_into(self._answer[have:])
            assert count, "the server closed the connection"
            have += count
            if end < 0 and (at := bytes(self._answer[: min(have, 4096)]).find(b"\r\n\r\n")) >= 0:
                fields = bytes(self._answer[:at]).lower()
                assert fields.startswith(b"http/1.1 200"), bytes(self._answer[:have])
                start = at + 4
                end = start + int(fields.split(b"\ncontent-length:")[1].split(b"\r\n")[0])
        return self._answer[start:end]

    def close(self) -> None:
        self._socket.close()


def head_of(document: dict[str, object], binary_bytes: int, model: str = "identity") -> bytes:
    """Return request line, fields and JSON of an inference."""
    text = json.dumps(document).encode()
    fields = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text) + binary_bytes}\r\n"
    return (fields + f"Inference-Header-Content-Length: {len(text)}\r\n\r\n").encode() + text


def in_body(connection: Connection, given: np.ndarray, taken: np.ndarray) -> Turn:
    """Return one exchange with both tensors in bodies."""
    tensor = {"name": "INPUT", "datatype": "FP32", "shape": [1, COLUMNS]}
    document = {
        "inputs": [tensor | {"parameters": {"binary_data_size": TENSOR_BYTES}}],
        "outputs": [{"name": "OUTPUT", "parameters": {"binary_data": True}}],
    }
    head, body = head_of(document, TENSOR_BYTES), given.view(np.uint8).data

    def turn() -> None:
        answer = connection.post(head, body)
        taken.view(np.uint8)[:] = answer[-TENSOR_BYTES:]

    return turn


def in_memory(
    connection: Connection, given: np.ndarray, taken: np.ndarray, name: str, memory: shared_memory.SharedMemory
) -> Turn:
    """Return one exchange with both tensors in a registered region, the output behind the input."""
    place = {"shared_memory_region": name, "shared_memory_byte_size": TENSOR_BYTES}
    document = {
        "inputs": [{"name": "INPUT", "datatype": "FP32", "shape": [1, COLUMNS], "parameters": place}],
        "outputs": [{"name": "OUTPUT", "parameters": place | {"shared_memory_offset": TENSOR_BYTES}}],
    }
    head = head_of(document, 0)
    both = np.ndarray((2, COLUMNS), np.float32, memory.buf)

    def turn() -> None:
        both[0] = given
        connection.post(head, None)
        taken[:] = both[1]

    return turn


def measure(turns: list[Turn], seconds: float) -> tuple[float, float]:
    """Return exchanges per second over all clients, and their median latency in ms."""
    latencies: list[list[float]] = [[] for _ in turns]
    stop_at = time.perf_counter() + seconds

    def run(turn: Turn, mine: list[float]) -> None:
        while (began := time.perf_counter()) < stop_at:
            turn()
            mine.append(time.perf_counter() - began)

    began = time.perf_counter()
    threads = [threading.Thread(target=run, args=pair) for pair in zip(turns, latencies, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    every = [latency for mine in latencies for latency in mine]
    return len(every) / (time.perf_counter() - began), statistics.median(every) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--concurrency", default="1,4")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = onnx_models.identity(Path(folder) / "models" / "identity", columns=COLUMNS)
        (model.parent / "manifest.yaml").write_text(MANIFEST)
        node_file = Path(folder) / "node.yaml"
        node_file.write_text("global: {endpoints: {system_shared_memory: {enabled: true}}}\n")
        with Node(model.parent.parent, Path(folder) / "run", node_file=node_file) as node:
            port = node.ports["http_port"]
            for concurrency in map(int, arguments.concurrency.split(",")):
                compare(port, concurrency, arguments.rounds, arguments.seconds)


def compare(port: int, concurrency: int, rounds: int, seconds: float) -> None:
    """Print the figures of one concurrency: median of the rounds, and their range."""
    given = np.random.default_rng(0).standard_normal((1, COLUMNS)).astype(np.float32)
    bodies: list[Turn] = []
    memories: list[Turn] = []
    connections: list[Connection] = []
    objects: list[shared_memory.SharedMemory] = []
    for index in range(concurrency):
        taken = np.zeros(COLUMNS, np.float32)
        memory = shared_memory.SharedMemory(f"bench_{secrets.token_hex(6)}", create=True, size=2 * TENSOR_BYTES)
        objects.append(memory)
        url = f"http://127.0.0.1:{port}/v2/systemsharedmemory/region/r{index}/register"
        body = json.dumps({"key": memory.name, "byte_size": 2 * TENSOR_BYTES}).encode()
        urllib.request.urlopen(urllib.request.Request(url, body)).close()
        connections += [Connection(port), Connection(port)]
        bodies.append(in_body(connections[-2], given[0], taken))
        memories.append(in_memory(connections[-1], given[0], taken, f"r{index}", memory))
        for turn in (bodies[-1], memories[-1]):
            taken[:] = 0
            turn()
            assert np.array_equal(taken, given[0]), "the answer is not what was sent"
    figures: dict[str, list[tuple[float, float]]] = {"HTTP binary": [], "shared memory": []}
    for round_number in range(rounds + 1):
        for kind, turns in (("HTTP binary", bodies), ("shared memory", memories)):
            figure = measure(turns, seconds)
            # The first round warms up.
            if round_number:
                figures[kind].append(figure)
    print(f"concurrency {concurrency}, {rounds} rounds of {seconds} s, load {os.getloadavg()[0]:.1f}")
    for kind, found in figures.items():
        rates = [rate for rate, _ in found]
        mib = statistics.median(rates) * TENSOR_BYTES * 2 / 2**20
        print(
            f"  {kind:14} {statistics.median(rates):7.1f} requests/s ({min(rates):.1f} to {max(rates):.1f}), "
            f"{mib:7.0f} MiB/s both ways, median latency {statistics.median(p50 for _, p50 in found):.2f} ms"
        )
    ratios = [memory[0] / body[0] for body, memory in zip(*figures.values(), strict=True)]
    print(f"  ratio          {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    urllib.request.urlopen(
        urllib.request.Request(f"http://127.0.0.1:{port}/v2/systemsharedmemory/unregister", b"", method="POST")
    ).close()
    for connection in connections:
        connection.close()
    memories.clear()
    for memory in objects:
        memory.unlink()


if __name__ == "__main__":
    main()
