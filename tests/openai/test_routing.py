"""Order of routes and circuit breakers: pure."""

from __future__ import annotations

from collections import Counter

import pytest
from gateway_world import model, route
from hypothesis import given
from hypothesis import strategies as st

from frontend.gateway_settings import GatewaySettings, Routing
from frontend.openai import breaker_state, routing
from frontend.openai.breaker_state import Breaker, Event, Phase
from frontend.openai.routes import Route, Routes
from frontend.openai.routing import Candidate

SECOND_NS = 1_000_000_000


def test_ordered_is_as_written() -> None:
    assert routing.order([Candidate(1.0, in_flight=9), Candidate(5.0)], "ordered") == [0, 1]


def test_least_in_flight_weighs_what_the_next_call_would_make() -> None:
    assert routing.order([Candidate(1.0, 1), Candidate(4.0, 3), Candidate(1.0, 0)], "least_in_flight") == [1, 2, 0]
    assert routing.order([Candidate(1.0), Candidate(1.0)], "least_in_flight") == [0, 1]


def test_a_resting_route_comes_last_and_an_open_one_not_at_all() -> None:
    candidates = [Candidate(1.0, resting=True), Candidate(1.0, admits=False), Candidate(1.0)]
    assert routing.order(candidates, "ordered") == [2, 0]


@given(
    st.lists(
        st.builds(Candidate, st.floats(0.1, 10), st.integers(0, 9), st.floats(0, 9), st.booleans(), st.booleans())
    ),
    st.sampled_from(["ordered", "weighted", "least_in_flight"]),
)
def test_every_usable_route_is_tried_once(candidates: list[Candidate], policy: Routing) -> None:
    ordered = routing.order(candidates, policy)
    assert sorted(ordered) == [index for index, candidate in enumerate(candidates) if candidate.admits]
    rests = [candidates[index].resting for index in ordered]
    assert rests == sorted(rests)


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def make_routes(clock: Clock, policy: Routing, *weights: float) -> Routes:
    local = [route(f"r{i}", "", kind="local", weight=weight, cooldown_seconds=10.0) for i, weight in enumerate(weights)]
    return Routes(GatewaySettings(models=(model("m", *local, routing=policy),)), {}, clock)


def take(routes: Routes) -> Route:
    served = routes.model("m")
    assert served is not None
    best = routes.order(served, served.routes)[0]
    lease = routes.enter(served, best, batch=False)
    lease.tell(Event.SUCCEEDED)
    lease.close()
    return best


def test_weighted_shares_exactly_and_evenly() -> None:
    routes = make_routes(Clock(), "weighted", 3.0, 1.0)
    taken = [take(routes).id for _ in range(400)]
    assert Counter(taken) == {"r0": 300, "r1": 100}
    # Never two of the small one within three calls.
    assert all(taken[i : i + 3].count("r1") <= 1 for i in range(398))


def test_weighted_does_not_flood_a_route_that_was_away() -> None:
    clock = Clock()
    routes = make_routes(clock, "weighted", 1.0, 1.0)
    away = routes.route("r1")
    assert away is not None
    for _ in range(5):
        routes.tell(away, Event.FAILED)
    assert {take(routes).id for _ in range(100)} == {"r0"}
    clock.now_ns = 11 * SECOND_NS
    assert Counter(take(routes).id for _ in range(20)) == {"r0": 10, "r1": 10}


def test_counts_are_back_at_zero_and_told_when_live_traffic_changes() -> None:
    clock = Clock()
    routes = make_routes(clock, "ordered", 1.0)
    served = routes.model("m")
    assert served is not None
    seen: list[int] = []
    waits: list[int] = []
    routes.on_change = lambda one: seen.append(one.live)
    routes.on_answer = lambda one, waited_ns: waits.append(waited_ns)
    live = routes.enter(served, served.routes[0], batch=False)
    line = routes.enter(served, served.routes[0], batch=True)
    assert (routes.live("r0"), served.routes[0].batch) == (1, 1)
    clock.now_ns += SECOND_NS
    for lease in (live, live, line):
        lease.answered()
        lease.close()
    assert (seen, served.routes[0].live, served.routes[0].batch) == ([1, 0], 0, 0)
    assert waits == [SECOND_NS], "once, and of live calls only"


def test_a_pause_is_bounded_by_the_cooldown_and_never_shortened() -> None:
    clock = Clock()
    routes = make_routes(clock, "ordered", 1.0, 1.0)
    first = routes.route("r0")
    assert first is not None
    routes.rest(first, 3600.0)
    routes.rest(first, None)
    clock.now_ns = 9 * SECOND_NS
    assert take(routes).id == "r1"
    clock.now_ns = 10 * SECOND_NS
    assert take(routes).id == "r0"


STEP = {"failures_to_open": 3, "cooldown_ns": 10 * SECOND_NS}


def after(breaker: Breaker, *events: Event, now_ns: int = 0) -> Breaker:
    for event in events:
        breaker = breaker_state.after(breaker, event, now_ns, **STEP)
    return breaker


def test_a_breaker_opens_after_failures_in_a_row_only() -> None:
    failed, good = Event.FAILED, Event.SUCCEEDED
    assert after(Breaker(), failed, failed, good, failed, failed).phase is Phase.CLOSED
    opened = after(Breaker(), failed, failed, failed)
    assert opened.phase is Phase.OPEN
    assert not breaker_state.admits(opened, 0)
    assert breaker_state.wait_ns(opened, SECOND_NS) == 9 * SECOND_NS
    assert breaker_state.admits(opened, 10 * SECOND_NS)


def test_one_call_probes_an_open_breaker() -> None:
    opened = after(Breaker(), *[Event.FAILED] * 3)
    later_ns = 10 * SECOND_NS
    probing = after(opened, Event.ADMITTED, now_ns=later_ns)
    assert probing.phase is Phase.PROBING
    assert not breaker_state.admits(probing, later_ns)
    assert after(probing, Event.SUCCEEDED, now_ns=later_ns) == Breaker()
    again = after(probing, Event.FAILED, now_ns=later_ns)
    assert (again.phase, again.until_ns) == (Phase.OPEN, 20 * SECOND_NS)
    withdrawn = after(probing, Event.WITHDRAWN, now_ns=later_ns)
    assert withdrawn.phase is Phase.OPEN
    assert breaker_state.admits(withdrawn, later_ns)


def test_late_news_changes_nothing_while_open() -> None:
    opened = after(Breaker(), *[Event.FAILED] * 3)
    assert after(opened, Event.SUCCEEDED, Event.FAILED, Event.WITHDRAWN, now_ns=5) == opened


@given(st.lists(st.tuples(st.sampled_from(list(Event)), st.integers(0, 30 * SECOND_NS)), max_size=60))
def test_a_breaker_always_lets_a_call_through_again(story: list[tuple[Event, int]]) -> None:
    breaker, now_ns = Breaker(), 0
    for event, pause_ns in story:
        now_ns += pause_ns
        breaker = after(breaker, event, now_ns=now_ns)
        assert breaker_state.wait_ns(breaker, now_ns) <= STEP["cooldown_ns"]
    assert breaker_state.admits(breaker, now_ns + STEP["cooldown_ns"])


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("event", list(Event))
def test_every_event_is_defined_in_every_phase(phase: Phase, event: Event) -> None:
    assert isinstance(after(Breaker(phase, 1, 5), event, now_ns=7), Breaker)
