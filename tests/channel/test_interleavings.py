"""Ring and doorbell under every interleaving of a small model, then the shipping code under seeded schedules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from memory_explorer import (
    Barrier,
    Broken,
    Check,
    Fence,
    Instruction,
    JumpIf,
    Label,
    Load,
    Registers,
    Ring,
    Set,
    Sleep,
    Store,
    explore,
)

CAPACITY = 2
RECORDS = 3


def word(name: str) -> Callable[[Registers], str]:
    return lambda _: name


def slot(half: str) -> Callable[[Registers], str]:
    return lambda registers: f"{half}{registers.get('seq', 0) % CAPACITY}"


def producer(publish_first: bool = False, fence: bool = False) -> list[Instruction]:
    """Fill a record of two words, then publish it, for ``RECORDS`` records."""
    body: list[Instruction] = [
        Store(slot("a"), lambda registers: registers["seq"] + 1),
        Store(slot("b"), lambda registers: registers["seq"] + 1),
    ]
    hand_over: list[Instruction] = [Store(word("tail"), lambda registers: registers["seq"] + 1)]
    between: list[Instruction] = [Fence()] if fence else []
    return [
        Set("seq", lambda _: 0),
        Label("next"),
        Load("head", word("head")),
        JumpIf(lambda registers: registers["seq"] - registers["head"] >= CAPACITY, "next"),
        *(hand_over + body if publish_first else body + between + hand_over),
        Set("seq", lambda registers: registers["seq"] + 1),
        JumpIf(lambda registers: registers["seq"] < RECORDS, "next"),
    ]


def consumer(free_first: bool = False, dies_after: int = RECORDS) -> list[Instruction]:
    """Take records one by one until all came."""
    read: list[Instruction] = [
        Load("a", slot("a")),
        Load("b", slot("b")),
        Check(lambda registers: registers["a"] == registers["seq"] + 1, "the first word is the record's"),
        Check(lambda registers: registers["b"] == registers["seq"] + 1, "the second word is the record's"),
    ]
    hand_back: list[Instruction] = [Store(word("head"), lambda registers: registers["seq"] + 1)]
    return [
        Set("seq", lambda _: 0),
        Label("next"),
        Load("tail", word("tail")),
        Check(lambda registers: 0 <= registers["tail"] - registers["seq"] <= CAPACITY, "the tail is possible"),
        JumpIf(lambda registers: registers["tail"] == registers["seq"], "next"),
        *(hand_back + read if free_first else read + hand_back),
        Set("seq", lambda registers: registers["seq"] + 1),
        JumpIf(lambda registers: registers["seq"] < dies_after, "next"),
    ]


@pytest.mark.parametrize("machine", ["program", "x86"])
def test_the_ring_hands_over_whole_records_in_order(machine: str) -> None:
    assert explore([producer(), consumer()], machine) > 50


@pytest.mark.parametrize("machine", ["program", "x86"])
def test_a_consumer_that_dies_half_way_breaks_nothing_for_the_one_after_it(machine: str) -> None:
    # The producer then waits for room for ever, which is the caller's decision; no state may break a promise.
    assert explore([producer(), consumer(dies_after=1)], machine) > 50


def test_a_weaker_machine_needs_a_fence_which_is_why_it_is_refused() -> None:
    with pytest.raises(Broken, match="word is the record's"):
        explore([producer(), consumer()], "weak")
    assert explore([producer(fence=True), consumer()], "weak") > 50


@pytest.mark.parametrize("machine", ["program", "x86"])
@pytest.mark.parametrize("wrong", ["publish before the body", "free before the copy"])
def test_wrong_orders_are_caught(machine: str, wrong: str) -> None:
    programs = [producer(wrong.startswith("publish")), consumer(wrong.startswith("free"))]
    with pytest.raises(Broken, match="word is the record's"):
        explore(programs, machine)


PUBLICATIONS = 2


def publisher(always: bool = False) -> list[Instruction]:
    ring: list[Instruction] = [Ring("bell")]
    if not always:
        ring = [Load("flag", word("flag")), JumpIf(lambda registers: registers["flag"] == 0, "awake"), *ring]
    return [
        Set("seq", lambda _: 0),
        Label("next"),
        Store(word("tail"), lambda registers: registers["seq"] + 1),
        *ring,
        Label("awake"),
        Set("seq", lambda registers: registers["seq"] + 1),
        JumpIf(lambda registers: registers["seq"] < PUBLICATIONS, "next"),
    ]


def sleeper(barrier: Instruction | None, look_first: bool = False) -> list[Instruction]:
    lie_down: list[Instruction] = [Store(word("flag"), lambda _: 1)]
    look: list[Instruction] = [
        Load("tail", word("tail")),
        JumpIf(lambda registers: registers["tail"] > registers["seen"], "wake"),
    ]
    between: list[Instruction] = [] if barrier is None else [barrier]
    return [
        Set("seen", lambda _: 0),
        Label("look"),
        Load("tail", word("tail")),
        JumpIf(lambda registers: registers["tail"] > registers["seen"], "take"),
        *(look + lie_down + between if look_first else lie_down + between + look),
        Sleep("bell"),
        Label("wake"),
        Store(word("flag"), lambda _: 0),
        JumpIf(lambda _: True, "look"),
        Label("take"),
        Set("seen", lambda registers: registers["tail"]),
        JumpIf(lambda registers: registers["seen"] < PUBLICATIONS, "look"),
    ]


@pytest.mark.parametrize("machine", ["program", "x86", "weak"])
def test_no_wake_up_is_lost_with_the_barrier(machine: str) -> None:
    assert explore([publisher(), sleeper(Barrier())], machine) > 30


@pytest.mark.parametrize("machine", ["program", "x86", "weak"])
def test_no_wake_up_is_lost_when_the_bell_is_always_rung(machine: str) -> None:
    assert explore([publisher(always=True), sleeper(None)], machine) > 30


@pytest.mark.parametrize("barrier", [None, Fence()])
def test_without_a_barrier_for_both_sides_a_wake_up_is_lost(barrier: Instruction | None) -> None:
    with pytest.raises(Broken, match="everybody waits for ever"):
        explore([publisher(), sleeper(barrier)], "x86")


@pytest.mark.parametrize("machine", ["program", "x86"])
def test_looking_before_the_flag_is_set_loses_a_wake_up_anywhere(machine: str) -> None:
    with pytest.raises(Broken, match="everybody waits for ever"):
        explore([publisher(), sleeper(Barrier(), look_first=True)], machine)
