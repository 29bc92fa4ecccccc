"""Attempts to learn: as many as were saved up, and then as many as time brings."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from frontend.attempts import ATTEMPTS_PER_S, MAX_ATTEMPTS, Attempts

SECOND_NS = 1_000_000_000


@given(st.integers(0, 1 << 60), st.integers(1, 20))
def test_what_is_saved_up_is_had_at_once_and_a_second_brings_more(start_ns: int, seconds: int) -> None:
    attempts = Attempts()
    assert sum(attempts.take(start_ns) for _ in range(MAX_ATTEMPTS + 50)) == MAX_ATTEMPTS
    now_ns = start_ns + seconds * SECOND_NS
    expected = min(MAX_ATTEMPTS, seconds * ATTEMPTS_PER_S)
    assert sum(attempts.take(now_ns) for _ in range(MAX_ATTEMPTS + 50)) == expected


@given(st.lists(st.integers(0, 3 * SECOND_NS), min_size=1, max_size=400))
def test_no_order_of_asking_gets_more_than_time_allows(steps_ns: list[int]) -> None:
    attempts = Attempts()
    now_ns = taken = 0
    for step_ns in steps_ns:
        now_ns += step_ns
        taken += sum(attempts.take(now_ns) for _ in range(40))
        assert taken <= MAX_ATTEMPTS + ATTEMPTS_PER_S * (now_ns // SECOND_NS)
