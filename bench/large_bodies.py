"""Large tensors in HTTP bodies, received where the worker reads them against collected first; alternating in one run.

    python bench/large_bodies.py [--rounds 7] [--seconds 1] [--concurrency 1,4] [--kib 3072] [--model identity]

Two nodes of one frontend, one of which never receives directly (a patch of this benchmark, not a setting). Both have
the same clients: threads on plain sockets. CPU is what the frontend used per request, which other load on the
machine disturbs least.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "bench")]

from client_memory import Connection, Turn, head_of, measure

import onnx_models
from real_node import Node

PATCH = """import os, sys
if "frontend" in sys.orig_argv[1:4]:
    import frontend.kserve.http_routes
    frontend.kserve.http_routes.DIRECT_BYTES = int(os.environ["DIRECT_BYTES"])
"""
NEVER = 1 << 40
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def manifest(columns: int, outputs: int) -> str:
    """Return a manifest for a model INPUT -> OUTPUT of rows."""
    return (
        'format_version: "1"\nkind: model\n'
        f"executable_inputs:\n  - {{name: INPUT, dtype: f32, shape: nc, dims: {{c: {columns}}}}}\n"
        f"executable_outputs:\n  - {{name: OUTPUT, dtype: f32, shape: nc, dims: {{c: {outputs}}}}}\n"
        "batching: {compiled_batch_sizes: [1, 4]}\n"
    )


def write_models(root: Path, columns: int) -> None:
    """Write an identity and a sum over the row."""
    for path, outputs in (
        (onnx_models.identity(root / "identity", columns=columns), columns),
        (onnx_models.row_sum(root / "reduce", columns), 1),
    ):
        (path.parent / "manifest.yaml").write_text(manifest(columns, outputs))


def in_body(connection: Connection, model: str, given: np.ndarray) -> Turn:
    """Return one exchange that leaves the answer where it was received."""
    size = {"parameters": {"binary_data_size": given.nbytes}}
    document: dict[str, object] = {
        "inputs": [{"name": "INPUT", "datatype": "FP32", "shape": [1, given.size]} | size],
        "outputs": [{"name": "OUTPUT", "parameters": {"binary_data": True}}],
    }
    head, body = head_of(document, given.nbytes, model), given.view(np.uint8).data
    expected = given if model == "identity" else None
    answer = connection.post(head, body)
    if expected is not None:
        assert answer[-given.nbytes :] == body, "the answer is not what was sent"

    def turn() -> None:
        connection.post(head, body)

    return turn


def cpu_s(pid: int) -> float:
    """Return the CPU seconds a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def compare(nodes: dict[str, Node], model: str, columns: int, concurrency: int, rounds: int, seconds: float) -> None:
    """Print the figures of one model and concurrency: median of the rounds, and the range of their ratios."""
    given = np.random.default_rng(0).standard_normal(columns).astype(np.float32)
    turns: dict[str, list[Turn]] = {}
    connections: list[Connection] = []
    pids = {kind: node.pids("frontend")[0] for kind, node in nodes.items()}
    for kind, node in nodes.items():
        made = [Connection(node.ports["http_port"]) for _ in range(concurrency)]
        connections += made
        turns[kind] = [in_body(connection, model, given) for connection in made]
    figures: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in nodes}
    for round_number in range(rounds + 1):
        for kind in nodes:
            before = cpu_s(pids[kind])
            rate, p50_ms = measure(turns[kind], seconds)
            cpu_ms = (cpu_s(pids[kind]) - before) / (rate * seconds) * 1000
            # The first round warms up.
            if round_number:
                figures[kind].append((rate, p50_ms, cpu_ms))
    print(f"{model}, {columns * 4 >> 10} KiB, concurrency {concurrency}, load {os.getloadavg()[0]:.1f}")
    for kind, found in figures.items():
        rate, p50_ms, cpu_ms = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"  {kind:9} {rate:8.1f} requests/s, p50 {p50_ms:7.3f} ms, frontend CPU {cpu_ms:6.3f} ms per request")
    pairs = list(zip(figures["direct"], figures["collected"], strict=True))
    for index, what in enumerate(("rate", "p50", "CPU")):
        ratios = [direct[index] / collected[index] for direct, collected in pairs]
        print(f"  {what:4} ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    for connection in connections:
        connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--concurrency", default="1,4")
    parser.add_argument("--kib", default="3072")
    parser.add_argument("--model", choices=["identity", "reduce", "both"], default="both")
    arguments = parser.parse_args()
    models = ["identity", "reduce"] if arguments.model == "both" else [arguments.model]
    for kib in map(int, arguments.kib.split(",")):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_models(folder / "models", kib * 256)
            (folder / "sitecustomize.py").write_text(PATCH)
            path = os.pathsep.join((name, str(ROOT)))
            made = {
                kind: Node(
                    folder / "models", folder / kind, frontends=1,
                    env={"PYTHONPATH": path, "DIRECT_BYTES": str(size)},
                )
                for kind, size in (("direct", 1), ("collected", NEVER))
            }  # fmt: skip
            with made["direct"], made["collected"]:
                for model in models:
                    for concurrency in map(int, arguments.concurrency.split(",")):
                        compare(made, model, kib * 256, concurrency, arguments.rounds, arguments.seconds)


if __name__ == "__main__":
    main()
