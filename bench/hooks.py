"""What hooks cost per request, and how frontends scale with them.

    .venv/bin/python bench/hooks.py [--passes 5] [--seconds 2]

Five models that compute the same: without hooks, with hooks of a microsecond (inline and on a thread), and with a
``preprocess`` that keeps a core busy for 2 ms. Overhead is the difference of the median latency of one caller against
the model without hooks, taken alternating. Scaling is the rate of the 2 ms model at 16 callers with two frontends
against one, alternating as well. Takes two minutes. Writes bench/results/hooks.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent.parent / "tests")]

import numpy as np
import uvloop

import onnx_models
from bench import load
from bench.end_to_end import machine, spread
from real_node import Node

MANIFEST = """format_version: "1"
kind: model
executable_inputs:
  - {{name: INPUT, dtype: f32, shape: nc, dims: {{c: 64}}}}
executable_outputs:
  - {{name: OUTPUT, dtype: f32, shape: nc, dims: {{c: 64}}}}
batching: {{compiled_batch_sizes: [1, 8, 32]}}
hooks: {{mode: {mode}}}
"""
QUICK = "def preprocess(inputs, ctx):\n    return inputs\n\n\ndef postprocess(outputs, ctx):\n    return outputs\n"
SLOW = """import time


def preprocess(inputs, ctx):
    end = time.thread_time_ns() + 2_000_000
    while time.thread_time_ns() < end:
        pass
    return inputs
"""
MODELS = {
    "plain": ("thread", ""),
    "quick_inline": ("inline", QUICK),
    "quick_thread": ("thread", QUICK),
    "busy_2ms": ("thread", SLOW),
    "busy_2ms_inline": ("inline", SLOW),
}


def make_models(root: Path) -> None:
    """Write the five bundles."""
    for name, (mode, code) in MODELS.items():
        path = onnx_models.mlp(root / name, 2, 64)
        (path.parent / "manifest.yaml").write_text(MANIFEST.format(mode=mode))
        if code:
            (path.parent / "model.py").write_text(code)


def drive(port: int, model: str, concurrency: int, seconds: float) -> dict[str, Any]:
    """Run one closed loop; fail if anything but a result came back."""
    inputs = {"INPUT": ("FP32", np.ones((1, 64), np.float32))}

    async def run() -> dict[str, Any]:
        senders = await load.http_senders("127.0.0.1", port, load.binary_infer(model, inputs), concurrency)
        return (await load.closed_loop(senders, seconds, warm_up_s=0.5)).summary()

    summary = uvloop.run(run())
    if summary["errors"]:
        raise SystemExit(f"{model}: {summary['errors']}")
    if not summary["ok_per_s"]:
        raise SystemExit(f"{model}: no answer within {seconds} s; measure when the machine is idle, or for longer")
    return summary


def measure(passes: int, seconds: float) -> dict[str, Any]:
    """Alternate everything."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder) / "models"
        make_models(models)
        with (
            Node(models, Path(folder) / "one", frontends=1) as one,
            Node(models, Path(folder) / "two", frontends=2) as two,
        ):
            ports = one.ports["http_port"], two.ports["http_port"]
            for number in range(passes):
                row: dict[str, Any] = {name: drive(ports[0], name, 1, seconds)["p50_ms"] for name in MODELS}
                for name in ("busy_2ms", "busy_2ms_inline"):
                    row[f"{name} 1"] = drive(ports[0], name, 16, seconds)["ok_per_s"]
                    row[f"{name} 2"] = drive(ports[1], name, 16, seconds)["ok_per_s"]
                rows.append(row)
                print(f"pass {number}: {json.dumps(row)}", file=sys.stderr, flush=True)
    return {"machine": machine(), "passes": passes, "seconds": seconds, "rows": rows}


def table(result: dict[str, Any]) -> str:
    """Render the Markdown tables."""
    rows = result["rows"]
    lines = ["| hooks | added to p50 of one caller, us |", "|---|---|"]
    for name in ("quick_inline", "quick_thread", "busy_2ms"):
        added = [1000 * (row[name] - row["plain"]) for row in rows]
        lines.append(f"| {name} | {statistics.median(added):.0f} ({min(added):.0f} to {max(added):.0f}) |")
    lines += ["", "| 2 ms of CPU in preprocess, 16 callers | two frontends / one |", "|---|---|"]
    for name in ("busy_2ms", "busy_2ms_inline"):
        lines.append(f"| {name} | {spread([row[f'{name} 2'] / row[f'{name} 1'] for row in rows])} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    arguments = parser.parse_args()
    result = measure(arguments.passes, arguments.seconds)
    folder = Path(__file__).with_name("results")
    folder.mkdir(exist_ok=True)
    (folder / "hooks.json").write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
