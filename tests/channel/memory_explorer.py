"""Every interleaving of small programs over shared memory, on machines with and without store buffers.

A program is a list of instructions over private registers and shared words. ``explore`` walks every reachable state
once and reports the first that breaks a promise: a failed ``Check``, or everybody waiting with work undone.

Machines
    ``program``: a store is visible at once.
    ``x86``: stores wait in a first-in first-out buffer per thread; a thread sees its own.
    ``weak``: like x86, but stores to different words may become visible in any order.
System calls (``Ring``, ``Sleep``) and ``Fence`` wait for the own buffer; ``Barrier`` empties everybody's, as membarrier
does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

Registers = dict[str, int]
Buffer = tuple[tuple[str, int], ...]
Thread = tuple[int, tuple[tuple[str, int], ...], Buffer]
State = tuple[tuple[tuple[str, int], ...], tuple[Thread, ...]]


@dataclass(frozen=True)
class Store:
    word: Callable[[Registers], str]
    value: Callable[[Registers], int]


@dataclass(frozen=True)
class Load:
    register: str
    word: Callable[[Registers], str]


@dataclass(frozen=True)
class Set:
    register: str
    value: Callable[[Registers], int]


@dataclass(frozen=True)
class JumpIf:
    condition: Callable[[Registers], bool]
    label: str


@dataclass(frozen=True)
class Label:
    name: str


@dataclass(frozen=True)
class Check:
    condition: Callable[[Registers], bool]
    promise: str


@dataclass(frozen=True)
class Fence:
    pass


@dataclass(frozen=True)
class Barrier:
    pass


@dataclass(frozen=True)
class Ring:
    bell: str


@dataclass(frozen=True)
class Sleep:
    bell: str


Instruction = Store | Load | Set | JumpIf | Label | Check | Fence | Barrier | Ring | Sleep


class Broken(Exception):
    """A promise that some interleaving breaks."""


def explore(programs: list[list[Instruction]], machine: str, limit: int = 200_000) -> int:
    """Walk every interleaving; return the number of states.

    Raises:
        Broken: names the promise.
    """
    start: State = ((), tuple((0, (), ()) for _ in programs))
    seen = {start}
    frontier = [start]
    while frontier:
        state = frontier.pop()
        successors = list(_successors(state, programs, machine))
        done = all(pc == len(program) for (pc, _, _), program in zip(state[1], programs, strict=True))
        if not successors and not done:
            raise Broken("everybody waits for ever")
        for successor in successors:
            if successor not in seen:
                seen.add(successor)
                frontier.append(successor)
                assert len(seen) <= limit, "the model is too large to be explored"
    return len(seen)


def _successors(state: State, programs: list[list[Instruction]], machine: str) -> Iterator[State]:
    memory, threads = state
    for index, (pc, registers, buffer) in enumerate(threads):
        for position in _visible_next(buffer, machine):
            word, value = buffer[position]
            rest = buffer[:position] + buffer[position + 1 :]
            yield _with(memory, threads, index, (pc, registers, rest), {word: value})
        if pc < len(programs[index]):
            yield from _execute(memory, threads, index, programs[index], machine)


def _visible_next(buffer: Buffer, machine: str) -> list[int]:
    if machine != "weak":
        return [0] if buffer else []
    first_of_word: dict[str, int] = {}
    for position, (word, _) in enumerate(buffer):
        first_of_word.setdefault(word, position)
    return list(first_of_word.values())


def _execute(
    memory: tuple[tuple[str, int], ...],
    threads: tuple[Thread, ...],
    index: int,
    program: list[Instruction],
    machine: str,
) -> Iterator[State]:
    pc, frozen, buffer = threads[index]
    registers = dict(frozen)
    shared = dict(memory)
    match program[pc]:
        case Store(word, value):
            entry = (word(registers), value(registers))
            if machine == "program":
                yield _with(memory, threads, index, (pc + 1, frozen, buffer), dict([entry]))
            else:
                yield _with(memory, threads, index, (pc + 1, frozen, (*buffer, entry)), {})
        case Load(register, word):
            name = word(registers)
            own = [value for stored, value in buffer if stored == name]
            registers[register] = own[-1] if own else shared.get(name, 0)
            yield _with(memory, threads, index, (pc + 1, _freeze(registers), buffer), {})
        case Set(register, value):
            registers[register] = value(registers)
            yield _with(memory, threads, index, (pc + 1, _freeze(registers), buffer), {})
        case JumpIf(condition, label):
            target = program.index(Label(label)) if condition(registers) else pc + 1
            yield _with(memory, threads, index, (target, frozen, buffer), {})
        case Label():
            yield _with(memory, threads, index, (pc + 1, frozen, buffer), {})
        case Check(condition, promise):
            if not condition(registers):
                raise Broken(promise)
            yield _with(memory, threads, index, (pc + 1, frozen, buffer), {})
        case Fence():
            if not buffer:
                yield _with(memory, threads, index, (pc + 1, frozen, buffer), {})
        case Barrier():
            if not any(other for _, _, other in threads):
                yield _with(memory, threads, index, (pc + 1, frozen, buffer), {})
        case Ring(bell):
            if not buffer:
                yield _with(memory, threads, index, (pc + 1, frozen, buffer), {bell: 1})
        case Sleep(bell):
            if not buffer and shared.get(bell, 0):
                yield _with(memory, threads, index, (pc + 1, frozen, buffer), {bell: 0})


def _with(
    memory: tuple[tuple[str, int], ...],
    threads: tuple[Thread, ...],
    index: int,
    thread: Thread,
    stores: dict[str, int],
) -> State:
    if stores:
        memory = _freeze({**dict(memory), **stores})
    return memory, (*threads[:index], thread, *threads[index + 1 :])


def _freeze(values: Registers) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(values.items()))
