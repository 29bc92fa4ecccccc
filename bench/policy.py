"""Compare disciplines and sizings on traces: who gets the device, who waits how long, what a row costs.

Run ``python bench/policy.py``. The scheduler is the real one; device and clock are simulated (``tests/sim``), so
figures depend on seeds and costs only, not on the machine. Ten models, costs a hundredfold apart, weights 1 to 3. Half
of them spend most of a run on overhead, half on compute (three times cheaper per row at 32 than at 1). Every model is
offered the same device time; the load 1.0 is what the device could carry if all batches were full.

``device us per row`` depends on which models were served; ``over best`` does not: device time spent, over what the
same rows would take in full batches of the best size.

Writes ``policy.md`` and ``policy-models.csv``, and ``policy.png`` when matplotlib is installed, to ``--out``.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "sim")]

from scheduler_sim import Result, Scenario, SimModel, simulate

from worker.scheduling.types import Discipline, Sizing

SIZES = (1, 8, 32)
MODELS = 10
POLICIES = [(discipline, sizing) for discipline in Discipline for sizing in Sizing]


@dataclass(frozen=True, slots=True)
class Trace:
    """Named traffic: ten models and how long it lasts."""

    name: str
    models: tuple[SimModel, ...]
    duration_s: float


def synthetic(kind: str, load: float, duration_s: float) -> Trace:
    """Return ``poisson``, ``bursts`` or ``heavy_tail`` traffic at ``load`` times the capacity of full batches."""
    models = []
    for index in range(MODELS):
        base_ms = 0.2 * 100 ** (index / (MODELS - 1))
        heavy_rows = index % 2
        row_ms = base_ms * (0.45 if heavy_rows else 0.03)
        per_row_s = (base_ms / SIZES[-1] + row_ms) / 1000
        rate = load / MODELS / per_row_s
        model = SimModel(
            f"m{index}-{base_ms:.1f}ms", sizes=SIZES, run_ms=base_ms, row_ms=row_ms, jitter=0.05,
            weight=float(1 + index % 3), budget_ms=(500.0, 2000.0),
        )  # fmt: skip
        if kind == "bursts":
            # An eighth of a second's requests at once, out of step with each other.
            every_s = 0.125 + 0.003 * index
            model = replace(model, burst=max(1, round(rate * every_s)), burst_every_s=every_s)
        else:
            model = replace(model, rate=rate, heavy_tail=kind == "heavy_tail")
        models.append(model)
    return Trace(f"{kind} {load:g}x", tuple(models), duration_s)


def recorded(path: Path, like: Trace) -> Trace:
    """Return the arrivals of a CSV file (seconds, model number, rows), served by the models of ``like``."""
    arrivals: list[list[tuple[float, int]]] = [[] for _ in like.models]
    with path.open(newline="", encoding="utf-8") as lines:
        for number, line in enumerate(csv.reader(lines), 1):
            try:
                at_s, model, rows = float(line[0]), int(line[1]), int(line[2])
                arrivals[model].append((at_s, rows))
            except (ValueError, IndexError) as error:
                raise SystemExit(
                    f"{path}, line {number}: seconds, model 0 to {MODELS - 1} and rows needed: {line}"
                ) from error
    models = (
        replace(model, rate=0.0, burst=0, arrivals=tuple(sorted(times)))
        for model, times in zip(like.models, arrivals, strict=True)
    )
    last_s = max((times[-1][0] for times in arrivals if times), default=0.0)
    return Trace(path.stem, tuple(models), last_s + 1e-6)


@dataclass(frozen=True, slots=True)
class Row:
    """One policy on one trace."""

    trace: Trace
    discipline: Discipline
    sizing: Sizing
    result: Result

    def share_error(self) -> float:
        """Return the largest distance of a model's device share from its weight share."""
        weights = sum(model.weight for model in self.trace.models)
        return max(abs(self.result.share(model.name) - model.weight / weights) for model in self.trace.models)

    def over_best(self) -> float:
        """Return device time spent over what the served rows would take in full batches of the best size."""
        best_ns = 0.0
        for model in self.trace.models:
            best_ns += self.result.rows[model.name] * min(model.cost_ns(size) / size for size in model.sizes)
        return sum(self.result.compute_ns.values()) / best_ns

    def cells(self) -> list[str]:
        result = self.result
        rows = sum(result.rows.values())
        waits = [wait for waits in result.waits_ns.values() for wait in waits]
        padding = sum(result.padding.values())
        missed = result.missed / max(1, result.missed + result.met)
        return [
            self.trace.name, self.discipline.value, self.sizing.value,
            f"{sum(result.compute_ns.values()) / rows / 1e3:.1f}", f"{self.over_best():.3f}", f"{rows}",
            f"{rows / sum(result.runs.values()):.2f}", f"{padding / (rows + padding):.1%}",
            f"{quantile_ms(waits, 0.5):.1f}", f"{quantile_ms(waits, 0.99):.1f}", f"{missed:.2%}",
            f"{self.share_error():.3f}",
        ]  # fmt: skip


HEADINGS = [
    "trace", "discipline", "sizing", "device us per row", "over best", "rows served", "rows per dispatch", "padding",
    "p50 wait ms", "p99 wait ms", "missed", "worst share error",
]  # fmt: skip


def quantile_ms(waits_ns: list[int], fraction: float) -> float:
    """Return a quantile of waits; 0 if there is none."""
    ordered = sorted(waits_ns)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))] / 1e6 if ordered else 0.0


def compare(trace: Trace, seed: int) -> Iterable[Row]:
    """Yield every policy's result on a trace. Misses include requests dropped for their deadline or a full queue."""
    for discipline, sizing in POLICIES:
        scenario = Scenario(
            trace.name, trace.models, discipline, sizing, trace.duration_s, halflife_s=2.0, warm=True, seed=seed
        )
        result = simulate(scenario)
        result.missed += result.outcomes.get("queue_full", 0)
        yield Row(trace, discipline, sizing, result)


def write_table(rows: list[Row], path: Path) -> None:
    lines = [" | ".join(HEADINGS), " | ".join("---" for _ in HEADINGS)]
    lines += [" | ".join(row.cells()) for row in rows]
    text = "\n".join(f"| {line} |" for line in lines) + "\n"
    path.write_text(text, encoding="utf-8")
    print(text)


def write_models(rows: list[Row], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(
            ["trace", "discipline", "sizing", "model", "weight share", "device share", "p50 wait ms", "p99 wait ms"]
        )
        for row in rows:
            weights = sum(model.weight for model in row.trace.models)
            for model in row.trace.models:
                waits = row.result.waits_ns[model.name]
                out.writerow([
                    row.trace.name, row.discipline.value, row.sizing.value, model.name, f"{model.weight / weights:.4f}",
                    f"{row.result.share(model.name):.4f}", f"{quantile_ms(waits, 0.5):.2f}",
                    f"{quantile_ms(waits, 0.99):.2f}",
                ])  # fmt: skip


def write_plots(rows: list[Row], path: Path) -> bool:
    """Draw device time per row, p99 wait and device shares; False if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    traces = list(dict.fromkeys(row.trace.name for row in rows))
    figure, axes = pyplot.subplots(3, 1, figsize=(11, 13), constrained_layout=True)
    for place, (discipline, sizing) in enumerate(POLICIES):
        mine = [row for row in rows if (row.discipline, row.sizing) == (discipline, sizing)]
        at = [index + (place - 2.5) * 0.13 for index in range(len(traces))]
        label = f"{discipline.value}, {sizing.value}"
        axes[0].bar(at, [row.over_best() for row in mine], 0.12, label=label)
        p99 = [quantile_ms([w for ws in row.result.waits_ns.values() for w in ws], 0.99) for row in mine]
        axes[1].bar(at, p99, 0.12, label=label)
    for axis, title in ((axes[0], "Device time over that of full batches"), (axes[1], "p99 queue wait, ms")):
        axis.set_title(title)
        axis.set_xticks(range(len(traces)), traces)
        axis.legend(ncols=3)
    overload = [row for row in rows if row.trace.name == traces[-1]]
    names = [model.name for model in overload[0].trace.models]
    for row in overload:
        label = f"{row.discipline.value}, {row.sizing.value}"
        axes[2].plot(names, [row.result.share(name) for name in names], marker="o", label=label)
    weights = sum(model.weight for model in overload[0].trace.models)
    axes[2].plot(names, [model.weight / weights for model in overload[0].trace.models], "k--", label="weights")
    axes[2].set_title(f"Device share per model, {traces[-1]}")
    axes[2].legend(ncols=3)
    figure.savefig(path, dpi=110)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--seconds", type=float, default=10.0, help="simulated time of each synthetic trace")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--recorded", type=Path, action="append", default=[], help="CSV: seconds, model 0 to 9, rows")
    arguments = parser.parse_args()
    kinds = ("poisson", "bursts", "heavy_tail")
    traces = [synthetic(kind, load, arguments.seconds) for load in (0.3, 0.7, 1.5) for kind in kinds]
    traces += [recorded(path, traces[0]) for path in arguments.recorded]
    rows = [row for trace in traces for row in compare(trace, arguments.seed)]
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_table(rows, arguments.out / "policy.md")
    write_models(rows, arguments.out / "policy-models.csv")
    if not write_plots(rows, arguments.out / "policy.png"):
        print("matplotlib is not installed: no plots")


if __name__ == "__main__":
    main()
