"""Weights in the fair order: alike they change nothing, unlike they set the shares, and nobody starves."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.batches.store.claim_state import (
    TURN,
    Contender,
    Pass,
    RouteView,
    fair_first,
    fair_order,
    fair_rank,
)

OWNERS = ("w0", "w1", "w2", "w3")


def rule_41(contender: Contender, view: RouteView) -> tuple[object, ...]:
    """The specification's order, written from its text: (a) to (f), never served first."""
    of_workspace = sum(lines for (owner, _), lines in view.running.items() if owner == contender.workspace_id)
    served = view.turns.get(contender.workspace_id)
    of_batch = view.running.get((contender.workspace_id, contender.batch_id), 0)
    last = contender.last_claim_at
    return (
        of_workspace,
        (served is not None, served or 0),
        of_batch,
        (last is not None, last or 0),
        contender.since,
        contender.batch_id,
    )


@st.composite
def views(draw: st.DrawFn) -> RouteView:
    """A route with any demand, any history and leftovers of weights that held earlier."""
    names = [f"b{i}" for i in range(draw(st.integers(1, 8)))]
    owners = {name: draw(st.sampled_from(OWNERS)) for name in names}
    times = st.one_of(st.none(), st.integers(0, 6))
    contenders = {
        name: Contender(name, owners[name], draw(st.integers(0, 3)), draw(times), 5)
        for name in names
        if name == "b0" or draw(st.booleans())
    }
    running = {(owners[name], name): lines for name in names if (lines := draw(st.integers(0, 3)))}
    turns = {owner: at for owner in OWNERS if (at := draw(times)) is not None}
    passes = {owner: Pass(draw(st.integers(1, 5 * TURN)), draw(st.integers(0, TURN))) for owner in OWNERS[:2]}
    return RouteView(running, contenders, turns, {}, passes)


@settings(deadline=None)
@given(views(), st.integers(1, 100))
def test_rule_41_is_exact_while_all_weights_are_alike(view: RouteView, weight: int) -> None:
    expected = sorted(view.contenders, key=lambda name: rule_41(view.contenders[name], view))
    assert fair_order(view) == expected
    view.weights = dict.fromkeys(OWNERS, weight)
    assert fair_order(view) == expected
    assert fair_first(view) == expected[0]
    before = dict(view.passes)
    view.take_turn(view.contenders[expected[0]].workspace_id)
    assert view.passes == before, "equal weights keep no virtual time"


@settings(deadline=None)
@given(views(), st.dictionaries(st.sampled_from(OWNERS), st.integers(1, 100)))
def test_order_puts_every_contender_in_one_place(view: RouteView, weights: dict[str, int]) -> None:
    view.weights = weights
    order = fair_order(view)
    assert sorted(order) == sorted(view.contenders)
    ranks = [fair_rank(view.contenders[name], view) for name in order]
    assert ranks == sorted(set(ranks))
    assert order[0] == fair_first(view)


@dataclass
class Route:
    """A route whose workspaces always have lines waiting; lines end by a virtual clock."""

    weights: Mapping[str, int]
    cap: int
    seconds: Callable[[str], float]
    view: RouteView = field(init=False)
    starts: list[str] = field(default_factory=list)
    _running: list[tuple[float, int, str]] = field(default_factory=list)
    _now: float = 0.0

    def __post_init__(self) -> None:
        self.view = RouteView({}, {}, {}, {name: weight for name, weight in self.weights.items() if weight != 1})
        for name in self.weights:
            self.arrive(name)

    def arrive(self, workspace: str) -> None:
        self.view.contenders[workspace] = Contender(workspace, workspace, 0, None, 1)

    def leave(self, workspace: str) -> None:
        self.view.contenders.pop(workspace, None)

    def run(self, lines: int) -> list[str]:
        """Start so many lines more; return whose they were."""
        first = len(self.starts)
        while len(self.starts) < first + lines:
            if len(self._running) == self.cap:
                self._end_one()
            name = fair_first(self.view)
            self.view.take_turn(name)
            self.view.start(name, name)
            self.view.turns[name] = stamp = len(self.starts)
            heapq.heappush(self._running, (self._now + self.seconds(name), stamp, name))
            self.starts.append(name)
        return self.starts[first:]

    def _end_one(self) -> None:
        self._now, _, name = heapq.heappop(self._running)
        self.view.running[(name, name)] -= 1
        self.view.running_of_workspace[name] -= 1


weights_of = st.dictionaries(st.sampled_from(OWNERS), st.integers(1, 12), min_size=2)


@settings(deadline=None)
@given(weights_of, st.integers(1, 24))
def test_long_run_shares_are_the_weights(weights: dict[str, int], cap: int) -> None:
    """With lines of one length, at any cap: in any run of whole rounds everyone is within a turn of its share."""
    total = sum(weights.values())
    rounds = 8
    route = Route(weights, cap, lambda name: 1.0)
    route.run(3 * total + cap)
    got = Counter(route.run(rounds * total))
    for name, weight in weights.items():
        assert abs(got[name] - rounds * weight) <= weight + 2, (got, weights, cap)


@settings(deadline=None)
@given(weights_of, st.integers(1, 8), st.integers(2, 8))
def test_only_the_ratio_of_weights_counts(weights: dict[str, int], times: int, cap: int) -> None:
    multiplied = {name: weight * times for name, weight in weights.items()}
    long = {name: 1.0 + 3 * place for place, name in enumerate(weights)}
    assert Route(weights, cap, long.__getitem__).run(80) == Route(multiplied, cap, long.__getitem__).run(80)


@settings(deadline=None)
@given(views(), st.dictionaries(st.sampled_from(OWNERS), st.integers(1, 100), min_size=2))
def test_virtual_times_are_never_far_apart(view: RouteView, weights: dict[str, int]) -> None:
    """So that lines given out of turn, while the others could not start any, are paid back for two turns at most."""
    view.weights = weights
    shares = view.shares()
    if shares is not None:
        times = view.virtual_times(shares)
        assert all(times[name] <= min(times.values()) + 2 * TURN - TURN // shares[name] for name in shares)
        known = [one.base for name, one in view.passes.items() if name in shares]
        assert min(times.values()) >= max(known, default=0)


def test_long_run_shares_hold_for_lines_of_any_length() -> None:
    for seed, (weights, cap) in enumerate(
        [({"w0": 3, "w1": 1}, 2), ({"w0": 5, "w1": 3, "w2": 1}, 4), ({"w0": 2, "w1": 3}, 7), ({"w0": 9, "w1": 1}, 1)]
    ):
        draw = random.Random(seed)
        got = Counter(Route(weights, cap, lambda name, draw=draw: draw.expovariate(1)).run(6000))  # type: ignore[misc]
        for name, weight in weights.items():
            share = 6000 * weight / sum(weights.values())
            assert abs(got[name] - share) <= 0.08 * share, (got, weights, cap)


def test_slots_follow_the_weights_where_the_cap_divides() -> None:
    """Three to one on eight slots: six and two, though the lines of one take five times as long."""
    route = Route({"w0": 3, "w1": 1}, 8, lambda name: 5.0 if name == "w1" else 1.0)
    route.run(400)
    assert (route.view.running_of_workspace["w0"], route.view.running_of_workspace["w1"]) == (6, 2)


def test_turns_of_a_heavy_workspace_are_spread() -> None:
    route = Route({"w0": 3, "w1": 1}, 1, lambda name: 1.0)
    route.run(8)
    assert "".join(name[1] for name in route.run(12)) == "100010001000"
    route = Route({"w0": 30, "w1": 20, "w2": 10}, 1, lambda name: 1.0)
    route.run(60)
    runs = "".join(name[1] for name in route.run(60))
    assert "000" not in runs and "11" not in runs


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from(OWNERS), st.integers(1, 20), min_size=2),
    st.integers(1, 12),
    st.lists(st.tuples(st.sampled_from(OWNERS), st.integers(0, 40)), max_size=8),
    st.integers(0, 99),
)
def test_no_workspace_starves_however_others_come_and_go(
    weights: dict[str, int], cap: int, moves: list[tuple[str, int]], seed: int
) -> None:
    """One that waits without a running line starts within two turns of everybody else."""
    draw = random.Random(seed)
    route = Route(weights, cap, lambda name: draw.expovariate(1))
    for name, lines in moves:
        if name in weights:
            present = name in route.view.contenders
            (route.leave if present and len(route.view.contenders) > 1 else route.arrive)(name)
        route.run(lines)
    for name in weights:
        route.arrive(name)
    victim = min(weights, key=lambda name: (weights[name], name))
    bound = sum(2 * weight + 1 for name, weight in weights.items() if name != victim)
    # Its running lines hold it back as rule 41 (a) says; they end within a cap of starts in the deterministic run.
    route.seconds = lambda name: 1.0
    waited = route.run(bound + 2 * cap + 1)
    assert victim in waited


def test_return_from_a_long_absence_saves_up_nothing() -> None:
    route = Route({"w0": 1, "w1": 2, "w2": 4}, 1, lambda name: 1.0)
    route.run(70)
    route.leave("w2")
    route.run(300)
    route.arrive("w2")
    assert Counter(route.run(70))["w2"] <= 40 + 4
    route.leave("w0")
    route.leave("w1")
    route.run(500)
    route.arrive("w0")
    route.arrive("w1")
    got = Counter(route.run(70))
    assert abs(got["w0"] - 10) <= 2 and abs(got["w1"] - 20) <= 3
