"""Where a request's tensors lie, and what a text slot gives back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from channel_client import frontend, run
from channel_worker import WIDTH, EchoWorker, WorkerThread

from engines.bundle.signature import Signature, Variant
from engines.errors import EngineFailed
from engines.tensor import TensorSpec
from worker.channel.layout import SegmentLayout
from worker.channel.messages import ModelEntry
from worker.channel.segment import Segment, reserve


@pytest.fixture
def socket_path(tmp_path: Path) -> str:
    return str(tmp_path / "worker.sock")


def entry_of(inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], variant: Variant) -> ModelEntry:
    signature = Signature(inputs, outputs, inputs, outputs, (1, 8), (variant,))
    return ModelEntry(model_id=1, name="odd", version="1", state="READY", signature=signature)


def test_views_have_the_shapes_of_the_signature_and_never_overlap(socket_path: str) -> None:
    inputs = (TensorSpec("a", "f32", (-1, WIDTH), 0), TensorSpec("b", "bf16", (-1, 3), 0))
    outputs = (TensorSpec("c", "bool", (-1,), 0),)
    entry = entry_of(inputs, outputs, Variant((), ((-1, WIDTH), (-1, 3)), ((-1,),), (False,)))

    async def main() -> None:
        async with frontend(socket_path) as one:
            placements = [one.channel.place(one.entry, 0, rows) for rows in (2, 1, 5)]
            arrays = [array for placement in placements for array in (*placement.inputs, *placement.outputs())]
            assert [array.shape for array in arrays[:3]] == [(2, WIDTH), (2, 3), (2,)]
            assert [array.dtype.name for array in arrays[:3]] == ["float32", "bfloat16", "bool"]
            assert all(array.flags.writeable for array in arrays)
            for index, array in enumerate(arrays):
                array[...] = index % 2
            assert all((array == index % 2).all() for index, array in enumerate(arrays))
            # One block, rows side by side: the worker can run them together.
            assert len({placement.span.block_offset for placement in placements}) == 1
            assert [placement.span.row_start for placement in placements] == [0, 2, 3]
            for placement in placements:
                placement.release()
                placement.release()

    with WorkerThread(EchoWorker(socket_path), [entry]):
        run(main)


def test_a_batch_axis_elsewhere_gets_its_own_block(socket_path: str) -> None:
    inputs = (TensorSpec("a", "f32", (4, -1, 2), 1), TensorSpec("b", "i64", (3,), None))
    outputs = (TensorSpec("c", "f32", (-1, 2), 0),)
    entry = entry_of(inputs, outputs, Variant((), ((4, -1, 2), (3,)), ((-1, 2),), (False,)))

    async def main() -> None:
        async with frontend(socket_path) as one:
            first, second = one.channel.place(one.entry, 0, 5), one.channel.place(one.entry, 0, 5)
            assert [array.shape for array in first.inputs] == [(4, 5, 2), (3,)]
            assert first.inputs[0].flags.c_contiguous
            assert (first.span.block_rows, first.span.row_start) == (5, 0)
            assert first.span.block_offset != second.span.block_offset
            first.release()
            second.release()

    with WorkerThread(EchoWorker(socket_path), [entry]):
        run(main)


def test_an_output_whose_size_depends_on_the_data_has_the_shape_that_was_written(socket_path: str) -> None:
    inputs = (TensorSpec("a", "f32", (-1, 2), 0),)
    outputs = (TensorSpec("c", "f32", (-1, -1), 0, (0, 10)),)
    entry = entry_of(inputs, outputs, Variant((), ((-1, 2),), ((-1, 10),), (True,)))

    async def main() -> None:
        async with frontend(socket_path) as one:
            placement = one.channel.place(one.entry, 0, 3)
            other = one.channel.place(one.entry, 0, 3)
            # The shape is told once per block, so requests of such a model cannot share one.
            assert placement.span.block_offset != other.span.block_offset
            offset = placement.span.block_offset + placement.plan.layout.offsets(3)[1]
            line = placement.attachment.memory[offset - 64 : offset].cast("Q")
            line[0], line[1] = 3, 7
            assert placement.outputs()[0].shape == (3, 7)
            for wrong in [(2, 7), (4, 7), (3, 11), (2**63, 1)]:
                line[0], line[1] = wrong
                with pytest.raises(
                    EngineFailed, match=r"output \'c\' has shape .* its limits are \[3, 10\] for 3 rows"
                ):
                    placement.outputs()
            placement.release()
            other.release()

    with WorkerThread(EchoWorker(socket_path), [entry]):
        run(main)


def test_a_text_that_was_overwritten_is_not_taken_for_anothers(socket_path: str) -> None:
    layout = SegmentLayout.of(4, 4096)
    fd = reserve(layout.segment_bytes)
    segment = Segment(fd, layout)
    os.close(fd)
    stored = segment.write_text(3, 77, "schön".encode())
    assert segment.read_text(3, 77, stored) == "schön"
    segment.write_text(3, 78, b"other")
    assert segment.read_text(3, 77, stored) is None
    assert segment.read_text(99, 77, stored) is None
    assert segment.read_text(3, 78, 5000) is None
