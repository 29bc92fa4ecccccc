"""The private copy and its index: every line comes back, lanes keep input order, damage is noticed."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.batches.local import LocalObjects
from frontend.batches.objects import ObjectCorrupt, object_path
from frontend.batches.work_file import IndexBuilder, WorkFile, open_work_file

PATH = object_path("file-" + "0" * 32)
LINE = st.binary(max_size=60).filter(lambda line: b"\n" not in line)
LINES = st.lists(st.tuples(LINE, st.sampled_from(["m", "n", "modèle/β"])), min_size=1, max_size=40)


def content(lines: list[tuple[bytes, str]]) -> bytes:
    builder = IndexBuilder()
    out = bytearray()
    for line, model in lines:
        builder.add(line, model)
        out += line + b"\n"
    return bytes(out) + builder.finish()


def with_object(data: bytes, use: Callable[[LocalObjects], Awaitable[None]]) -> None:
    directory = Path(tempfile.mkdtemp())

    async def run() -> None:
        objects = LocalObjects(directory)
        await objects.start()
        writer = await objects.open_writer(PATH)
        await writer.write(data)
        await writer.commit()
        try:
            await use(objects)
        finally:
            await objects.close()

    try:
        asyncio.run(run())
    finally:
        shutil.rmtree(directory)


@settings(deadline=None, max_examples=40)
@given(lines=LINES, data=st.data())
def test_every_line_comes_back_by_number_and_by_lane(lines: list[tuple[bytes, str]], data: st.DataObject) -> None:
    written = content(lines)
    asked = data.draw(st.lists(st.integers(0, len(lines) - 1), max_size=20))

    async def use(objects: LocalObjects) -> None:
        work: WorkFile = await open_work_file(objects, PATH, len(written))
        assert len(work.index) == len(lines)
        assert [await work.read_line(number) for number in range(len(lines))] == [line for line, _ in lines]
        assert await work.read_lines(asked) == [lines[number][0] for number in asked]
        by_model: dict[str, list[int]] = {}
        for number, (_, model) in enumerate(lines):
            assert work.index.model(number) == model
            by_model.setdefault(model, []).append(number)
        assert [(lane.model, lane.line_nos.tolist()) for lane in work.index.lanes()] == list(by_model.items())

    with_object(written, use)


@settings(deadline=None, max_examples=40)
@given(lines=LINES, data=st.data())
def test_a_damaged_index_is_refused(lines: list[tuple[bytes, str]], data: st.DataObject) -> None:
    written = bytearray(content(lines))
    index_at = sum(len(line) + 1 for line, _ in lines)
    position = data.draw(st.integers(index_at, len(written) - 1))
    written[position] ^= 1 << data.draw(st.integers(0, 7))

    async def use(objects: LocalObjects) -> None:
        with pytest.raises(ObjectCorrupt):
            await open_work_file(objects, PATH, len(written))

    with_object(bytes(written), use)


@pytest.mark.parametrize("size", [0, 5, 31])
def test_too_short_for_a_work_file(size: int) -> None:
    async def use(objects: LocalObjects) -> None:
        with pytest.raises(ObjectCorrupt):
            await open_work_file(objects, PATH, size)

    with_object(b"x" * size, use)


def test_a_damaged_line_is_refused_and_its_neighbours_are_read() -> None:
    lines = [(b'{"custom_id": "%d"}' % number, "m") for number in range(3)]
    written = bytearray(content(lines))
    written[len(lines[0][0]) + 1 + 16] ^= 1

    async def use(objects: LocalObjects) -> None:
        work = await open_work_file(objects, PATH, len(written))
        for asked in ([1], [0, 1, 2]):
            with pytest.raises(ObjectCorrupt):
                await work.read_lines(asked)
        with pytest.raises(ObjectCorrupt):
            await work.read_line(1)
        assert await work.read_lines([0, 2]) == [lines[0][0], lines[2][0]]

    with_object(bytes(written), use)
