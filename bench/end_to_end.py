"""The first figures: a node against (i) the inline server and (ii) the raw ONNX Runtime loop, alternating in one run.

    .venv/bin/python bench/end_to_end.py [--passes 5] [--seconds 3]

Writes bench/results/end_to_end.json and prints the tables of bench/README.md. Every number is taken in alternation
(A B A B ...) and told as the median and the range of the per-pass ratios; the machine's speed cancels within a pass.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent.parent / "tests")]

import numpy as np
import onnxruntime
import uvloop

import onnx_models
from bench import load
from real_node import Node

TINY, MLP25M = "tiny", "mlp25m"
BATCH = 32


def make_models(root: Path) -> dict[str, tuple[Path, int]]:
    """Write the two models; return file and width of each."""
    tiny = onnx_models.mlp(root / TINY, 2, 64)
    big = onnx_models.mlp(root / MLP25M, 24, 1024)
    for path, width in ((tiny, 64), (big, 1024)):
        tensor = f"dtype: f32, shape: nc, dims: {{c: {width}}}"
        (path.parent / "manifest.yaml").write_text(
            f'format_version: "1"\nkind: model\nexecutable_inputs:\n  - {{name: INPUT, {tensor}}}\n'
            f"executable_outputs:\n  - {{name: OUTPUT, {tensor}}}\nbatching: {{compiled_batch_sizes: [1, 8, 32]}}\n"
        )
    return {TINY: (tiny, 64), MLP25M: (big, 1024)}


def raw_rows_per_s(path: Path, width: int, seconds: float) -> float:
    """Run the model in a plain loop at batch 32 on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    batch = np.random.default_rng(1).random((BATCH, width), np.float32)
    session.run(None, {"INPUT": batch})
    end, runs = time.perf_counter() + seconds, 0
    start = time.perf_counter()
    while time.perf_counter() < end:
        session.run(None, {"INPUT": batch})
        runs += 1
    return runs * BATCH / (time.perf_counter() - start)


def drive(
    port: int, model: str, width: int, concurrency: int, seconds: float, protocol: str = "http"
) -> dict[str, Any]:
    """Run one closed loop in this process; raise if anything but a result came back."""
    inputs = {"INPUT": ("FP32", np.random.default_rng(1).random((1, width), np.float32))}

    async def run() -> dict[str, Any]:
        if protocol == "grpc":
            senders = await load.grpc_senders("127.0.0.1", port, model, inputs, concurrency)
        else:
            request = load.binary_infer(model, inputs)
            senders = await load.http_senders("127.0.0.1", port, request, concurrency)
        return (await load.closed_loop(senders, seconds, warm_up_s=0.5)).summary()

    summary = uvloop.run(run())
    if summary["errors"]:
        raise SystemExit(f"{model} c={concurrency} {protocol}: errors {summary['errors']}")
    return summary


def spread(values: list[float]) -> str:
    """Return median and range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def measure(passes: int, seconds: float) -> dict[str, Any]:
    """Alternate all configurations ``passes`` times."""
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        models = make_models(Path(folder) / "models")
        command = [sys.executable, str(Path(__file__).with_name("inline_server.py")), "--models", f"{folder}/models"]
        inline = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert inline.stdout is not None
            inline_port = int(inline.stdout.readline().split()[1])
            with Node(Path(folder) / "models", Path(folder) / "run", frontends=2) as node:
                ports = node.ports
                for number in range(passes):
                    for model, (path, width) in models.items():
                        raw = raw_rows_per_s(path, width, min(seconds, 2.0))
                        for concurrency in (1, 16, 64):
                            key = f"{model} c={concurrency}"
                            row = {
                                "raw": raw,
                                "inline": drive(inline_port, model, width, concurrency, seconds),
                                "node": drive(ports["http_port"], model, width, concurrency, seconds),
                            }
                            if concurrency == 64:
                                row["grpc"] = drive(ports["grpc_port"], model, width, concurrency, seconds, "grpc")
                            found.setdefault(key, []).append(row)
                            print(f"pass {number} {key}: {json.dumps(row)}", file=sys.stderr, flush=True)
        finally:
            inline.kill()
            inline.wait()
    return {"machine": machine(), "passes": passes, "seconds": seconds, "rows": found}


def machine() -> dict[str, Any]:
    """Return what a reader must know of where this ran."""
    return {"cpus": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0], "python": sys.version.split()[0]}


def table(result: dict[str, Any]) -> str:
    """Render the Markdown table."""
    lines = [
        "| model, callers | node / inline | node / raw loop at batch 32 | req/s | p50 ms (inline) | p99 ms (inline) |",
        "|---|---|---|---|---|---|",
    ]
    for key, rows in result["rows"].items():
        ratio = [row["node"]["ok_per_s"] / row["inline"]["ok_per_s"] for row in rows]
        of_raw = [row["node"]["ok_per_s"] / row["raw"] for row in rows]

        def middle(who: str, what: str, rows: list[dict[str, Any]] = rows) -> float:
            return statistics.median(row[who][what] for row in rows)

        lines.append(
            f"| {key} | {spread(ratio)} | {spread(of_raw)} | {middle('node', 'ok_per_s'):.0f} "
            f"| {middle('node', 'p50_ms'):.2f} ({middle('inline', 'p50_ms'):.2f}) "
            f"| {middle('node', 'p99_ms'):.2f} ({middle('inline', 'p99_ms'):.2f}) |"
        )
        if "grpc" in rows[0]:
            grpc = [row["grpc"]["ok_per_s"] / row["inline"]["ok_per_s"] for row in rows]
            lines.append(
                f"| {key}, gRPC | {spread(grpc)} | | {middle('grpc', 'ok_per_s'):.0f} "
                f"| {middle('grpc', 'p50_ms'):.2f} | {middle('grpc', 'p99_ms'):.2f} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    arguments = parser.parse_args()
    result = measure(arguments.passes, arguments.seconds)
    folder = Path(__file__).with_name("results")
    folder.mkdir(exist_ok=True)
    (folder / "end_to_end.json").write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
