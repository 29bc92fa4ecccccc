"""One caller's requests as a timeline: the microseconds between milestones (bench/tracing), for every way of a request.

Used by bench/profile.py. Every process notes on the one monotonic clock when it passes a milestone; requests do not
overlap, so a stage's time is the difference of two moments, wake-ups and waiting included. Noting costs time too: the
client's latency without it is told beside it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from bench import load
from bench.peers import models, servers
from bench.peers.models import Spec
from bench.peers.servers import Plan, Running
from bench.tracing.milestones import PLACES, WAYS, Milestone

ROOT = Path(__file__).resolve().parent.parent
TRACING = ROOT / "bench" / "tracing"
FEWEST_REQUESTS = 100
NEVER = np.iinfo(np.int64).max


class NoProfile(Exception):
    """A measurement gave nothing to tell; the text says why."""


def timelines(events: dict[int, np.ndarray], way: Sequence[Milestone]) -> tuple[list[int], np.ndarray]:
    """Return the milestones of a way that were passed and, for every request, the moments it passed them. Pure.

    Requests that went another way are left out.

    Args:
        events: sorted nanoseconds by position in ``PLACES``, of all processes together.

    Raises:
        NoProfile: no request passed the first milestone.
    """
    noted = [events.get(PLACES.index((milestone.place, milestone.leave)), np.empty(0, np.int64)) for milestone in way]
    present = [number for number, found in enumerate(noted) if len(found)]
    if not present or present[0] != 0:
        raise NoProfile(f"nobody passed {way[0].place}")
    starts = noted[0]
    ends = np.append(starts[1:], NEVER)
    moments = [starts]
    for number in present[1:]:
        found = noted[number]
        at = np.searchsorted(found, moments[-1], side="left")
        moments.append(np.where(at < len(found), found[np.minimum(at, len(found) - 1)], NEVER))
    table = np.stack(moments, axis=1)
    return present, table[(table[:, -1] < ends) & (table[:, -1] < NEVER)]


def stages(way: Sequence[Milestone], present: list[int], table: np.ndarray) -> list[dict[str, Any]]:
    """Return the stages with their microseconds; a missing milestone's stage joins the next one. Pure."""
    spans = np.diff(table, axis=1) / 1e3
    found = []
    for index, (before, number) in enumerate(itertools.pairwise(present)):
        names = [way[missing].stage for missing in range(before + 1, number + 1)]
        p50, p90 = np.percentile(spans[:, index], [50, 90])
        found.append({"stage": " + ".join(names), "p50_us": round(float(p50), 2), "p90_us": round(float(p90), 2)})
    return found


def read_events(folder: Path) -> dict[int, np.ndarray]:
    """Return what the processes noted, by position in ``PLACES``."""
    pieces = [np.fromfile(file, np.int64).reshape(-1, 2) for file in folder.iterdir()]
    if not pieces:
        return {}
    every = np.concatenate(pieces)
    return {number: np.sort(every[every[:, 1] == number, 0]) for number in range(len(PLACES))}


def request_maker(running: Running, spec: Spec, way: str) -> Any:
    """Return what renders one request after another that go ``way``."""
    payload = models.payload(spec, "v2bin")
    path = running.plan.paths["v2bin"]
    text, tensors = payload.body[: payload.header_bytes], payload.body[payload.header_bytes :]
    if way == "repeat":
        same = load.http_request(path, payload.body, _headers(text))
        return lambda: same
    numbers = itertools.count()

    def differing() -> bytes:
        # Neither its head nor its JSON is known: both differ in more than what traces a request.
        number = f"{next(numbers):08d}"
        own = text.rstrip().removesuffix(b"}") + f',"id":"{number}"}}'.encode()
        return load.http_request(path, own + tensors, _headers(own) | {"X-Number": number})

    return differing


def _headers(text: bytes) -> dict[str, str]:
    return {"Inference-Header-Content-Length": str(len(text))}


def one_caller(running: Running, spec: Spec, way: str, seconds: float) -> float:
    """Return the median latency in us of a closed loop with one connection.

    Raises:
        NoProfile: a request failed.
    """
    make = request_maker(running, spec, way)

    async def measure() -> load.Result:
        connection = await load.connect("127.0.0.1", running.plan.http_port)

        async def send() -> str:
            status, _ = await connection.call(make())
            return "ok" if status == 200 else str(status)

        return await load.closed_loop([send], seconds)

    summary = uvloop.run(measure()).summary()
    if summary["errors"] or not summary["ok_per_s"]:
        raise NoProfile(f"one caller, {way}: answers {summary['errors'] or 'none'}")
    return round(float(summary["p50_ms"]) * 1e3, 1)


def timeline(home: Path, path: Path, spec: Spec, seconds: float) -> dict[str, Any]:
    """Measure one caller's stages, by way; the client's latency with and without tracing besides."""
    plain = latencies(servers.TWO_FRONTENDS, home, path, spec, seconds)
    folder = home / "trace"
    folder.mkdir()
    traced = latencies(observed({"RINGSERVE_TRACE": folder}), home, path, spec, seconds)
    events = read_events(folder)
    found = {}
    for name, way in WAYS.items():
        present, table = timelines(events, way)
        if len(table) < FEWEST_REQUESTS:
            raise NoProfile(f"only {len(table)} requests passed every milestone of the way {name!r}")
        total = (table[:, -1] - table[:, 0]) / 1e3
        found[name] = {
            "requests": len(table), "stages": stages(way, present, table),
            "missing": [way[n].place for n in range(len(way)) if n not in present],
            "server_p50_us": round(float(np.median(total)), 1), "client_p50_us": traced[name],
            "client_untraced_p50_us": plain[name],
        }  # fmt: skip
    return found


def latencies(peer: servers.Peer, home: Path, path: Path, spec: Spec, seconds: float) -> dict[str, float]:
    """Return the median latency in us of either way."""
    running = servers.start(peer, home, path, spec)
    try:
        return {way: one_caller(running, spec, way, seconds) for way in WAYS}
    finally:
        running.stop()


def observed(folders: dict[str, Path]) -> servers.Peer:
    """Return our server as a peer whose processes observe themselves (bench/tracing): folders by variable."""
    ours = servers.TWO_FRONTENDS

    def plan(home: Path, model_file: Path, spec: Spec) -> Plan:
        made = ours.plan(home, model_file, spec)
        made.environment["PYTHONPATH"] = os.pathsep.join((str(TRACING), str(ROOT)))
        made.environment.update({variable: str(folder) for variable, folder in folders.items()})
        return made

    return servers.Peer(f"{ours.name}-observed", "", ours.formats, plan)
