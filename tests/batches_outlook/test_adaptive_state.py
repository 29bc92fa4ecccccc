"""The adaptive cap: additive up, half down, inside its range, without flapping."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.batches.scheduling.adaptive_state import (
    CLEAN_WINDOWS,
    FIRST_PROBATION,
    MAX_BASELINE_CALLS,
    MAX_PROBATION,
    Cap,
    Latencies,
    Range,
    Seen,
    Why,
    after,
    beyond,
    fitted,
    quantile_s,
)

BOUNDS_S = tuple(0.005 * 1.2**power for power in range(63))
RANGES = st.tuples(st.integers(1, 256), st.integers(1, 256)).map(lambda two: Range(min(two), max(two), 20))
SEEN = st.builds(
    Seen, running=st.integers(0, 300), waiting=st.booleans(), overloads=st.integers(0, 2), slow=st.booleans()
)
HURTS = st.sampled_from((Seen(0, overloads=1), Seen(0, slow=True), Seen(0, overloads=2, slow=True)))


@settings(deadline=None)
@given(allowed=RANGES, seen=st.lists(SEEN, max_size=200), start=st.integers(1, 256))
def test_it_never_leaves_its_range(allowed: Range, seen: list[Seen], start: int) -> None:
    cap = Cap(start)
    for one in seen:
        before = cap
        cap, why = after(cap, one, allowed)
        assert allowed.least <= cap.lines <= allowed.most
        assert (why is not None) == (cap.lines != before.lines)
        assert FIRST_PROBATION <= cap.probation <= MAX_PROBATION


@settings(deadline=None)
@given(allowed=RANGES, lines=st.integers(1, 256), hurt=HURTS, used=st.floats(0, 1))
def test_it_halves_on_overload_and_on_slow_live_calls(allowed: Range, lines: int, hurt: Seen, used: float) -> None:
    cap = fitted(Cap(lines), allowed)
    lowered, why = after(cap, replace(hurt, running=int(cap.lines * used)), allowed)
    assert lowered.lines == max(allowed.least, cap.lines // 2)
    if lowered.lines != cap.lines:
        assert why is (Why.OVERLOAD if hurt.overloads else Why.LATENCY)
    assert lowered.clean == 0


@settings(deadline=None)
@given(allowed=RANGES, seen=st.lists(SEEN, max_size=200))
def test_it_grows_by_one_and_only_after_clean_windows_that_used_it_up(allowed: Range, seen: list[Seen]) -> None:
    cap = fitted(Cap(allowed.least), allowed)
    speaking = 0
    for one in seen:
        before = cap
        cap, why = after(cap, one, allowed)
        if one.running > before.lines or one.overloads or one.slow:
            speaking = 0
        elif one.waiting and one.running == before.lines:
            speaking += 1
        if cap.lines > before.lines:
            assert cap.lines == before.lines + 1
            assert why is Why.CLEAN
            assert speaking >= CLEAN_WINDOWS
            speaking = 0
        elif cap.lines < before.lines:
            speaking = 0


def test_what_still_runs_from_before_a_halving_is_not_held_against_the_lower_cap() -> None:
    allowed = Range(1, 64, 20)
    cap, _ = after(Cap(32), Seen(32, overloads=3), allowed)
    for _ in range(20):
        cap, why = after(cap, Seen(20, overloads=3), allowed)
        assert (cap.lines, why) == (16, None)
    assert after(cap, Seen(16, overloads=1), allowed)[0].lines == 8


@settings(deadline=None)
@given(allowed=RANGES, lines=st.integers(1, 256))
def test_a_new_range_holds_at_once(allowed: Range, lines: int) -> None:
    cap, why = after(Cap(lines, clean=1, ceiling=9), Seen(0, slow=True), allowed)
    if allowed.least <= lines <= allowed.most:
        assert why is not Why.SETTINGS
    else:
        assert cap == Cap(max(allowed.least, min(allowed.most, lines)))
        assert why is Why.SETTINGS


@settings(deadline=None, max_examples=50)
@given(capacity=st.integers(1, 100), most=st.integers(1, 128), drain=st.integers(0, 6))
def test_it_does_not_flap_and_uses_what_is_there(capacity: int, most: int, drain: int) -> None:
    """A server that takes ``capacity`` lines; after a halving its old ones end over ``drain`` windows."""
    allowed = Range(1, most, 20)
    cap, lowered, sizes, left = Cap(1), 0, [], 0
    windows = 4000
    for _ in range(windows):
        running = cap.lines + (1 if left else 0)
        left = max(0, left - 1)
        cap, why = after(cap, Seen(running, waiting=True, overloads=int(running > capacity)), allowed)
        if why is Why.OVERLOAD:
            lowered += 1
            left = drain
        sizes.append(cap.lines)
    settled = sizes[1000:]
    # Probations double to MAX_PROBATION: afterwards it hurts once per so many windows, and the way back up.
    assert lowered <= 8 + windows / MAX_PROBATION
    assert max(settled) <= capacity + 1
    assert sum(settled) / len(settled) >= 0.7 * min(most, capacity) - 1


def test_it_reaches_the_most_where_nothing_hurts_and_stays_where_nothing_waits() -> None:
    allowed = Range(2, 16, 20)
    cap = Cap(2)
    for _ in range(CLEAN_WINDOWS * 14):
        cap, _ = after(cap, Seen(cap.lines, waiting=True), allowed)
    assert cap.lines == 16
    idle = Cap(5)
    for _ in range(100):
        idle, why = after(idle, Seen(5), allowed)
        assert (idle.lines, why) == (5, None)
        idle, why = after(idle, Seen(3, waiting=True), allowed)
        assert (idle.lines, why) == (5, None)


def test_a_ceiling_is_forgotten_once_it_has_stood_its_probation() -> None:
    allowed = Range(1, 64, 20)
    cap, _ = after(Cap(8), Seen(8, overloads=1), allowed)
    assert cap.ceiling == 8
    for _ in range(200):
        cap, _ = after(cap, Seen(cap.lines, waiting=True), allowed)
    assert cap.ceiling is None
    assert cap.lines > 20


# Latencies


def _counts(rng: random.Random, calls: int, median_s: float) -> list[int]:
    counts = [0] * (len(BOUNDS_S) + 1)
    for _ in range(calls):
        seconds = rng.lognormvariate(0.0, 0.4) * median_s
        counts[next((i for i, bound in enumerate(BOUNDS_S) if seconds <= bound), len(BOUNDS_S))] += 1
    return counts


ALLOWED = Range(2, 16, 20)


def _with_baseline(rng: random.Random) -> Latencies:
    seen = Latencies.empty(BOUNDS_S)
    for _ in range(20):
        seen.add(_counts(rng, 30, 0.2), 0, ALLOWED)
    return seen


def test_latency_as_without_lines_is_rarely_taken_for_slow() -> None:
    alarms = 0
    for seed in range(30):
        rng = random.Random(seed)
        seen = _with_baseline(rng)
        for _ in range(40):
            seen.add(_counts(rng, 15, 0.2), 8, ALLOWED)
            if seen.slow(ALLOWED):
                alarms += 1
                seen.forget_loaded()
    assert alarms <= 12, "1 per 100 windows"


@pytest.mark.parametrize(("median_s", "within"), [(0.6, 2), (0.4, 3), (0.3, 8)])
def test_slower_live_calls_are_noticed_within_windows(median_s: float, within: int) -> None:
    noticed = []
    for seed in range(20):
        rng = random.Random(seed)
        seen = _with_baseline(rng)
        windows = 0
        while not seen.slow(ALLOWED) and windows < 100:
            seen.add(_counts(rng, 15, median_s), 8, ALLOWED)
            windows += 1
        noticed.append(windows)
    assert sorted(noticed)[len(noticed) // 2] <= within, noticed


def test_few_calls_or_no_baseline_accuse_nobody() -> None:
    rng = random.Random(1)
    seen = Latencies.empty(BOUNDS_S)
    seen.add(_counts(rng, 500, 3.0), 8, ALLOWED)
    assert seen.limit_s(ALLOWED) is None
    assert not seen.slow(ALLOWED)
    quiet = _with_baseline(rng)
    quiet.add(_counts(rng, 5, 30.0), 8, ALLOWED)
    assert not quiet.slow(ALLOWED)


def test_until_a_baseline_is_seen_the_least_stands_in_and_then_no_more() -> None:
    rng = random.Random(2)
    seen = Latencies.empty(BOUNDS_S)
    seen.add(_counts(rng, 300, 1.0), 2, ALLOWED)
    stand_in = seen.limit_s(ALLOWED)
    assert stand_in is not None and stand_in > 1.2
    seen.add(_counts(rng, 300, 0.2), 0, ALLOWED)
    limit = seen.limit_s(ALLOWED)
    assert limit is not None and limit < 0.6


@settings(deadline=None)
@given(st.lists(st.integers(0, 10_000), min_size=64, max_size=64), st.integers(0, 5))
def test_the_baseline_is_bounded_and_no_call_is_counted_beyond_all(counts: list[int], times: int) -> None:
    seen = Latencies.empty(BOUNDS_S)
    for _ in range(times):
        seen.add(counts, 0, ALLOWED)
    assert sum(seen.quiet) <= MAX_BASELINE_CALLS * 1.001
    if sum(counts):
        assert beyond(BOUNDS_S, counts, 0.0) == pytest.approx(sum(counts))
        at = quantile_s(BOUNDS_S, counts, 0.95)
        assert 0.0 <= at <= BOUNDS_S[-1]
        assert beyond(BOUNDS_S, counts, at) <= sum(counts) * 0.05 + counts[-1] + 1e-6
