"""Live gates that stay closed for a while: what is learned of gaps, and what the gates make of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.batches.runner.gates import Ask, Reason
from frontend.batches.scheduling.gates import RouteGates
from frontend.batches.scheduling.load_limits import Reading
from frontend.batches.scheduling.reopen_state import GAPS, MARGIN, MIN_GAPS, Absence
from frontend.batches.scheduling.reopening import Reopening
from frontend.batches.store.rows import SchedulingRow

MS = 1_000_000
SECOND = 1000 * MS
LIMIT = 10 * SECOND


def calls(absence: Absence, gaps_ns: list[int], now_ns: int = 0, limit_ns: int = LIMIT) -> int:
    """Let calls of 100 ms come, one after each gap, and look every 50 ms; return when the last one ended."""
    for gap_ns in gaps_ns:
        began_ns, ended_ns = now_ns + gap_ns, now_ns + gap_ns + 100 * MS
        for look_ns in range(now_ns + 50 * MS, ended_ns + 1, 50 * MS):
            there = began_ns <= look_ns < ended_ns
            moved_ns = ended_ns if look_ns >= ended_ns else began_ns if there else now_ns
            absence.saw(there, moved_ns or None, look_ns, limit_ns)
        now_ns = ended_ns
    return now_ns


def test_until_gaps_are_known_the_limit_holds() -> None:
    absence = Absence()
    assert absence.reopens_ns(5, LIMIT) is None, "nobody ever called"
    at_ns = calls(absence, [SECOND])
    assert absence.reopens_ns(at_ns, LIMIT) == at_ns + LIMIT
    assert absence.reopens_ns(at_ns + LIMIT, LIMIT) is None


def test_then_it_is_somewhat_more_than_the_longest_of_them() -> None:
    absence = Absence()
    at_ns = calls(absence, [SECOND, 200 * MS, 2 * SECOND, 300 * MS, 100 * MS])
    assert absence.reopens_ns(at_ns, LIMIT) == at_ns + int(2 * SECOND * MARGIN)


def test_what_is_longer_than_the_limit_is_no_gap() -> None:
    absence = Absence()
    at_ns = calls(absence, [SECOND] * (MIN_GAPS + 1))
    at_ns = calls(absence, [LIMIT + SECOND, SECOND], at_ns)
    assert max(absence.gaps_ns) == SECOND
    assert absence.reopens_ns(at_ns, LIMIT) == at_ns + int(SECOND * MARGIN)


def test_one_longer_gap_is_taken_to_heart_at_once_and_shorter_ones_by_and_by() -> None:
    absence = Absence()
    at_ns = calls(absence, [100 * MS] * GAPS)
    at_ns = calls(absence, [3 * SECOND], at_ns)
    assert absence.hold_ns(LIMIT) == int(3 * SECOND * MARGIN)
    at_ns = calls(absence, [100 * MS] * (GAPS - 1), at_ns)
    assert absence.hold_ns(LIMIT) == int(3 * SECOND * MARGIN)
    calls(absence, [100 * MS], at_ns)
    assert absence.hold_ns(LIMIT) == int(100 * MS * MARGIN)


def test_a_call_between_two_looks_counts() -> None:
    absence = Absence()
    absence.saw(False, 10 * MS, 50 * MS, LIMIT)
    for number in range(1, 6):
        # It came and went 10 ms before the look.
        absence.saw(False, number * 400 * MS, number * 400 * MS + 10 * MS, LIMIT)
    assert absence.left_ns == 2000 * MS
    assert list(absence.gaps_ns) == [390 * MS, *[400 * MS] * 4]


def test_times_of_before_the_machine_started_again_are_none() -> None:
    absence = Absence()
    absence.saw(False, 900 * SECOND, SECOND, LIMIT)
    assert absence.reopens_ns(SECOND, LIMIT) is None
    absence.saw(True, 900 * SECOND, 2 * SECOND, LIMIT)
    absence.saw(False, 900 * SECOND, 3 * SECOND, LIMIT)
    assert absence.reopens_ns(3 * SECOND, LIMIT) == 2 * SECOND + LIMIT


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.booleans(), st.none() | st.integers(0, 20_000)), max_size=80),
    st.integers(1, 600),
)
def test_whatever_is_seen_it_closes_for_no_longer_than_the_limit(
    looks: list[tuple[int, bool, int | None]], limit_s: int
) -> None:
    absence, now_ns, limit_ns = Absence(), 0, limit_s * SECOND
    for passed_ms, there, moved_ms in looks:
        now_ns += passed_ms * MS
        absence.saw(there, None if moved_ms is None else moved_ms * MS, now_ns, limit_ns)
        reopens_ns = absence.reopens_ns(now_ns, limit_ns)
        assert reopens_ns is None or now_ns < reopens_ns <= now_ns + limit_ns
        assert len(absence.gaps_ns) <= GAPS and all(0 <= gap_ns <= limit_ns for gap_ns in absence.gaps_ns)
        assert absence.left_ns is None or absence.left_ns <= now_ns
        if there:
            assert absence.left_ns == now_ns


class Route:
    """One route as gates see it, with a clock."""

    def __init__(self, **settings: Any) -> None:
        self.settings = SchedulingRow("R", **settings)
        self.live: int | None = 0
        self.moved: int | None = None
        self.now_ns = SECOND
        self.woken = 0
        self.gates = RouteGates(self, self, self, Reopening(self), wake=self._wake, now_us=lambda: self.now_ns // 1000)

    def _wake(self) -> None:
        self.woken += 1

    def row(self, route_id: str) -> SchedulingRow | None:
        return self.settings

    def count(self, route_id: str) -> int | None:
        return self.live

    def moved_ns(self, route_id: str) -> int | None:
        return self.moved

    def reading(self, url: str) -> Reading | None:
        raise AssertionError("no route here has metrics")

    def call(self, live: int) -> None:
        self.live, self.moved = live, self.now_ns

    def after(self, seconds: float) -> Reason | None:
        self.now_ns += int(seconds * SECOND)
        return self.gates.closed(Ask("b", "w", "R", self.now_ns))


def test_rule_17_without_the_setting_the_gate_opens_with_the_last_call() -> None:
    route = Route(yield_live_threshold=1)
    route.call(1)
    assert route.after(1) is Reason.LIVE_TRAFFIC
    route.call(0)
    assert route.after(0.001) is None


def test_with_it_the_gate_stays_closed_and_says_until_when() -> None:
    route = Route(yield_live_threshold=1, reopen_after_s=5)
    noted = []
    route.gates = RouteGates(
        route, route, route, Reopening(route), lambda name, found, now_ns: noted.append(found),
        lambda: route._wake(), lambda: route.now_ns // 1000,
    )  # fmt: skip
    route.call(1)
    assert route.after(1) is Reason.LIVE_TRAFFIC
    assert noted[-1].reopens_us is None, "that depends on the call"
    route.call(0)
    ended_ns = route.now_ns
    assert route.after(1) is Reason.LIVE_TRAFFIC
    assert (noted[-1].live, noted[-1].reopens_us) == (0, (ended_ns + 5 * SECOND) // 1000)
    route.gates.look(route.now_ns, 10 * SECOND)
    assert route.woken == 0
    route.gates.look(ended_ns + 5 * SECOND, 10 * SECOND)
    assert route.woken == 1, "lines start again as soon as it is over"
    assert route.after(4.1) is None


@pytest.mark.parametrize(("live", "closed"), [(1, False), (2, True)])
def test_calls_below_the_threshold_close_nothing(live: int, closed: bool) -> None:
    route = Route(yield_live_threshold=2, reopen_after_s=5)
    route.call(live)
    assert (route.after(1) is Reason.LIVE_TRAFFIC) == closed
    route.call(0)
    assert (route.after(1) is Reason.LIVE_TRAFFIC) == closed


def test_traffic_that_cannot_be_told_is_no_gap() -> None:
    route = Route(yield_live_threshold=1, reopen_after_s=5)
    route.live = None
    assert route.after(1) is Reason.LIVE_TRAFFIC
    route.live = 0
    assert route.after(1) is None


def test_a_route_that_is_watched_no_more_is_forgotten() -> None:
    route = Route(yield_live_threshold=1, reopen_after_s=5)
    reopening = Reopening(route)
    route.call(1)
    reopening.look([route.settings], route.now_ns)
    route.call(0)
    assert reopening.reopens_ns(route.settings, 0, route.now_ns) == route.now_ns + 5 * SECOND
    reopening.look([SchedulingRow("R", yield_live_threshold=1)], route.now_ns)
    # What the machine's table says of its last call is there still.
    assert reopening.reopens_ns(route.settings, 0, route.now_ns + SECOND) == route.now_ns + 5 * SECOND
    route.moved = None
    reopening.look([], route.now_ns)
    assert reopening.reopens_ns(route.settings, 0, route.now_ns) is None
