"""Pictures of a comparison: requests/s by concurrency, and p50 with p99, one file per model.

    .venv/bin/python bench/plot.py bench/results/compare_peers.json

Needs the extra ``bench`` (matplotlib). Points are medians; whiskers reach from the smallest to the largest pass.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

import matplotlib

from bench.peers import report

matplotlib.use("Agg")
from matplotlib import pyplot

COLOURS = ("#d62728", "#7f7f7f", "#1f77b4", "#2ca02c", "#98df8a", "#ff7f0e", "#9467bd", "#8c564b")
STYLES = {"v2bin": "-", "raw": "-", "v2json": "--", "json": "--", "grpc": ":", "shm": "-."}


def draw(result: dict[str, Any], folder: Path, prefix: str) -> list[Path]:
    """Write one PNG per model and return their paths."""
    peers = list(dict.fromkeys(point["peer"] for point in result["points"]))
    colours = {peer: COLOURS[number % len(COLOURS)] for number, peer in enumerate(peers)}
    return [
        _model(report.select(result["points"], model=model), model, colours, folder / f"{prefix}_{model}.png")
        for model in result["scope"]["models"]
        if report.select(result["points"], model=model)
    ]


def _model(points: list[dict[str, Any]], model: str, colours: dict[str, str], path: Path) -> Path:
    figure, (rates, latencies) = pyplot.subplots(1, 2, figsize=(14, 6))
    for peer, form in dict.fromkeys((point["peer"], point["format"]) for point in points):
        levels = sorted({point["concurrency"] for point in report.select(points, peer=peer, format=form)})
        runs = [report.select(points, peer=peer, format=form, concurrency=level) for level in levels]
        look = {"color": colours[peer], "linestyle": STYLES.get(form, "-"), "marker": "o", "markersize": 4}
        middles = [statistics.median(point["per_s"] for point in run) for run in runs]
        below = [middle - min(point["per_s"] for point in run) for middle, run in zip(middles, runs, strict=True)]
        above = [max(point["per_s"] for point in run) - middle for middle, run in zip(middles, runs, strict=True)]
        rates.errorbar(levels, middles, yerr=[below, above], capsize=3, label=f"{peer} {form}", **look)
        p50 = [statistics.median(point["p50_ms"] for point in run) for run in runs]
        p99 = [statistics.median(point["p99_ms"] for point in run) for run in runs]
        whiskers = [[0.0] * len(p50), [max(0.0, high - low) for low, high in zip(p50, p99, strict=True)]]
        latencies.errorbar(levels, p50, yerr=whiskers, capsize=3, label=f"{peer} {form}", **look)
    for axes, title in ((rates, "requests/s, median and range"), (latencies, "ms: p50, whisker up to p99")):
        axes.set(title=f"{model}: {title}", xlabel="callers", xscale="log", yscale="log")
        axes.set_xticks(sorted({point["concurrency"] for point in points}))
        axes.get_xaxis().set_major_formatter(matplotlib.ticker.ScalarFormatter())
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    rates.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return path


def main() -> None:
    """Draw a result file's pictures beside it."""
    source = Path(sys.argv[1])
    for path in draw(json.loads(source.read_text()), source.parent, source.stem):
        print(path)


if __name__ == "__main__":
    main()
