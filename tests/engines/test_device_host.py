"""The host device lets right programs pass and names what is wrong with others."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from engines.device.base import Capabilities, Device, Span, Stream
from engines.device.errors import CannotCapture, CannotRegister, DeviceLost, OutOfDeviceMemory
from engines.device.host import HostDevice
from engines.device.host_order import DeviceMisuse
from engines.tensor import NDArray

F32 = np.dtype(np.float32)


class Bench:
    """A device with two streams, a buffer on it, and pinned memory of the same size."""

    def __init__(self) -> None:
        self.device = HostDevice()
        self.a, self.b = self.device.stream("a"), self.device.stream("b")
        self.buffer = self.device.allocate(1024, "test")
        self.span = Span.whole(self.buffer)
        self.pinned = self.device.pinned(1024, "test")
        self.host = self.pinned.array
        self.host[...] = np.arange(1024) % 251

    def fill(self, stream: Stream) -> None:
        self.device.copy_in(self.span, self.host, stream)

    def double(self, stream: Stream, span: Span | None = None) -> None:
        """Enqueue doubling the buffer in place."""
        part = span or self.span
        device: Device = self.device

        def work() -> None:
            array = device.array(part, (part.size_bytes,), np.dtype(np.uint8))
            array[...] = device.xp.add(array, array)

        device.launch(stream, work, reads=[part], writes=[part])

    def release(self) -> None:
        self.device.synchronize()
        self.buffer.free()
        self.pinned.free()


@pytest.fixture
def bench() -> Iterator[Bench]:
    """A bench whose device must close without a finding."""
    bench = Bench()
    yield bench
    bench.release()
    bench.device.close()


@pytest.fixture
def broken() -> Iterator[Bench]:
    """A bench whose device must not close, because the test breaks a rule."""
    bench = Bench()
    yield bench
    with pytest.raises(DeviceMisuse):
        bench.device.close()


def test_work_is_done_only_when_something_waits_for_it(bench: Bench) -> None:
    bench.fill(bench.a)
    bench.double(bench.a)
    expected = bench.host + bench.host
    out = bench.device.pinned(1024, "out")
    bench.device.copy_out(out.array, bench.span, bench.a)
    assert (out.array == 0xA5).all()
    bench.a.synchronize()
    np.testing.assert_array_equal(out.array, expected)
    out.free()


def test_changing_pinned_memory_before_the_copy_is_done_changes_what_is_copied(bench: Bench) -> None:
    bench.fill(bench.a)
    bench.host[...] = 7
    bench.device.copy_out(bench.host, bench.span, bench.a)
    bench.host[...] = 9
    bench.a.synchronize()
    assert (bench.host == 9).all()


def test_an_event_orders_two_streams(bench: Bench) -> None:
    event = bench.device.event()
    bench.fill(bench.a)
    bench.a.record(event)
    bench.b.wait(event)
    bench.double(bench.b)
    bench.b.synchronize()


def test_waiting_runs_only_what_is_needed(bench: Bench) -> None:
    first, later = bench.device.event(), bench.device.event()
    bench.fill(bench.a)
    bench.a.record(first)
    bench.double(bench.a)
    bench.a.record(later)
    first.synchronize()
    with pytest.raises(DeviceMisuse, match="before both were synchronized"):
        bench.device.elapsed_ns(first, later)
    bench.device.findings._misuses.clear()
    later.synchronize()
    assert bench.device.elapsed_ns(first, later) >= 0


def test_polling_an_event_ends(bench: Bench) -> None:
    event = bench.device.event()
    bench.fill(bench.a)
    bench.double(bench.a)
    bench.a.record(event)
    assert [event.done() for _ in range(3)] == [False, False, True]


def test_rule_1_two_streams_without_an_event(broken: Bench) -> None:
    broken.fill(broken.a)
    with pytest.raises(
        DeviceMisuse, match=r"device memory 'test'.*on 'b'.*'copy to .* on 'a'' writes on another stream"
    ):
        broken.double(broken.b)


def test_rule_1_an_event_recorded_too_early_orders_nothing(broken: Bench) -> None:
    event = broken.device.event()
    broken.a.record(event)
    broken.fill(broken.a)
    broken.b.wait(event)
    with pytest.raises(DeviceMisuse, match="nothing orders the two"):
        broken.double(broken.b)


def test_rule_1_reading_side_by_side_is_allowed_and_writing_after_it_is_not(broken: Bench) -> None:
    broken.fill(broken.a)
    broken.a.synchronize()
    out = broken.device.pinned(2048, "out")
    broken.device.copy_out(out.array[:1024], broken.span, broken.a)
    broken.device.copy_out(out.array[1024:], broken.span, broken.b)
    with pytest.raises(DeviceMisuse, match=r"writes bytes.*that 'copy from device memory 'test' on 'b'' reads"):
        broken.double(broken.a)


def test_rule_1_disjoint_parts_need_no_order(bench: Bench) -> None:
    bench.fill(bench.a)
    bench.a.synchronize()
    bench.double(bench.a, bench.span.part(0, 512))
    bench.double(bench.b, bench.span.part(512, 512))


def test_rule_1_waiting_for_an_event_nobody_recorded(broken: Bench) -> None:
    with pytest.raises(DeviceMisuse, match="never recorded"):
        broken.b.wait(broken.device.event())


def test_reading_what_nobody_wrote(broken: Bench) -> None:
    broken.device.copy_in(broken.span.part(0, 512), broken.host[:512], broken.a)
    broken.double(broken.a, broken.span.part(0, 512))
    with pytest.raises(DeviceMisuse, match="reads byte 512 before anything was written there"):
        broken.double(broken.a)


def test_forgotten_bytes_must_be_written_anew(broken: Bench) -> None:
    broken.fill(broken.a)
    broken.a.synchronize()
    broken.device.forget(broken.span.part(256, 256))
    with pytest.raises(DeviceMisuse, match="reads byte 256 before"):
        broken.double(broken.a)


def test_copying_unwritten_bytes_is_allowed_and_leaves_them_unwritten(broken: Bench) -> None:
    broken.device.copy_in(broken.span.part(512, 256), broken.host[:256], broken.a)
    broken.device.copy_within(broken.span.part(0, 512), broken.span.part(512, 512), broken.a)
    broken.double(broken.a, broken.span.part(0, 256))
    with pytest.raises(DeviceMisuse, match="reads byte 256 before"):
        broken.double(broken.a, broken.span.part(0, 512))


def test_rule_3_freeing_before_synchronizing(broken: Bench) -> None:
    broken.fill(broken.a)
    with pytest.raises(DeviceMisuse, match=r"freeing device memory 'test' while 'copy to .* may still use it"):
        broken.buffer.free()
    with pytest.raises(DeviceMisuse, match="unlocking pinned memory 'test' while"):
        broken.pinned.free()


def test_rule_3_use_after_free(broken: Bench) -> None:
    broken.fill(broken.a)
    broken.a.synchronize()
    broken.buffer.free()
    broken.buffer.free()
    for use in (
        lambda: broken.fill(broken.a),
        lambda: broken.double(broken.a),
        lambda: broken.span.address,
        lambda: broken.device.zero(broken.span, broken.a),
    ):
        with pytest.raises(DeviceMisuse, match="device memory 'test' is used after it was freed"):
            use()


def test_rule_4_pageable_memory(broken: Bench) -> None:
    with pytest.raises(DeviceMisuse, match="neither pinned nor registered"):
        broken.device.copy_in(broken.span, np.zeros(1024, np.uint8), broken.a)


def test_rule_4_registered_memory_until_it_is_released(broken: Bench) -> None:
    memory = np.arange(2048, dtype=np.uint8)
    registration = broken.device.register(memory, "arena")
    with pytest.raises(CannotRegister, match="registered already"):
        broken.device.register(memory[100:200], "part of it")
    broken.device.copy_in(broken.span, memory[512:1536], broken.a)
    with pytest.raises(DeviceMisuse, match="unlocking registered memory 'arena' while"):
        registration.release()
    broken.a.synchronize()
    registration.release()
    registration.release()
    with pytest.raises(DeviceMisuse, match="neither pinned nor registered"):
        broken.device.copy_in(broken.span, memory[512:1536], broken.a)


def test_rule_4_two_copies_into_the_same_host_memory(broken: Bench) -> None:
    broken.fill(broken.a)
    broken.a.synchronize()
    broken.device.copy_out(broken.host, broken.span, broken.a)
    with pytest.raises(DeviceMisuse, match=r"pinned memory 'test'.*nothing orders"):
        broken.device.copy_out(broken.host, broken.span, broken.b)


def test_rule_5_overlapping_copy(broken: Bench) -> None:
    broken.fill(broken.a)
    with pytest.raises(DeviceMisuse, match="its two ends overlap"):
        broken.device.copy_within(broken.span.part(0, 512), broken.span.part(511, 512), broken.a)


def test_sizes_must_agree(broken: Bench) -> None:
    with pytest.raises(DeviceMisuse, match="1023 bytes on the host, 1024 on the device"):
        broken.device.copy_in(broken.span, broken.host[:1023], broken.a)


def run(bench: Bench, work: Callable[[], object], reads: list[Span], writes: list[Span]) -> None:
    bench.fill(bench.a)
    bench.device.launch(bench.a, lambda: (work(), None)[1], reads=reads, writes=writes)
    bench.a.synchronize()


def test_rule_6_undeclared_memory(broken: Bench) -> None:
    part = broken.span.part(0, 512)
    with pytest.raises(DeviceMisuse, match="which its launch does not declare"):
        run(broken, lambda: broken.device.array(broken.span, (1024,), np.dtype(np.uint8)), [part], [])


def test_rule_6_writing_what_is_declared_as_read(bench: Bench) -> None:
    def work() -> None:
        bench.device.array(bench.span, (256,), F32)[...] = 1

    with pytest.raises(ValueError, match="read-only"):
        run(bench, work, [bench.span], [])


def test_rule_6_by_address(bench: Bench) -> None:
    address = bench.span.address

    def work() -> None:
        assert bench.device.view(address + 16, 16, writes=False)[0] == bench.host[16]
        bench.device.view(address, 16, writes=True).fill(3)

    run(bench, work, [bench.span], [bench.span.part(0, 16)])
    bench.device.copy_out(bench.host, bench.span, bench.a)
    bench.a.synchronize()
    assert bench.host[:17].tolist() == [3] * 16 + [16]


def test_rule_6_by_an_address_of_something_else(broken: Bench) -> None:
    other = broken.device.allocate(64, "other")
    address = other.address
    with pytest.raises(DeviceMisuse, match="reads 16 bytes at 0x"):
        run(broken, lambda: broken.device.view(address, 16, writes=False), [broken.span], [])


def test_rule_6_calling_the_device_from_inside_its_work(broken: Bench) -> None:
    with pytest.raises(DeviceMisuse, match="calls the device's 'allocate' from inside its work"):
        run(broken, lambda: broken.device.allocate(1, "x"), [], [])


def test_rule_6_arrays_outside_of_work(broken: Bench) -> None:
    with pytest.raises(DeviceMisuse, match="inside 'launch' only"):
        broken.device.array(broken.span, (1024,), np.dtype(np.uint8))
    kept: list[object] = []
    run(broken, lambda: kept.append(broken.device.array(broken.span, (256,), F32)), [broken.span], [])
    with pytest.raises(DeviceMisuse, match="inside 'launch' only"):
        broken.device.xp.add(kept[0], 1)
    with pytest.raises(DeviceMisuse, match="inside 'launch' only"):
        kept[0] + 1  # type: ignore[operator]


@pytest.mark.parametrize(
    ("mistake", "why"),
    [
        (lambda xp, array: array + np.ones(256, np.float32), "host array"),
        (lambda xp, array: xp.add(array, np.ones(256, np.float32)), "host array"),
        (lambda xp, array: xp.concatenate([array, np.ones(1, np.float32)]), "host array"),
        (lambda xp, array: np.concatenate([array, array]), "numpy.concatenate does not take device arrays"),
        (lambda xp, array: np.mean(array), "numpy.mean does not take device arrays"),
        (lambda xp, array: array.__setitem__(0, np.ones(1, np.float32)), "host array"),
    ],
)
def test_arrays_are_as_strict_as_a_gpus(bench: Bench, mistake: Callable[[object, object], object], why: str) -> None:
    def work() -> None:
        array = bench.device.array(bench.span, (256,), F32)
        with pytest.raises(TypeError, match=why):
            mistake(bench.device.xp, array)

    run(bench, work, [bench.span], [bench.span])


def test_array_functions_give_device_arrays_back(bench: Bench) -> None:
    def work() -> None:
        xp, array = bench.device.xp, bench.device.array(bench.span, (16, 16), F32)
        for result in (
            array + 1, array[0], array.sum(), array.mean(axis=0), array.T, array > 2, xp.where(array > 1, array, 0),
            xp.asarray(np.ones(3)), xp.split(array, 2)[0], array.astype(np.float16), array.max(), -array,
        ):  # fmt: skip
            assert type(result) is type(array)
        with pytest.raises(AttributeError, match="has no 'interp'"):
            _ = xp.interp

    run(bench, work, [bench.span], [])


def test_graph_replays_and_refuses_to_copy_to_the_host(broken: Bench) -> None:
    broken.fill(broken.a)
    total: list[NDArray] = []

    def work() -> None:
        total.append(broken.device.array(broken.span, (256,), F32).get())

    graph = broken.device.capture(broken.a, work, reads=[broken.span], writes=[])
    assert not total
    graph.launch(broken.a)
    with pytest.raises(DeviceMisuse, match="copies to the host inside a graph"):
        broken.a.synchronize()
    graph.close()
    with pytest.raises(DeviceMisuse, match="after it was closed"):
        graph.launch(broken.a)


def test_rule_7_graph_over_memory_that_was_forgotten(broken: Bench) -> None:
    broken.fill(broken.a)
    graph = broken.device.capture(broken.a, lambda: None, reads=[broken.span], writes=[])
    graph.launch(broken.a)
    broken.a.synchronize()
    broken.device.forget(broken.span)
    with pytest.raises(DeviceMisuse, match="reads byte 0 before"):
        graph.launch(broken.a)


def test_rule_7_graph_over_memory_that_was_freed(broken: Bench) -> None:
    graph = broken.device.capture(broken.a, lambda: None, reads=[], writes=[broken.span])
    broken.buffer.free()
    with pytest.raises(DeviceMisuse, match="after it was freed"):
        graph.launch(broken.a)


def test_objects_of_another_device(broken: Bench) -> None:
    other = HostDevice()
    with pytest.raises(DeviceMisuse, match="belongs to another device"):
        broken.fill(other.stream("elsewhere"))
    with pytest.raises(DeviceMisuse, match="event of another device"):
        broken.a.record(other.event())


def test_closed_streams_and_events(broken: Bench) -> None:
    broken.b.close()
    with pytest.raises(DeviceMisuse, match="stream 'b' is used after it was closed"):
        broken.fill(broken.b)
    event = broken.device.event()
    event.close()
    with pytest.raises(DeviceMisuse, match="event is used after it was closed"):
        broken.a.record(event)


def test_memory_is_counted_and_ends() -> None:
    device = HostDevice(1000)
    buffer = device.allocate(600, "first")
    assert device.memory().free_bytes == 400
    with pytest.raises(OutOfDeviceMemory, match="second: 500 bytes of device memory do not fit, 400 are free"):
        device.allocate(500, "second")
    buffer.free()
    assert device.memory().free_bytes == 1000
    device.close()


def test_closing_names_what_was_not_freed() -> None:
    device = HostDevice()
    kept = device.allocate(8, "weights of m"), device.pinned(8, "staging of m")
    with pytest.raises(DeviceMisuse, match="device memory 'weights of m', pinned memory 'staging of m'"):
        device.close()
    assert len(kept) == 2
    gc.collect()


def test_lesser_devices() -> None:
    device = HostDevice(capabilities=Capabilities(overlaps=False, graphs=False, registers=False))
    with pytest.raises(CannotRegister):
        device.register(np.zeros(8, np.uint8), "arena")
    with pytest.raises(CannotCapture):
        device.capture(device.stream("s"), lambda: None, reads=[], writes=[])
    device.close()


def test_lost_device_fails_every_call_and_can_be_let_go(bench: Bench) -> None:
    other = Bench()
    other.fill(other.a)
    other.device.lose("illegal address")
    with pytest.raises(DeviceLost, match="copy_in: the device is lost: illegal address"):
        other.fill(other.a)
    other.buffer.free()
    other.pinned.free()
    other.device.close()
