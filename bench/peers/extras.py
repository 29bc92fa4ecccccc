"""Two questions that a closed loop of equal requests cannot answer: latency at a given rate, and bad neighbours.

Both use our own client (``bench/load.py``), which shares the machine with the server; the rate of the open loop is
therefore a share of what this client reaches in a closed loop, not of what wrk reaches.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import uvloop

from bench import load
from bench.peers import models, probe
from bench.peers.models import Spec
from bench.peers.servers import Running

OPEN_LOOP_SHARE = 0.7
OPEN_LOOP_CONNECTIONS = 64
CLOSED_LOOP_S = 3.0
GOOD_CALLERS = 24
BAD_PAUSE_S = 0.02
"""Between malformed requests: one bad client, not a flood."""


def open_loop(running: Running, spec: Spec, seconds: float) -> dict[str, Any]:
    """Return the client's closed-loop maximum, and latencies from the due time at 70 % of it."""
    request = _request(running, models.payload(spec, "v2bin"))

    async def measure() -> dict[str, Any]:
        port = running.plan.http_port
        senders = await load.http_senders("127.0.0.1", port, request, OPEN_LOOP_CONNECTIONS)
        most = (await load.closed_loop(senders, CLOSED_LOOP_S)).summary()["ok_per_s"]
        found = (await load.open_loop(senders, OPEN_LOOP_SHARE * most, seconds)).summary()
        return {"closed_loop_per_s": most, "rate_per_s": round(OPEN_LOOP_SHARE * most, 1), **found}

    return probe.in_namespace(running.namespace_pid, lambda: uvloop.run(measure()))


def beside_malformed(running: Running, spec: Spec, seconds: float) -> dict[str, Any]:
    """Return how good callers fared while one caller sent rows that are an element short."""
    form = running.peer.formats[0]
    good = _request(running, models.payload(spec, form))
    bad = _request(running, models.malformed(spec, form))
    seen: dict[str, Counter[str]] = {"good": Counter(), "bad": Counter()}

    async def caller(who: str, request: bytes, end: float, pause_s: float) -> None:
        connection = None
        while time.perf_counter() < end:
            try:
                if connection is None:
                    connection = await load.connect("127.0.0.1", running.plan.http_port)
                status, _ = await connection.call(request)
                seen[who][str(status)] += 1
            except (ConnectionError, OSError) as error:
                seen[who][type(error).__name__] += 1
                connection = None
            if pause_s:
                await asyncio.sleep(pause_s)

    async def measure() -> None:
        end = time.perf_counter() + seconds
        good_callers = [caller("good", good, end, 0.0) for _ in range(GOOD_CALLERS)]
        work = asyncio.gather(*good_callers, caller("bad", bad, end, BAD_PAUSE_S))
        await asyncio.wait_for(work, seconds + probe.TIMEOUT_S)

    try:
        probe.in_namespace(running.namespace_pid, lambda: uvloop.run(measure()))
    except TimeoutError:
        seen["good"]["no answer"] += 1
    answered = seen["good"]["200"]
    failed = seen["good"].total() - answered
    return {"good": answered, "good_failed": failed, "statuses": {who: dict(count) for who, count in seen.items()}}


def _request(running: Running, payload: models.Payload) -> bytes:
    headers = {"Content-Type": payload.content_type}
    if payload.header_bytes:
        headers["Inference-Header-Content-Length"] = str(payload.header_bytes)
    return load.http_request(running.plan.paths[payload.format], payload.body, headers)
