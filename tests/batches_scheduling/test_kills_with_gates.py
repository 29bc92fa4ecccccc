"""Processes of an installation are killed while every gate opens and closes: caps hold, reasons are true, nothing lost.

One route closes its window, one yields to live streams, one looks at its server's load, one is our own worker. In each
round what is true of them changes, and frontends, runners, the worker and the server that tells its load are killed in
between, all drawn from a seed. Then everybody must be told the truth within the 30 s that are promised (in tests it
takes one or two: intervals are a tenth), closed routes must have begun nothing, and open ones must go on. In the end
every line has its one result. A failing run is repeated with its number in SEEDS.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import onnx_models
from frontend.batches.runner.gates import Reason
from frontend.batches.runner.timings import Timings
from frontend.batches.scheduling import metrics_reader, signals
from frontend.batches.store import protocol
from frontend.batches.store.rows import SECOND_US, BatchRow, SchedulingRow
from frontend.platform import route_models
from installation import Installation, Kind, chat, installation, scheduling_path
from node_models import rows_manifest
from postgres_server import postgres_server, postgres_url
from real_node import until
from runner_world import line
from stub_upstream import Say, Seen, StubUpstream, chunk, completion, sse

__all__ = ["postgres_server", "postgres_url"]

PROMISE_S = 30.0
END_S = 120.0
"""When a test is given up: far beyond what a busy machine takes."""
CAP = 2
LINES = 24
"""Of each of two new batches per route and round: a few seconds of work."""
LINE_S = 0.04
OWN = "local.double"
ROUTES = ("win", "live", "load", OWN)
SEEDS = range(40)
KILLED = frozenset({"result_unavailable", "502", "503", "504"})
"""What may become of a line whose runner, worker or server is killed while it runs."""


def test_no_reason_can_be_older_than_promised() -> None:
    """What is shown is fresh, or not shown; and what it was made of was not old either."""
    times = Timings()
    of_settings_s = times.access_s
    of_load_s = times.reading_s + metrics_reader.DEADLINE_S
    assert times.reading_s == metrics_reader.HELD_S
    published_s = max(times.heartbeat_s, 4 * times.publish_s) + times.pass_s
    # A batch's reason, of a runner that is alive; what one that was killed has said is not shown any more after that.
    assert of_settings_s + of_load_s + published_s <= PROMISE_S
    assert of_settings_s + of_load_s + protocol.FRESH_US / SECOND_US <= PROMISE_S
    assert published_s < protocol.FRESH_US / SECOND_US, "a living runner's rows stay fresh"
    # A route's reason: said again while lines wait, and forgotten if nobody does.
    assert signals.EVERY_NS / 1e9 + of_settings_s + of_load_s <= PROMISE_S
    assert route_models.STALE_US / SECOND_US <= PROMISE_S


class Stream:
    """A live call that its upstream holds open; started again if the frontend that had it is killed."""

    def __init__(self, around: Installation, upstream: StubUpstream) -> None:
        self._around = around
        self._upstream = upstream
        self._threads: list[threading.Thread] = []
        self.over = threading.Event()

    def open(self) -> None:
        """Return once the upstream has it."""
        self.over.clear()

        def there() -> bool:
            if not any(thread.is_alive() for thread in self._threads):
                self._threads.append(threading.Thread(target=self._run))
                self._threads[-1].start()
            return self.count() > 0

        try:
            until("a live stream is open", there, END_S)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self._upstream!r} {self._threads} {self._around.told()}") from None

    def close(self) -> None:
        """Return once no upstream is busy with it."""
        self.over.set()
        for thread in self._threads:
            thread.join(END_S)
        until("no live stream is open", lambda: self.count() == 0, END_S)

    def count(self) -> int:
        """Return how many live calls the upstream has under way."""
        return self._upstream.live_in_flight

    def _run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._around.port, timeout=END_S)
        body = chat("live", "live") | {"stream": True}
        # Its frontend may be killed, at any instant.
        with contextlib.suppress(http.client.HTTPException, OSError), contextlib.closing(connection):
            self._around.post(connection, body)
            connection.getresponse().read()


class Torment:
    """One installation, what is true of its routes now, and what kills its processes."""

    def __init__(self, around: Installation, server: StubUpstream, seed: int) -> None:
        self.around = around
        self.server = server
        self.rng = random.Random(seed)
        self.loaded: StubUpstream | None = None
        self.stack = ExitStack()
        self.port = 0
        self.waiting = 0
        self.closed = False
        self.stream = Stream(around, server)
        self.batches: list[tuple[str, BatchRow]] = []
        self.calls: list[Seen] = []
        self.most: Counter[str] = Counter()
        server.default = self.answer

    # What is true

    def answer(self, seen: Seen) -> Say:
        if seen.path == "/metrics":
            return Say(body=f"vllm:num_requests_waiting {self.waiting}\n".encode(), content_type="text/plain")
        if not seen.is_line:
            pieces = [sse(chunk("live", word)) for word in ("one", "two")]
            return Say(pieces=pieces, hold=self.stream.over, content_type="text/event-stream")
        return Say(body=completion(seen.json["model"], text_of(seen)), delay_s=LINE_S)

    def truth(self, route: str) -> Reason | None:
        """Return why nothing may start on a route now."""
        if route == "win" and self.closed:
            return Reason.OUTSIDE_WINDOW
        if route == "live" and self.stream.count():
            return Reason.LIVE_TRAFFIC
        if route == "load" and self.loaded is None:
            return Reason.METRICS_UNAVAILABLE
        if route == "load" and self.waiting:
            return Reason.SERVER_BUSY
        return None

    def change(self, route: str) -> None:
        """Draw anew what is true of a route."""
        if route == "win":
            self.closed = self.rng.random() < 0.6
            self.put("win", **(NEVER if self.closed else {}))
        elif route == "live":
            self.stream.open() if self.rng.random() < 0.6 else self.stream.close()
        elif route == "load":
            self.waiting = self.rng.choice([0, 3])
            if self.rng.random() < 0.5:
                self.kill_server()
            if self.loaded is None and self.rng.random() < 0.5:
                self.start_server()

    def put(self, route: str, **settings: Any) -> None:
        self.run(self.around.world.store.scheduling.put_settings(SchedulingRow(route, CAP, **settings), None))

    def prepare(self) -> None:
        self.start_server()
        self.put("win")
        self.put("live", yield_live_threshold=1)
        self.put("load", metrics_url=f"http://127.0.0.1:{self.port}/metrics", metrics_max_waiting=0)
        self.put(OWN)

    # What kills

    def start_server(self) -> None:
        self.loaded = self.stack.enter_context(StubUpstream(self.port))
        self.loaded.default = self.answer
        self.port = self.loaded.port

    def kill_server(self) -> None:
        """End the server that tells its load, with all that it is doing."""
        if self.loaded is not None:
            self.calls += self.loaded.calls
            self.most |= self.loaded.most_lines
            self.loaded = None
            self.stack.pop_all().close()

    def kill(self, what: str) -> None:
        if what == "runner":
            runner = self.rng.choice(self.around.runners)
            runner.kill()
            runner.start()
            return
        for pid in self.around.node.pids(what):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # What must hold

    def round(self, number: int) -> None:
        for route in ROUTES:
            for workspace, key in (("ws_one", "key_one"), ("ws_two", "key_two")):
                texts = [self.line(route, f"{route}-{workspace}-{number}-{i}", i) for i in range(LINES)]
                endpoint = "/v2/models/double/infer" if route == OWN else "/v1/chat/completions"
                model = "double" if route == OWN else route
                made = self.around.world.batch(texts, workspace=workspace, key=key, model=model, endpoint=endpoint)
                self.batches.append((route, self.run(made)))
        steps = [*ROUTES[:3], *self.rng.choices(["runner", "runner", "frontend", "worker"], k=self.rng.randrange(2, 4))]
        self.rng.shuffle(steps)
        for step in steps:
            self.run(asyncio.sleep(self.rng.random() * 0.2))
            if step in ROUTES:
                self.change(step)
            else:
                self.kill(step)
        self.until_told()
        self.closed_stays_closed()

    def until_told(self) -> None:
        """Wait, for no longer than was promised, until nothing untrue is told; then until everything is told."""
        self.until("nothing untrue is told", self.is_honest, PROMISE_S)
        # How long a killed process takes to come back is the machine's affair.
        for runner in self.around.runners:
            runner.wait_ready()
        before = self.progress()
        self.until("the truth is told, and open routes go on", lambda route: self.is_told(route, before), END_S)

    def until(self, what: str, holds: Callable[[str], bool], timeout_s: float) -> None:
        left: list[str] = []

        def probe() -> bool:
            nonlocal left
            left = [route for route in ROUTES if not holds(route)]
            return not left

        try:
            until(what, probe, timeout_s)
        except AssertionError as error:
            seen = {route: (self.truth(route), self.shown(route), self.paused(route)) for route in left}
            raise AssertionError(f"{error}: true, shown and paused are {seen}; {self.around.told()}") from None

    def is_honest(self, route: str) -> bool:
        """Return whether all reasons that are shown are true; what nobody can tell is not shown."""
        reasons, running = self.shown(route)
        assert running <= CAP, f"{running} lines run on {route}"
        paused = self.paused(route)
        told = reasons if paused is None else [*reasons, paused]
        return all(self.is_true(route, reason) for reason in told)

    def is_true(self, route: str, reason: str | None) -> bool:
        truth = self.truth(route)
        return reason == truth if truth is not None else reason not in signals.PAUSES

    def is_told(self, route: str, before: Counter[str]) -> bool:
        reasons, running = self.shown(route)
        assert running <= CAP, f"{running} lines run on {route}"
        truth = self.truth(route)
        if truth is None:
            return self.progress()[route] > before[route] or not reasons
        told = set(reasons) <= {truth} and (not reasons or self.paused(route) == truth)
        return told and running == 0

    def shown(self, route: str) -> tuple[list[str | None], int]:
        """Return why the batches of a route wait, and how many lines run on it."""
        store = self.around.world.store
        waits = self.run(store.scheduling.fresh_waits(route))
        counts = {count.route_id: count.running_lines for count in self.run(store.scheduling.route_counts())}
        return [wait.reason for wait in waits if wait.waiting_lines], counts.get(route, 0)

    def paused(self, route: str) -> str | None:
        """Return what the API says, None also while no frontend can be asked."""
        with contextlib.suppress(http.client.HTTPException, OSError):
            status, answer = self.around.call("GET", scheduling_path(route))
            # 503: it has only just been started again.
            assert status in (200, 503), answer
            return answer["status"]["paused_reason"] if status == 200 else None
        return None

    def progress(self) -> Counter[str]:
        """Return how many lines have ended by route."""
        found: Counter[str] = Counter()
        for route, batch in self.batches:
            row = self.run(self.around.world.store.batches.get(None, batch.id))
            assert row is not None
            found[route] += row.request_completed + row.request_failed
        return found

    def closed_stays_closed(self) -> None:
        """Kill a runner, and let its successor look: what was closed has begun nothing meanwhile."""
        closed = [route for route in ROUTES if self.truth(route) is not None]
        before = self.lines()
        self.kill(self.rng.choice(["runner", "worker"]))
        for runner in self.around.runners:
            runner.wait_ready()
        self.until_told()
        after = self.lines()
        assert {route: after[route] for route in closed} == {route: before[route] for route in closed}

    def lines(self) -> Counter[str]:
        """Return how many lines have reached the upstreams, by route."""
        return Counter(seen.json["model"] for seen in self.seen())

    def seen(self) -> list[Seen]:
        calls = [*self.calls, *self.server.calls, *(self.loaded.calls if self.loaded is not None else ())]
        return [seen for seen in calls if seen.is_line]

    def line(self, route: str, text: str, number: int) -> bytes:
        if route != OWN:
            return line(number, route, text)
        tensor = {"name": "INPUT", "datatype": "FP32", "shape": [1, 4], "data": [float(number)] * 4}
        return line(number, url="/v2/models/double/infer", body={"inputs": [tensor]})

    def finish(self) -> None:
        """Open everything; then every batch ends, and each line has reached an upstream at most once."""
        self.waiting, self.closed = 0, False
        self.put("win")
        self.stream.close()
        if self.loaded is None:
            self.start_server()
        sent = Counter(text_of(seen) for seen in self.seen())
        for route, batch in self.batches:
            done = self.run(self.around.world.ended(batch))
            listed = Counter(one["custom_id"] for one in [*done.output, *done.errors])
            assert sorted(listed.values()) == [1] * LINES, f"{batch.id} on {route}: {listed}"
            assert done.batch.state == "completed"
            assert (done.batch.request_completed, done.batch.request_failed) == (len(done.output), len(done.errors))
            assert set(done.codes.values()) <= KILLED, f"{route}: {done.codes}"
        sent = Counter(text_of(seen) for seen in self.seen())
        assert max(sent.values()) == 1, sent.most_common(3)
        self.kill_server()
        most = self.most | self.server.most_lines
        assert most.keys() == set(ROUTES[:3])
        assert max(most.values()) <= CAP, most

    def run(self, work: Any) -> Any:
        return self.around.world.world.run(work)


NEVER: dict[str, Any] = {
    "window_timezone": "UTC", "window_days": 1 << (time.gmtime().tm_wday + 3) % 7,
    "window_start_minute": 720, "window_end_minute": 780,
}  # fmt: skip
"""A window that no clock is near."""


def text_of(seen: Seen) -> str:
    return str(seen.json["messages"][0]["content"])


def tormented(kind: Kind, store: str, directory: Path, seed: int, *, runners: int, rounds: int) -> None:
    models = directory / "models"
    path = onnx_models.affine(models / "double", columns=4)
    (path.parent / "manifest.yaml").write_text(rows_manifest())
    with StubUpstream() as reserved:
        port = reserved.port
    with StubUpstream() as server:
        gateway = {"models": [model(name, port if name == "load" else server.port) for name in ROUTES[:3]]}
        with installation(kind, store, directory, gateway, runners=runners, frontends=2) as around:
            around.world.world.run(around.world.workspace("two"))
            torment = Torment(around, server, seed)
            torment.port = port
            try:
                torment.prepare()
                for number in range(rounds):
                    torment.round(number)
                torment.finish()
            finally:
                torment.stream.over.set()
                torment.kill_server()


def model(name: str, port: int) -> dict[str, Any]:
    route = {
        "id": name, "kind": "vllm", "endpoint": f"http://127.0.0.1:{port}/v1", "addresses": ["127.0.0.1"],
        "failures_to_open": 1000,
    }  # fmt: skip
    return {"name": name, "routes": [route]}


@pytest.mark.process
@pytest.mark.parametrize("seed", [0])
def test_kills_with_gates_on_postgresql(seed: int, tmp_path: Path, postgres_url: str) -> None:
    tormented("postgresql", postgres_url, tmp_path, seed, runners=3, rounds=2)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_many_kills_with_gates(seed: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Even seeds on SQLite, odd ones on PostgreSQL; one or three runners in turn."""
    store = request.getfixturevalue("postgres_url") if seed % 2 else ""
    kind: Kind = "postgresql" if store else "sqlite"
    tormented(kind, store, tmp_path, seed, runners=(1, 3)[seed // 2 % 2], rounds=4)
