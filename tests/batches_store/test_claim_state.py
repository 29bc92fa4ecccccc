"""The pure decision: any group equals claims made one by one in turn."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.batches.store.claim_state import TURN, Contender, Existing, Pass, RouteView, decide, fair_rank
from frontend.batches.store.rows import ClaimBatch, ClaimGroup, ClaimLine, ClaimResult

NOW = 1_000


@st.composite
def scenes(draw: st.DrawFn) -> tuple[ClaimGroup, RouteView]:
    """A route with running lines, waiting batches of other processes, and a group of our own."""
    names = [f"b{i}" for i in range(draw(st.integers(1, 6)))]
    owners = {name: draw(st.sampled_from(["w0", "w1", "w2"])) for name in names}
    running = {(owners[name], name): lines for name in names if (lines := draw(st.integers(0, 2)))}
    times = st.one_of(st.none(), st.integers(0, 2 * NOW))
    contenders = {
        name: Contender(name, owners[name], draw(st.integers(0, NOW)), draw(times), draw(st.integers(1, 5)))
        for name in names
        if draw(st.booleans())
    }
    turns = {owner: at for owner in ("w0", "w1", "w2") if (at := draw(times)) is not None}
    weights = {owner: draw(st.integers(2, 100)) for owner in ("w0", "w1", "w2") if draw(st.booleans())}
    passes = {
        owner: Pass(base + draw(st.integers(0, 3 * TURN)), base)
        for owner in ("w0", "w1", "w2")
        if draw(st.booleans())
        for base in [draw(st.integers(0, 10 * TURN))]
    }
    mine = draw(st.lists(st.sampled_from(names), unique=True, min_size=1))
    batches = tuple(
        ClaimBatch(name, owners[name], 5, tuple(ClaimLine(n, f"{name}/{n}") for n in range(draw(st.integers(1, 4)))))
        for name in mine
    )
    return ClaimGroup("R", draw(st.integers(1, 8)), batches), RouteView(running, contenders, turns, weights, passes)


def copy(view: RouteView) -> RouteView:
    contenders = {
        name: Contender(one.batch_id, one.workspace_id, one.since, one.last_claim_at, one.waiting_lines)
        for name, one in view.contenders.items()
    }
    return RouteView(dict(view.running), contenders, dict(view.turns), dict(view.weights), dict(view.passes))


@settings(deadline=None)
@given(scenes())
def test_group_never_exceeds_the_cap_and_answers_every_line(scene: tuple[ClaimGroup, RouteView]) -> None:
    group, view = scene
    before = view.running_total()
    decision = decide(group, view, {}, frozenset(), NOW)
    answers = [answer for batch in group.batches for answer in decision.answers[batch.batch_id]]
    claimed = answers.count(ClaimResult.CLAIMED)
    assert claimed == len(decision.starts) <= max(0, group.cap - before)
    assert len(answers) == sum(len(batch.lines) for batch in group.batches)
    full = view.running_total() >= group.cap
    assert set(answers) <= {ClaimResult.CLAIMED, ClaimResult.FULL if full else ClaimResult.WAIT}
    for batch in group.batches:
        got = decision.answers[batch.batch_id]
        assert got == sorted(got, key=lambda answer: answer is not ClaimResult.CLAIMED), "lines start in order"
    stamps = [stamp for _, _, stamp in decision.starts]
    assert stamps == sorted(set(stamps))


@settings(deadline=None)
@given(scenes())
def test_group_equals_single_claims_made_in_turn(scene: tuple[ClaimGroup, RouteView]) -> None:
    """Every free slot goes to whoever is first; those of batches that did not ask are kept for them."""
    group, view = scene
    single = copy(view)
    decision = decide(group, view, {}, frozenset(), NOW)
    left = {batch.batch_id: len(batch.lines) for batch in group.batches}
    for batch in group.batches:
        single.contenders.setdefault(batch.batch_id, Contender(batch.batch_id, batch.workspace_id, NOW, None, 5))
    starts = iter(decision.starts)
    stamp = max([NOW, *(turn + 1 for turn in turns_of(single))])
    for _ in range(group.cap - single.running_total()):
        if not any(left.values()):
            break
        first = min(single.contenders.values(), key=lambda contender: fair_rank(contender, single))
        if first.batch_id in left:
            batch, line, at = next(starts)
            assert (batch.batch_id, at) == (first.batch_id, stamp)
            assert line.line_no == len(batch.lines) - left[first.batch_id]
            left[first.batch_id] -= 1
            gone = not left[first.batch_id]
        else:
            first.waiting_lines -= 1
            gone = not first.waiting_lines
        single.take_turn(first.workspace_id)
        single.start(first.workspace_id, first.batch_id)
        single.turns[first.workspace_id] = first.last_claim_at = stamp
        stamp += 1
        if gone:
            del single.contenders[first.batch_id]
    assert next(starts, None) is None
    assert all(stamp > turn for _, _, stamp in decision.starts for turn in scene[1].turns.values() if turn < NOW)


def turns_of(view: RouteView) -> list[int]:
    times = [*view.turns.values(), *(one.last_claim_at for one in view.contenders.values())]
    return [at for at in times if at is not None]


@settings(deadline=None)
@given(scenes(), st.data())
def test_processes_that_ask_in_any_order_fill_every_slot(
    scene: tuple[ClaimGroup, RouteView], data: st.DataObject
) -> None:
    """However the batches are spread over processes: as long as slots are free, a round of asking fills some."""
    group, view = scene
    batches = {batch.batch_id: batch for batch in group.batches}
    lines = {name: list(batch.lines) for name, batch in batches.items()}
    last: dict[str, int] = {}
    process_of = {name: data.draw(st.integers(0, 2)) for name in batches}
    free = max(0, group.cap - view.running_total())
    view.contenders = {}
    while free and any(lines.values()):
        round_starts = 0
        for process in data.draw(st.permutations(range(3))):
            view.contenders = {
                name: Contender(name, batches[name].workspace_id, 0, last.get(name), len(left))
                for name, left in lines.items()
                if left
            }
            mine = tuple(
                ClaimBatch(name, batches[name].workspace_id, len(left), tuple(left))
                for name, left in lines.items()
                if left and process_of[name] == process
            )
            decision = decide(ClaimGroup("R", group.cap, mine), view, {}, frozenset(), NOW)
            round_starts += len(decision.starts)
            for batch, line, at in decision.starts:
                lines[batch.batch_id].remove(line)
                last[batch.batch_id] = at
        assert 0 < round_starts <= free
        free -= round_starts


def test_stopped_batch_does_not_hold_the_turn() -> None:
    view = RouteView({}, {"b0": Contender("b0", "w0", 0, None, 5)}, {})
    group = ClaimGroup(
        "R", 4,
        (ClaimBatch("b0", "w0", 5, (ClaimLine(0, "x"),)), ClaimBatch("b1", "w1", 5, (ClaimLine(0, "y"),))),
    )  # fmt: skip
    decision = decide(group, view, {}, frozenset({"b0"}), NOW)
    assert decision.answers == {"b0": [ClaimResult.STOPPED], "b1": [ClaimResult.CLAIMED]}


def test_known_lines_are_answered_before_the_cap() -> None:
    batch = ClaimBatch(
        "b0", "w0", 5,
        (ClaimLine(0, "mine"), ClaimLine(1, "new"), ClaimLine(2, "again", 2), ClaimLine(3, "late", 2)),
    )  # fmt: skip
    existing = {
        ("b0", 0): Existing("running", 1, "mine", None),
        ("b0", 1): Existing("running", 1, "theirs", None),
        ("b0", 2): Existing("failed", 1, "first", None),
        ("b0", 3): Existing("failed", 1, "first", 7),
    }
    view = RouteView({("w0", "b0"): 2}, {}, {})
    full = decide(ClaimGroup("R", 2, (batch,)), view, existing, frozenset(), NOW)
    results = ClaimResult
    assert full.answers["b0"] == [results.CLAIMED, results.TAKEN, results.FULL, results.TAKEN]
    assert full.starts == []
    view = RouteView({("w0", "b0"): 2}, {}, {})
    free = decide(ClaimGroup("R", 3, (batch,)), view, existing, frozenset(), NOW)
    assert free.answers["b0"] == [results.CLAIMED, results.TAKEN, results.CLAIMED, results.TAKEN]
    assert [line.execution_id for _, line, _ in free.starts] == ["again"]
