"""From points to statements: medians with ranges, ratios pass by pass, tables, and what was promised. Pure.

A ratio is formed within a pass, where both sides met the same machine, and told as median (smallest to largest). A
server that took part in fewer passes than we did enters the others with the median of its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

OURS = "ringserve"
INLINE = "inline"
BINARY = ("v2bin", "raw")
JSON = ("v2json", "json")
DISTURBED_CORES = 0.3
"""Other processes took at least this much: the point is marked."""

Point = dict[str, Any]


@dataclass(frozen=True)
class Promise:
    """One thing we said we would reach. ``measured`` is empty if this run cannot tell."""

    text: str
    at_least: float | None
    at_most: float | None
    measured: tuple[float, ...]

    @property
    def kept(self) -> bool | None:
        """Judged by the median."""
        if not self.measured:
            return None
        middle = statistics.median(self.measured)
        return (self.at_least is None or middle >= self.at_least) and (self.at_most is None or middle <= self.at_most)


def spread(values: Iterable[float], digits: int = 2) -> str:
    """Return median and range."""
    found = list(values)
    if not found:
        return "-"
    low, middle, high = (f"{value:.{digits}f}" for value in (min(found), statistics.median(found), max(found)))
    return middle if len(found) == 1 else f"{middle} ({low} to {high})"


def select(points: Iterable[Point], **wanted: Any) -> list[Point]:
    """Return the points whose fields equal ``wanted``; a tuple means any of it."""

    def fits(point: Point) -> bool:
        return all(
            point[field] in value if isinstance(value, tuple) else point[field] == value
            for field, value in wanted.items()
        )

    return [point for point in points if fits(point)]


def by_pass(
    points: list[Point], field: str, choose: Callable[[Iterable[float]], float], passes: list[int]
) -> list[float]:
    """Return, for every pass, the chosen (max, min) of what the contenders reached; empty without points."""
    contenders: dict[tuple[Any, ...], dict[int, float]] = {}
    for point in points:
        key = (point["peer"], point["format"], point["concurrency"])
        contenders.setdefault(key, {})[point["pass"]] = point[field]
    if not contenders:
        return []
    middles = {key: statistics.median(values.values()) for key, values in contenders.items()}
    return [choose(values.get(number, middles[key]) for key, values in contenders.items()) for number in passes]


def ratios(
    ours: list[Point], theirs: list[Point], field: str = "per_s", choose: Callable[[Iterable[float]], float] = max
) -> tuple[float, ...]:
    """Return ours / best of theirs for every pass of ours; empty if either side is missing."""
    passes = sorted({point["pass"] for point in ours})
    mine = by_pass(ours, field, choose, passes)
    best = by_pass(theirs, field, choose, passes)
    return tuple(a / b for a, b in zip(mine, best, strict=False) if b)


def promises(result: dict[str, Any]) -> list[Promise]:
    """Return the promises about speed that a comparison can judge."""
    points = result["points"]
    peers = [point for point in points if point["peer"] not in (OURS, INLINE)]
    triton = [point for point in points if point["peer"].startswith("triton")]
    most = max((point["concurrency"] for point in select(points, model=("mlp_a", "mlp_b"))), default=0)

    def ours(model: str, form: str, concurrency: int = most) -> list[Point]:
        return select(points, peer=OURS, model=model, format=form, concurrency=concurrency)

    def at(side: list[Point], model: str, concurrency: int = most, **more: Any) -> list[Point]:
        return select(side, model=model, concurrency=concurrency, **more)

    found: list[Promise] = []

    def add(text: str, measured: tuple[float, ...], least: float | None = None, most_: float | None = None) -> None:
        found.append(Promise(text, least, most_, measured))

    for form, alike in (("v2bin", "v2bin"), ("v2json", "v2json"), ("grpc", "grpc")):
        add(
            f"mlp_a c={most} {form} / Triton {alike}", ratios(ours("mlp_a", form), at(triton, "mlp_a", format=alike)), 4
        )
    for form in ("v2bin", "v2json"):
        add(f"mlp_a c={most} {form} / best peer, any format", ratios(ours("mlp_a", form), at(peers, "mlp_a")), 1.3)
    raw = result["raw_loop"].get("mlp_b", [])
    of_raw = tuple(point["per_s"] / raw[point["pass"]] for point in ours("mlp_b", "v2bin") if point["pass"] < len(raw))
    add(f"mlp_b c={most} v2bin / raw ONNX Runtime rows/s at batch 32", of_raw, 0.85)
    add(f"mlp_b c={most} v2bin / best peer, any format", ratios(ours("mlp_b", "v2bin"), at(peers, "mlp_b")), 1)
    add(f"mlp_b c={most} v2bin / Triton v2bin", ratios(ours("mlp_b", "v2bin"), at(triton, "mlp_b", format="v2bin")), 2)
    json_peers = at(peers, "mlp_b", format=JSON)
    add(f"mlp_b c={most} v2json / best peer's JSON", ratios(ours("mlp_b", "v2json"), json_peers), 5)
    for model, limit in (("mlp_b", 1.25), ("mlp_a", 2.0)):
        inline = at(points, model, 1, peer=INLINE, format="v2bin")
        one = ours(model, "v2bin", 1)
        add(f"{model} c=1 p50 / inline single process", ratios(one, inline, "p50_ms", min), None, limit)
        add(f"{model} c=1 p50 / best peer", ratios(one, at(peers, model, 1), "p50_ms", min), None, 1)
    big, big_peers = select(points, model="big", peer=OURS), select(peers, model="big")
    for form, alike in (("v2bin", BINARY), ("shm", ("shm",))):
        who = "best peer" if form == "v2bin" else "Triton"
        measured = ratios(select(big, format=form), select(big_peers, format=alike))
        add(f"3 MiB tensors {form} MB/s / {who}", measured, 1.5)
    for row in result["open_loop"]:
        if row["peer"] == OURS and row["p50_ms"]:
            add(f"{row['model']} open loop at 70 %: p99 / p50", (row["p99_ms"] / row["p50_ms"],), None, 5)
    for row in result["malformed"]:
        if row["peer"] == OURS:
            add("good requests failed beside malformed ones", (float(row["good_failed"]),), None, 0)
    return found


def promise_table(result: dict[str, Any]) -> str:
    """Render the promises and whether this run kept them."""
    lines = ["| promise | target | measured | kept |", "|---|---|---|---|"]
    for promise in promises(result):
        target = f"at least {promise.at_least:g}" if promise.at_least is not None else f"at most {promise.at_most:g}"
        kept = {True: "yes", False: "**no**", None: "not measured"}[promise.kept]
        lines.append(f"| {promise.text} | {target} | {spread(promise.measured)} | {kept} |")
    return "\n".join(lines)


def model_table(result: dict[str, Any], model: str) -> str:
    """Render one model: a row per server and format, a column per concurrency; the fastest first."""
    points = select(result["points"], model=model)
    levels = sorted({point["concurrency"] for point in points})
    rows = sorted({(point["peer"], point["format"]) for point in points})

    def cell(peer: str, form: str, level: int) -> str:
        found = select(points, peer=peer, format=form, concurrency=level)
        if not found:
            return "-"
        marks = "*" if any(point["other_cores"] >= DISTURBED_CORES for point in found) else ""
        marks += "!" if any(point["errors"] for point in found) else ""
        p50, p99 = (statistics.median(point[field] for point in found) for field in ("p50_ms", "p99_ms"))
        return f"{spread((point['per_s'] for point in found), 0)}{marks}, {p50:.2f} / {p99:.1f}"

    def rate(row: tuple[str, str]) -> float:
        found = select(points, peer=row[0], format=row[1], concurrency=levels[-1])
        return max((point["per_s"] for point in found), default=0.0)

    heads = " | ".join(f"c={level}: req/s, p50 / p99 ms" for level in levels)
    lines = [f"| server | format | {heads} | server cores |", "|---|---|" + "---|" * (len(levels) + 1)]
    for peer, form in sorted(rows, key=rate, reverse=True):
        cells = " | ".join(cell(peer, form, level) for level in levels)
        used = [point["server_cores"] for point in select(points, peer=peer, format=form, concurrency=levels[-1])]
        lines.append(f"| {peer} | {form} | {cells} | {spread(used)} |")
    return "\n".join(lines)


def idle_table(result: dict[str, Any]) -> str:
    """Render what servers take while nobody asks."""
    lines = ["| server | idle cores | PSS MiB | processes | ready after s |", "|---|---|---|---|---|"]
    for peer, row in result["idle"].items():
        lines.append(f"| {peer} | {row['cores']} | {row['pss_mib']} | {row['processes']} | {row['ready_s']} |")
    return "\n".join(lines)


def document(result: dict[str, Any]) -> str:
    """Render a whole comparison as Markdown."""
    machine, scope = result["machine"], result["scope"]
    speeds = [point["speed"] for point in result["points"]]
    others = [point["other_cores"] for point in result["points"]]
    ahead = ", ahead of other processes" if machine["urgent"] else ""
    parts = [
        f"Commit {machine['commit']}, {machine['date']}. {machine['cpus']} cores ({machine['cpu']}), Python "
        f"{machine['python']}, our hot path {machine.get('hot_path', 'interpreted')}, ONNX Runtime "
        f"{machine['onnxruntime']}. Load average {machine['load_before']} before, "
        f"{machine['load_after']} after; other processes took {spread(others)} cores during points; speed of a Python "
        f"loop {spread(speeds, 0)} M turns/s. {scope['seconds']} s a point, up to {scope['passes']} passes in "
        f"alternation{ahead}: median (smallest to largest). `*`: other processes took 0.3 core or more in a pass; `!`: "
        "errors.",
        promise_table(result),
    ]
    for model in scope["models"]:
        if select(result["points"], model=model):
            raw = result["raw_loop"].get(model, [])
            parts += [f"**{model}** (raw loop: {spread(raw, 0)} rows/s)", model_table(result, model)]
    if result["idle"]:
        parts.append(idle_table(result))
    for row in result["open_loop"]:
        parts.append(
            f"- Open loop {row['model']} {row['peer']}: {row['rate_per_s']:.0f}/s asked, {row['ok_per_s']:.0f}/s "
            f"answered, p50 {row['p50_ms']} ms, p99 {row['p99_ms']} ms, p99.9 {row['p999_ms']} ms, errors "
            f"{row['errors'] or 'none'}, not sent {row['not_sent']}"
        )
    for row in result["malformed"]:
        parts.append(f"- Beside malformed rows, {row['peer']}: {row['good']} good, {row['good_failed']} good failed")
    for name, why in result["unavailable"].items():
        parts.append(f"- {name}: {why.strip().splitlines()[0]}")
    for row in result["left_out"]:
        parts.append(f"- {row['peer']} {row['model']} {row['what']}: {row['why'].strip().splitlines()[0]}")
    return "\n\n".join(parts) + "\n"


def replace_section(text: str, marker: str, content: str) -> str:
    """Return a document with what lies between a marker's two comments replaced.

    Raises:
        ValueError: the document lacks the marker.
    """
    begin, end = f"<!-- {marker} begin -->", f"<!-- {marker} end -->"
    head, found, rest = text.partition(begin)
    _, found_end, tail = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"no section {begin} ... {end}")
    return f"{head}{begin}\n{content.strip()}\n{end}{tail}"
