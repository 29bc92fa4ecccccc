"""Acceptance tests 6 to 9, 15 to 18 and 25 on real processes: either database, with one runner process and with three.

Which test covers what of batches.md 3.2, tests 6 to 18 and 25; "here" runs in all four cells (CI: PostgreSQL with
three runners; the other three are slow tests):

====  ======================  ===========================================================  =========================
test  these four cells        in one process, both databases                               needs neither
====  ======================  ===========================================================  =========================
6     here                    batches_store/test_store_claims, batches_runner/test_gates_acceptance
7     here                    batches_runner/test_gates_acceptance
8     here                    the same; killed frontends: batches_runner/test_gates_node
9     here                    the same
10    here (what people see)                                                               test_metrics_reader
11                                                                                         test_server_load
12                                                                                         test_settings_documents
13    here (opens, closes)                                                                 test_window_rules
14                            platform/test_scheduling_api                                 test_settings_documents
15    here                    batches_outlook/test_outlook_acceptance
16    here                    the same
17    here                    platform/test_scheduling_api, batches_runner/test_gates_acceptance
18    here, but ``workers``   the same, ``workers`` too: batches_runner/test_runner_acceptance
25    here (pauses)           platform/test_scheduling_api, platform/test_platform_node
====  ======================  ===========================================================  =========================

SQLite lets one process run batches: with three, two of them stand by.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest

from frontend.batches.runner.gates import Reason
from frontend.batches.scheduling.alerts import AlertDuty
from frontend.batches.scheduling.forecast import Forecaster
from frontend.batches.store.rows import SECOND_US
from frontend.gateway_settings import AlertRule, AlertSettings, BatchSettings
from frontend.openai.development import WORKSPACE_ID
from installation import (
    DAYS,
    WAIT_S,
    Installation,
    Kind,
    chat,
    closed_window,
    installation,
    open_window,
    scheduling_path,
)
from postgres_server import PostgresServer, fresh_database, postgres_server
from real_node import until
from stub_upstream import Say, Seen, StubUpstream, chunk, completion, sse

__all__ = ["postgres_server"]

pytestmark = pytest.mark.process

LINE_S = 0.03
MODELS = ("m6", "m7", "m8a", "m8b", "m9", "m10", "m13", "m15", "m16m", "m16n", "m17", "m18", "m18f", "m18p", "m25")
"""A model, and its route of the same name, for each test: they share their processes."""
GOOD = b"vllm:num_requests_waiting 0\nvllm:num_requests_running 1\nvllm:kv_cache_usage_perc 0.5\n"
CELLS = [
    pytest.param(("sqlite", 1), id="sqlite-1", marks=pytest.mark.slow),
    pytest.param(("sqlite", 3), id="sqlite-3", marks=pytest.mark.slow),
    pytest.param(("postgresql", 1), id="postgresql-1", marks=pytest.mark.slow),
    pytest.param(("postgresql", 3), id="postgresql-3"),
]


class Cell:
    """An installation, its upstream, and how that answers.

    Attributes:
        runners: that run batches at once.
        pages: what the upstream of a model says of its load.
        lines: how lines of a model are answered, instead of with their own text.
    """

    def __init__(
        self, around: Installation, upstream: StubUpstream, loaded: Mapping[str, StubUpstream], runners: int
    ) -> None:
        self.around = around
        self.upstream = upstream
        self.loaded = loaded
        self.runners = runners
        self.pages: dict[str, Say] = {}
        self.lines: dict[str, Callable[[Seen], Say]] = {}
        self._over: dict[str, threading.Event] = {}
        upstream.default = self._answer
        for model, server in loaded.items():
            server.default = partial(self._answer, model=model)

    def load(self, model: str, **gauges: float) -> None:
        """Let a model's upstream say this of its load."""
        text = "".join(f"vllm:{name} {value}\n" for name, value in gauges.items())
        self.pages[model] = plain(text.encode())

    def seen(self, model: str, *, live: bool = False) -> list[Seen]:
        """Return the lines of a model, or its live calls, that its upstream has seen."""
        calls = [seen for seen in list(self.loaded.get(model, self.upstream).calls) if seen.path != "/metrics"]
        return [seen for seen in calls if seen.json["model"] == model and seen.is_line is not live]

    @contextmanager
    def streams(self, model: str, calls: int = 1) -> Iterator[Callable[[], None]]:
        """Hold live streams of a model open until what this yields is called, or to the end of the block."""
        over = self._over[model] = threading.Event()
        before = len(self.seen(model, live=True))
        with self.around.streaming(model, calls):
            try:
                self.upstream.wait(lambda _: len(self.seen(model, live=True)) == before + calls)
                yield over.set
            finally:
                over.set()

    @contextmanager
    def no_runners(self) -> Iterator[None]:
        """Kill every runner; start them again at the end of the block."""
        for runner in self.around.runners:
            runner.kill()
        try:
            yield
        finally:
            for runner in self.around.runners:
                runner.start()
            for runner in self.around.runners:
                runner.wait_ready()

    def pauses(self, reason: Reason) -> int:
        """Return how often gates have closed for a reason, in all processes."""
        name = "gateway_batch_route_pauses_total"
        every = [one for runner in self.around.runners for one in runner.series()]
        return sum(int(one.value) for one in every if one.name == name and one.labels == {"reason": reason})

    def paused_reasons(self) -> set[str]:
        """Return the reasons that the installation's own series has, from whichever process tells it."""
        every = [one for runner in self.around.runners for one in runner.series()]
        return {one.labels["reason"] for one in every if one.name == "gateway_batch_paused_routes"}

    def cancel(self, batch_id: str) -> None:
        self.around.client().batches.cancel(batch_id)
        assert self.around.ended(batch_id).status == "cancelled"

    def _answer(self, seen: Seen, model: str = "") -> Say:
        if seen.path == "/metrics":
            return self.pages.get(model, plain(GOOD))
        model = seen.json["model"]
        if not seen.is_line and seen.json.get("stream"):
            pieces = [sse(chunk(model, word)) for word in ("one", "two")]
            return Say(pieces=pieces, hold=self._over[model], content_type="text/event-stream")
        if model in self.lines:
            return self.lines[model](seen)
        return Say(body=completion(model, seen.json["messages"][0]["content"]), delay_s=LINE_S)


@pytest.fixture(scope="module", params=CELLS)
def cell(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    kind: Kind
    kind, runners = request.param
    directory = tmp_path_factory.mktemp("cell")
    server: PostgresServer | None = request.getfixturevalue("postgres_server") if kind == "postgresql" else None
    with ExitStack() as stack:
        upstream = stack.enter_context(StubUpstream())
        # Each its own: what one test has read must not be believed in the next.
        loaded = {model: stack.enter_context(StubUpstream()) for model in ("m9", "m10", "m16m")}
        store = stack.enter_context(fresh_database(server))
        models = [_model(name, "vllm", loaded.get(name, upstream).url) for name in MODELS]
        models.append(_model("cloud", "openai", ""))
        around = stack.enter_context(
            installation(kind, store, directory, {"models": models}, runners=runners, settings=_settings(loaded))
        )
        yield Cell(around, upstream, loaded, runners if kind == "postgresql" else 1)


def _model(name: str, kind: str, url: str) -> dict[str, Any]:
    pinned = {"endpoint": url, "addresses": ["127.0.0.1"], "failures_to_open": 1000} if url else {}
    return {"name": name, "routes": [{"id": name, "kind": kind} | pinned]}


def _settings(loaded: Mapping[str, StubUpstream]) -> dict[str, dict[str, Any]]:
    """Return how the routes are scheduled from the start: nothing tells when all runners have heard of a change."""
    opens = datetime.now(UTC).replace(minute=0) + timedelta(hours=2)
    later = {"timezone": "UTC", "days": list(DAYS), "start": f"{opens:%H:%M}", "end": f"{opens:%H}:59"}
    return {
        "m6": {"max_concurrency": 1, "yield_live_threshold": 1},
        "m7": {"yield_live_threshold": 1},
        "m8a": {"yield_live_threshold": 2},
        "m8b": {"yield_live_threshold": 2},
        "m9": {"metrics": _limits(loaded["m9"], max_waiting=0, max_kv_cache_percent=90)},
        "m10": {"metrics": _limits(loaded["m10"], max_waiting=0)},
        "m13": {"window": closed_window()},
        "m15": {"window": later},
        "m16m": {"metrics": _limits(loaded["m16m"], max_waiting=0)},
        "m16n": {"window": closed_window()},
        "m17": {"priority": 7},
        "m18f": {"max_concurrency": 1},
        "m25": {"window": closed_window()},
    }


def plain(page: bytes) -> Say:
    return Say(body=page, content_type="text/plain")


def _limits(upstream: StubUpstream, **limits: int) -> dict[str, Any]:
    return {"url": upstream.metrics_url, **limits}


def test_acceptance_6_tiny_batches_are_no_trick(cell: Cell) -> None:
    around = cell.around
    big_key, tiny_key = (around.new_key(f"ws_six_{name}") for name in ("big", "tiny"))
    with cell.streams("m6") as end:
        before = len(cell.seen("m6"))
        big = around.submit(*[("m6", f"big {i}") for i in range(20)], key=big_key)
        tiny = [around.submit(("m6", f"tiny {i}"), key=tiny_key) for i in range(20)]
        around.until_status("m6", queued_lines=40, paused_reason="live_traffic")
        end()
        around.ended(big, big_key)
        assert {around.ended(one, tiny_key).status for one in tiny} == {"completed"}
    order = [_text(seen).split()[0] for seen in cell.seen("m6")[before:]]
    assert len(order) == 40
    for start in range(len(order) - 9):
        assert 4 <= order[start : start + 10].count("tiny") <= 6, order
    assert cell.upstream.most_lines["m6"] == 1


def test_acceptance_7_yield(cell: Cell) -> None:
    around = cell.around
    before = len(cell.seen("m7"))
    with cell.streams("m7") as end:
        batch = around.submit(("m7", "one"), ("m7", "two"))
        around.until_waiting(batch, "m7", "live_traffic")
        around.until_status("m7", paused_reason="live_traffic", live_in_flight=1, queued_lines=2)
        page = around.page(batch)
        assert (page["scheduling"][0]["position"], page["scheduling"][0]["queue"]) == (1, 1)
        assert (page["batch"]["status"], page["batch"]["waiting_reason"]) == ("in_progress", "live_traffic")
        assert around.client().batches.retrieve(batch).status == "in_progress"
        assert len(cell.seen("m7")) == before
        end()
        assert around.ended(batch).request_counts.completed == 2
    assert len(cell.seen("m7")) == before + 2


def test_acceptance_8_boundary_and_streams_count_to_their_end(cell: Cell) -> None:
    around = cell.around
    with cell.streams("m8a"):
        assert around.ended(around.submit(("m8a", "starts"))).request_counts.completed == 1
    with cell.streams("m8b", 2) as end:
        batch = around.submit(("m8b", "waits"))
        around.until_waiting(batch, "m8b", "live_traffic")
        around.until_status("m8b", live_in_flight=2, running_lines=0)
        end()
        assert around.ended(batch).request_counts.completed == 1


def test_acceptance_9_metrics_busy_fail_recover(cell: Cell) -> None:
    around = cell.around
    cell.load("m9", num_requests_waiting=3, kv_cache_usage_perc=0.2)
    batch = around.submit(("m9", "one"), ("m9", "two"))
    around.until_waiting(batch, "m9", "server_busy")
    reading = around.until_status("m9", paused_reason="server_busy")["metrics"]
    assert (reading["ok"], reading["waiting"], reading["kv_cache_permille"]) == (True, 3, 200)
    cell.pages["m9"] = Say(500, body=b"no")
    reading = around.until_status("m9", paused_reason="metrics_unavailable")["metrics"]
    assert (reading["ok"], reading["error"]) == (False, "http_status")
    around.until_waiting(batch, "m9", "metrics_unavailable")
    cell.load("m9", num_requests_waiting=0, kv_cache_usage_perc=0.95)
    reading = around.until_status("m9", paused_reason="server_busy")["metrics"]
    assert reading["kv_cache_permille"] == 950
    assert not cell.seen("m9")
    cell.load("m9", num_requests_waiting=0, num_requests_running=1, kv_cache_usage_perc=0.5)
    assert around.ended(batch).status == "completed"


def test_acceptance_10_people_see_why_a_server_cannot_be_read(cell: Cell) -> None:
    around = cell.around
    cell.load("m10", num_requests_waiting=3)
    batch = around.submit(("m10", "one"))
    around.until_waiting(batch, "m10", "server_busy")
    pages = {
        "http_status": Say(302, body=b"", headers={"Location": "/elsewhere"}),
        "timeout": Say(fault="silence"),
        "too_large": plain(b"# " + b"x" * (1 << 20) + b"\n" + GOOD),
        "invalid_body": plain(GOOD + b"\xff\n"),
        "missing_metric": plain(b"vllm:kv_cache_usage_perc 0.2\n"),
        "unreachable": Say(fault="reset"),
    }
    for error, page in pages.items():
        cell.pages["m10"] = page
        around.until_status("m10", paused_reason="metrics_unavailable")
        until(f"it says {error}", lambda: around.status("m10")["metrics"]["error"] == error, WAIT_S)  # noqa: B023
        assert around.status("m10")["metrics"]["ok"] is False
    around.until_waiting(batch, "m10", "metrics_unavailable")
    asked = [seen for seen in cell.loaded["m10"].calls if seen.path == "/metrics"]
    assert not any("authorization" in seen.headers or "cookie" in seen.headers for seen in asked)
    assert not any(seen.path.endswith("elsewhere") for seen in cell.loaded["m10"].calls)
    cell.pages["m10"] = plain(GOOD)
    assert around.ended(batch).status == "completed"


def test_acceptance_13_windows_open_and_close_in_every_process(cell: Cell) -> None:
    around = cell.around
    held = [around.submit(("m13", str(i))) for i in range(6)]
    for batch in held:
        around.until_waiting(batch, "m13", "outside_window")
    assert not cell.seen("m13")
    around.put("m13", window=open_window())
    assert {around.ended(batch).status for batch in held} == {"completed"}
    assert len(cell.seen("m13")) == len(held)


def test_acceptance_15_a_window_holds_and_is_no_stall(cell: Cell) -> None:
    around, world = cell.around, cell.around.world.world
    batch = around.submit(("m15", "one"), ("m15", "two"))
    around.until_waiting(batch, "m15", "outside_window")
    _no_progress_for_an_hour(cell, batch)
    until("it is written that it waits", lambda: _row(cell, batch).last_waited_at, WAIT_S)
    assert batch not in _incidents(cell)
    with cell.no_runners():
        # Six minutes in which nobody says that it waits.
        world.sql(
            "UPDATE batches SET last_waited_at = last_waited_at - :ago WHERE id = :id", ago=360 * SECOND_US, id=batch
        )
        assert batch in _incidents(cell)
        around.put("m15", window=open_window())
        assert not cell.seen("m15")
    assert around.ended(batch).request_counts.completed == 2
    assert batch not in _incidents(cell)


def test_acceptance_16_unreadable_metrics_are_a_stall_also_beside_a_closed_window(cell: Cell) -> None:
    around = cell.around
    cell.pages["m16m"] = Say(fault="reset")
    both = around.submit(("m16m", "one"), ("m16n", "two"))
    windowed = around.submit(("m16n", "one"))
    around.until_waiting(both, "m16m", "metrics_unavailable")
    around.until_waiting(both, "m16n", "outside_window")
    around.until_waiting(windowed, "m16n", "outside_window")
    until("it is written that one waits", lambda: _row(cell, windowed).last_waited_at, WAIT_S)
    for batch in (both, windowed):
        _no_progress_for_an_hour(cell, batch)
    assert _incidents(cell) & {both, windowed} == {both}
    for batch in (both, windowed):
        cell.cancel(batch)
    assert not _incidents(cell) & {both, windowed}
    cell.pages["m16m"] = plain(GOOD)


def test_acceptance_17_priority_hint(cell: Cell) -> None:
    around = cell.around
    own = chat("m17", "own") | {"priority": -5}

    def priorities() -> set[Any]:
        """Return with which priority a batch is sent now."""
        before = len(cell.seen("m17"))
        assert around.ended(around.submit(("m17", "a"), own)).request_counts.completed == 2
        return {seen.json.get("priority", "none") for seen in cell.seen("m17")[before:]}

    assert priorities() == {7}
    assert around.call("POST", "/v1/chat/completions", chat("m17", "live"))[0] == 200
    assert "priority" not in cell.seen("m17", live=True)[-1].json
    for value in (0, -1, 1_000_001):
        status, answer = around.call("PUT", scheduling_path("m17"), {"max_concurrency": 2, "priority": value})
        assert (status, answer["error"]["param"]) == (400, "priority")
    status, answer = around.call("PUT", scheduling_path("cloud"), {"max_concurrency": 2, "priority": 7})
    assert (status, answer["error"]["param"]) == (400, "priority")
    around.put("m17")
    until("no line has one", lambda: priorities() == {"none"}, WAIT_S)


def test_acceptance_18_reasons(cell: Cell) -> None:
    around = cell.around
    over = threading.Event()
    cell.lines["m18"] = cell.lines["m18f"] = lambda seen: Say(body=completion("m18"), hold=over)
    # Without settings of its own a route runs two lines.
    batch = around.submit(*[("m18", str(i)) for i in range(5)])
    around.until_status("m18", running_lines=2, queued_lines=3)
    around.until_waiting(batch, "m18", "concurrency")

    both = [around.submit(*[("m18f", f"{name}{i}") for i in range(3)]) for name in "ab"]
    expected = {("concurrency", "fair_share")}
    if cell.runners > 1:
        # A runner whose claim finds the route full cannot tell whose turn it is.
        expected.add(("concurrency", "concurrency"))

    def reasons() -> bool:
        found = tuple(sorted(str(around.waits(one).get("m18f")) for one in both))
        return found in expected and around.status("m18f")["running_lines"] == 1

    until("one is full, and it is not the other's turn", reasons, WAIT_S)
    over.set()
    assert {around.ended(one).status for one in (batch, *both)} == {"completed"}
    assert (cell.upstream.most_lines["m18"], cell.upstream.most_lines["m18f"]) == (2, 1)


def test_acceptance_18_precedence(cell: Cell) -> None:
    around = cell.around
    busy = {"error": {"message": "busy", "type": "x", "param": None, "code": "busy"}}
    cell.lines["m18p"] = lambda seen: Say(429, body=busy, headers={"Retry-After": "120"})
    limited = around.submit(*[("m18p", str(i)) for i in range(9)])
    around.until_waiting(limited, "m18p", "rate_limited")
    del cell.lines["m18p"]
    around.put("m18p", yield_live_threshold=1, window=closed_window())
    other = _until_held(cell, "m18p", "outside_window")
    with cell.streams("m18p"):
        late = _until_held(cell, "m18p", "outside_window")
        assert around.waits(limited) == {"m18p": "rate_limited"}
    for batch in (limited, other, late):
        cell.cancel(batch)


def test_acceptance_25_a_pause_is_counted_once_per_edge(cell: Cell) -> None:
    around = cell.around
    counted = cell.pauses(Reason.OUTSIDE_WINDOW)
    for edges in (1, 2):
        batch = _until_held(cell, "m25", "outside_window")
        # Passes go on; several are over by the time that this is told again and again.
        before = around.status("m25")["checked_at"]
        until("it is looked at again", lambda: around.status("m25")["checked_at"] != before, WAIT_S)  # noqa: B023
        rise = cell.pauses(Reason.OUTSIDE_WINDOW) - counted
        # Each process counts the edges that it has seen.
        assert edges <= rise <= edges * cell.runners
        around.put("m25")
        assert around.ended(batch).status == "completed"
        around.put("m25", window=closed_window())
    until("one process tells of all routes", lambda: cell.paused_reasons() >= set(Reason), WAIT_S)


# Short ways


def _text(seen: Seen) -> str:
    return str(seen.json["messages"][0]["content"])


def _until_held(cell: Cell, model: str, reason: str) -> str:
    """Send batches of one line until one waits for ``reason``; return it. Those before it have ended."""
    around = cell.around
    batch = ""

    def held() -> bool:
        nonlocal batch
        if not batch or around.client().batches.retrieve(batch).status == "completed":
            batch = around.submit((model, "probe"))
        return around.waits(batch).get(model) == reason

    until(f"a line waits for {reason}", held, WAIT_S)
    return batch


def _row(cell: Cell, batch_id: str) -> Any:
    return cell.around.world.world.run(cell.around.world.store.batches.get(None, batch_id))


def _no_progress_for_an_hour(cell: Cell, batch_id: str) -> None:
    ago = _row(cell, batch_id).created_at - 3600 * SECOND_US
    cell.around.world.world.sql("UPDATE batches SET last_progress_at = :ago WHERE id = :id", ago=ago, id=batch_id)


def _incidents(cell: Cell) -> set[str]:
    """Judge now; return the batches with an open incident of a rule of five minutes.

    The workspace is named: it is a personal one, which no rule for the installation watches.
    """
    rule = AlertRule(name="acceptance", kind="batch_stalled", workspace=WORKSPACE_ID, window_minutes=5)
    store = cell.around.world.store

    async def judge() -> set[str]:
        await AlertDuty(store, AlertSettings(rules=(rule,)), Forecaster(store, BatchSettings())).judge()
        return {one.subject for one in await store.alerts.open_incidents() if one.rule == "acceptance"}

    return cell.around.world.world.run(judge())
