"""When an incident is told again, and when that is given up."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.batches.scheduling.delivery_state import (
    LONGEST_PAUSE_S,
    MAX_AGE_US,
    MAX_ATTEMPTS,
    Deliveries,
    Event,
    is_stale,
    pause_ns,
)
from frontend.batches.store.route_rows import IncidentRow

S_NS = 1_000_000_000


def incident(name: str, resolved_at: int | None = None) -> IncidentRow:
    return IncidentRow(name, "r", "b", "ws", "s", "{}", opened_at=5, resolved_at=resolved_at)


def test_pauses_grow_and_are_bounded() -> None:
    pauses = [pause_ns(attempts) / S_NS for attempts in range(1, MAX_ATTEMPTS)]
    assert pauses == sorted(pauses)
    assert pauses[0] == 10
    assert pauses[-1] == LONGEST_PAUSE_S
    assert 4 * 3600 < sum(pauses) < 12 * 3600


def test_an_end_waits_for_its_opening() -> None:
    made = Deliveries()
    ended = incident("i", 7)
    untold: list[Event] = [(ended, "opened"), (ended, "resolved")]
    assert made.due(untold, 0) == untold[:1]
    made.failed(("i", "opened"), 0, reached=True)
    assert made.due(untold, 0) == []
    assert made.due(untold, 10 * S_NS) == untold[:1]
    made.told(("i", "opened"))
    assert made.due(untold[1:], 10 * S_NS) == untold[1:]


def test_a_message_that_is_refused_holds_up_no_other() -> None:
    made = Deliveries()
    untold: list[Event] = [(incident("a"), "opened"), (incident("b"), "opened")]
    made.failed(("a", "opened"), 0, reached=True)
    assert made.due(untold, 0) == untold[1:]


def test_a_receiver_that_is_away_is_asked_with_one_event_until_it_answers() -> None:
    made = Deliveries()
    untold: list[Event] = [(incident(str(number)), "opened") for number in range(50)]
    assert made.due(untold, 0) == untold
    made.failed(("0", "opened"), 0, reached=False)
    assert made.due(untold, 9 * S_NS) == []
    assert len(made.due(untold, 10 * S_NS)) == 1
    made.told(("0", "opened"))
    assert len(made.due(untold[1:], 10 * S_NS)) == 49


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=MAX_ATTEMPTS, max_size=MAX_ATTEMPTS))
def test_an_event_is_given_up_after_so_many_attempts_and_forgotten(reached: list[bool]) -> None:
    made = Deliveries()
    untold: list[Event] = [(incident("a"), "opened")]
    now_ns = 0
    for attempt, answered in enumerate(reached, 1):
        now_ns += 2 * int(LONGEST_PAUSE_S) * S_NS
        assert made.due(untold, now_ns) == untold
        assert made.failed(("a", "opened"), now_ns, reached=answered) == (attempt == MAX_ATTEMPTS)
    assert not made.tried


def test_what_is_told_by_others_is_forgotten_and_what_is_old_is_stale() -> None:
    made = Deliveries()
    made.failed(("a", "opened"), 0, reached=True)
    made.due([], 0)
    assert not made.tried
    assert not is_stale((incident("a"), "opened"), 5 + MAX_AGE_US)
    assert is_stale((incident("a"), "opened"), 6 + MAX_AGE_US)
    assert not is_stale((incident("a", 7), "resolved"), 6 + MAX_AGE_US)
