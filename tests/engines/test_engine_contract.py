"""What every engine must do the same, run over each of them on models both know."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import onnx_models
from array_on_host import HostDeviceArrayEngine
from engines.array.engine import ArrayEngine
from engines.base import Engine, Executable, Model, Rows, Slot
from engines.bundle.manifest import Manifest
from engines.device.shared import SharedDevice
from engines.errors import EngineFailed, NotReady
from engines.onnxruntime import OnnxRuntimeEngine
from engines.probe import TOLERANCE, resolve
from engines.process_memory import release_freed, resident_bytes
from engines.staging import SLOTS, address_of
from engines.tensor import BY_NAME, NDArray
from manifests import manifest
from tensorrt_fake.engines import FakeTensorRT

ENGINES: dict[str, Callable[[], Engine]] = {
    "onnxruntime": lambda: OnnxRuntimeEngine(threads=1),
    "array": ArrayEngine,
    "array (CuPy's part on the host device)": HostDeviceArrayEngine,
    "tensorrt 10.16 (strict fake)": lambda: FakeTensorRT("10.16"),
    "tensorrt 11.4 (strict fake)": lambda: FakeTensorRT("11.4"),
}

UNCARRIED = {"tensorrt": ("f64", "i16", "u16", "u32", "u64")}
"""Types that an engine's library does not have, by engine name; it must say so."""

ROWS = manifest(["INPUT f32 n 4"], ["OUTPUT f32 n 4"], (1, 3, 8))
AFFINE = manifest(["INPUT f32 n 8"], ["OUTPUT f32 n 8"], (1, 8, 32))
SEQUENCE = manifest(["IDS i64 n -1"], ["HIDDEN f32 n -1 8", "MEAN f32 n 8"], (1, 4), [[4], [8]])


SLOW = {"tensorrt 10.16 (strict fake)"}
"""Engines whose code runs under another name in every test already; ``tests/tensorrt_engine`` samples them."""


@pytest.fixture(
    params=[pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in sorted(ENGINES)]
)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = ENGINES[request.param]()
    yield engine
    engine.close()


@pytest.fixture
def load(engine: Engine) -> Iterator[Callable[[Manifest, Path], Model]]:
    opened: list[Model] = []

    def load(wanted: Manifest, path: Path) -> Model:
        model = engine.open(wanted, path)
        opened.append(model)
        model.prepare(resolve(model, wanted))
        return model

    yield load
    for model in opened:
        model.close()


Load = Callable[[Manifest, Path], Model]


def staged(executable: Executable, inputs: list[NDArray]) -> list[NDArray]:
    """Run on the engine's own buffers; rows beyond the given ones stay zero."""
    slot = executable.slot()
    for buffer, array in zip(slot.inputs, inputs, strict=True):
        buffer[...] = 0
        buffer[tuple(slice(0, size) for size in array.shape)] = array
    executable.stage(slot)
    executable.launch(slot)
    executable.finish(slot)
    return [output.copy() for output in slot.outputs]


def bound(executable: Executable, inputs: list[NDArray], outputs: list[NDArray]) -> list[NDArray]:
    """Run in place on the caller's arrays."""
    slot = executable.bind(inputs, outputs)
    executable.stage(slot)
    executable.launch(slot)
    executable.finish(slot)
    return slot.outputs


@pytest.mark.parametrize("batch_size", [1, 8, 32])
def test_staged_bound_and_plain_runs_agree(load: Load, tmp_path: Path, batch_size: int) -> None:
    model = load(AFFINE, onnx_models.affine(tmp_path / "m", 3.0, -2.0))
    executable = model.executable(0, batch_size)
    assert executable.batch_size == batch_size
    rows = np.random.default_rng(batch_size).random((batch_size, 8), dtype=np.float32)
    (plain,) = model.run([rows])
    np.testing.assert_array_equal(plain, rows * np.float32(3) - np.float32(2))
    np.testing.assert_array_equal(staged(executable, [rows])[0], plain)
    if executable.binds:
        output = np.full_like(rows, np.nan)
        bound(executable, [rows], [output])
        np.testing.assert_array_equal(output, plain)


def test_bound_run_reads_and_writes_a_slice_of_a_larger_buffer_only(load: Load, tmp_path: Path) -> None:
    executable = load(AFFINE, onnx_models.affine(tmp_path / "m")).executable(0, 8)
    if not executable.binds:
        pytest.skip("the engine copies")
    inputs, outputs = np.ones((32, 8), np.float32), np.full((32, 8), 7.0, np.float32)
    for start in (0, 8, 24):
        inputs[start : start + 8] = start
        bound(executable, [inputs[start : start + 8]], [outputs[start : start + 8]])
    expected = np.full((32, 8), 7.0, np.float32)
    for start in (0, 8, 24):
        expected[start : start + 8] = start * 2 + 1
    np.testing.assert_array_equal(outputs, expected)


def test_binding_many_addresses_stays_right(load: Load, tmp_path: Path) -> None:
    executable = load(AFFINE, onnx_models.affine(tmp_path / "m")).executable(0, 1)
    if not executable.binds:
        pytest.skip("the engine copies")
    inputs = np.random.default_rng(0).random((200, 8), dtype=np.float32)
    outputs = np.zeros_like(inputs)
    for _ in range(2):
        outputs[...] = 0
        for row in range(200):
            bound(executable, [inputs[row : row + 1]], [outputs[row : row + 1]])
        np.testing.assert_array_equal(outputs, inputs * 2 + 1)


def test_binding_refuses_arrays_that_do_not_fit(load: Load, tmp_path: Path) -> None:
    executable = load(AFFINE, onnx_models.affine(tmp_path / "m")).executable(0, 8)
    if not executable.binds:
        pytest.skip("the engine copies")
    right = np.zeros((8, 8), np.float32)
    for wrong in (right[:7], right.astype(np.float64), np.asfortranarray(np.ones((8, 8), np.float32))):
        with pytest.raises(AssertionError, match="'INPUT'"):
            executable.bind([wrong], [right])


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_padding_rows_are_zeros_and_do_not_reach_the_rows(load: Load, tmp_path: Path, rows: int) -> None:
    model = load(AFFINE, onnx_models.affine(tmp_path / "m"))
    given = np.random.default_rng(rows).random((rows, 8), dtype=np.float32)
    (out,) = staged(model.executable(0, 8), [given])
    np.testing.assert_array_equal(out[:rows], given * 2 + 1)
    np.testing.assert_array_equal(out[rows:], np.ones((8 - rows, 8), np.float32))


def test_fresh_slot_is_zeroed_and_contiguous(load: Load, tmp_path: Path) -> None:
    slot = load(SEQUENCE, onnx_models.sequence(tmp_path / "m")).executable(1, 4).slot()
    assert [array.shape for array in slot.inputs] == [(4, 8)]
    assert [array.shape for array in slot.outputs] == [(4, 8, 8), (4, 8)]
    for array in slot.inputs + slot.outputs:
        assert array.flags.c_contiguous
        assert array.ctypes.data % 64 == 0
        assert not array.any()


def test_nd_06_rows_do_not_depend_on_their_neighbours(load: Load, tmp_path: Path) -> None:
    """Equal rows of one run are bit-equal; between batch sizes the difference stays within the stated tolerance."""
    wanted = manifest(["INPUT f32 n 32"], ["OUTPUT f32 n 32"], (1, 8, 16))
    model = load(wanted, onnx_models.mlp(tmp_path / "m", layers=3, width=32))
    random = np.random.default_rng(6)
    relative, absolute = TOLERANCE["f32"]
    for trial in range(20):
        row = random.standard_normal((1, 32)).astype(np.float32)
        (alone,) = staged(model.executable(0, 1), [row])
        batch = random.standard_normal((8, 32)).astype(np.float32)
        batch[trial % 8] = row
        batch[(trial + 3) % 8] = row
        (together,) = staged(model.executable(0, 8), [batch])
        np.testing.assert_array_equal(together[trial % 8], together[(trial + 3) % 8])
        allowed = absolute + relative * np.abs(alone).max()
        assert np.abs(together[trial % 8] - alone[0]).max() <= allowed


def test_variants_and_batch_sizes(load: Load, tmp_path: Path) -> None:
    model = load(SEQUENCE, onnx_models.sequence(tmp_path / "m"))
    random = np.random.default_rng(0)
    for variant, length in enumerate((4, 8)):
        for batch_size in (1, 4):
            ids = random.integers(0, 100, (batch_size, length))
            hidden, mean = staged(model.executable(variant, batch_size), [ids])
            assert hidden.shape == (batch_size, length, 8)
            np.testing.assert_allclose(mean, hidden.mean(axis=1), rtol=1e-5, atol=1e-6)
            plain = model.run([ids])
            np.testing.assert_array_equal(hidden, plain[0])


@pytest.mark.parametrize("dtype", sorted(onnx_models.ONNX_DTYPES))
def test_every_dtype_passes_through_bit_equal(engine: Engine, load: Load, tmp_path: Path, dtype: str) -> None:
    wanted = manifest([f"INPUT {dtype} n 4"], [f"OUTPUT {dtype} n 4"], (1, 3))
    if dtype in UNCARRIED.get(engine.name, ()):
        with pytest.raises(NotReady, match=rf"executable_inputs\[0\]\.dtype: .* {dtype} \('INPUT'\)"):
            load(wanted, onnx_models.identity(tmp_path / "m", dtype))
        return
    model = load(wanted, onnx_models.identity(tmp_path / "m", dtype))
    element = BY_NAME[dtype].numpy
    random = np.random.default_rng(1)
    rows = (random.integers(0, 2, (3, 4)) if dtype == "bool" else random.integers(0, 100, (3, 4))).astype(element)
    assert staged(model.executable(0, 3), [rows])[0].tobytes() == rows.tobytes()
    output = np.zeros_like(rows)
    if model.executable(0, 3).binds:
        bound(model.executable(0, 3), [rows], [output])
        assert output.tobytes() == rows.tobytes()
    (plain,) = model.run([rows])
    assert plain.dtype == element
    assert plain.tobytes() == rows.tobytes()


def test_non_finite_values_survive(load: Load, tmp_path: Path) -> None:
    model = load(ROWS, onnx_models.identity(tmp_path / "m"))
    row = np.array([[np.nan, np.inf, -np.inf, -0.0]], np.float32)
    assert staged(model.executable(0, 1), [row])[0].tobytes() == row.tobytes()


def test_half_precision_computes(load: Load, tmp_path: Path) -> None:
    wanted = manifest(["INPUT f16 n 32"], ["OUTPUT f16 n 32"], (1, 3))
    model = load(wanted, onnx_models.half_mlp(tmp_path / "m"))
    rows = np.random.default_rng(0).random((3, 32)).astype(np.float16)
    (out,) = staged(model.executable(0, 3), [rows])
    assert out.dtype == np.float16
    np.testing.assert_allclose(out.astype(np.float32), model.run([rows])[0].astype(np.float32), rtol=2e-2, atol=1e-3)


def test_batch_on_another_axis(load: Load, tmp_path: Path) -> None:
    wanted = manifest(["STATE f32 2 n 3"], ["NEXT f32 2 n 3"], (1, 4))
    model = load(wanted, onnx_models.batch_axis_one(tmp_path / "m"))
    state = np.arange(24, dtype=np.float32).reshape(2, 4, 3)
    np.testing.assert_array_equal(staged(model.executable(0, 4), [state])[0], state + 1)


def test_without_a_batch_axis(load: Load, tmp_path: Path) -> None:
    wanted = manifest(["INPUT f32 6"], ["OUTPUT f32 6"], (0,))
    model = load(wanted, onnx_models.unbatched(tmp_path / "m"))
    values = np.arange(6, dtype=np.float32)
    np.testing.assert_array_equal(staged(model.executable(0, 0), [values])[0], values * 2)


def test_scalar_beside_rows(load: Load, tmp_path: Path) -> None:
    wanted = manifest(["INPUT f32 n 4", "NEGATE bool"], ["OUTPUT f32 n 4"], (1, 3))
    model = load(wanted, onnx_models.flag(tmp_path / "m"))
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    for negate in (False, True):
        slot_out = staged(model.executable(0, 3), [rows, np.array(negate)])[0]
        np.testing.assert_array_equal(slot_out, -rows if negate else rows)


def test_data_dependent_outputs_have_their_real_size(load: Load, tmp_path: Path) -> None:
    wanted = manifest(["SCORES f32 8"], ["KEPT f32 -1<=8", "INDEX i64 -1<=8"], (0,))
    executable = load(wanted, onnx_models.positives(tmp_path / "m")).executable(0, 0)
    for scores in ([1, -1, 2, 0, 0, 0, 0, 3], [-1] * 8, [1] * 8):
        kept, index = staged(executable, [np.array(scores, np.float32)])
        where = [at for at, score in enumerate(scores) if score > 0]
        assert index.tolist() == where
        assert kept.tolist() == [scores[at] for at in where]


def test_more_than_the_declared_limit_is_an_error(load: Load, tmp_path: Path) -> None:
    wanted = manifest(["SCORES f32 8"], ["KEPT f32 -1<=3", "INDEX i64 -1<=3"], (0,))
    # The probe draws from [0, 1), so nothing is above 2 until a request brings it.
    executable = load(wanted, onnx_models.positives(tmp_path / "kept", threshold=2.0)).executable(0, 0)
    assert staged(executable, [np.array([3] * 3 + [0] * 5, np.float32)])[1].tolist() == [0, 1, 2]
    with pytest.raises(EngineFailed, match="model 'kept': output 'KEPT': axis 0 has 8 entries, more than the 3"):
        staged(executable, [np.full(8, 3, np.float32)])


@pytest.mark.parametrize("surplus", [False, True], ids=["fewer", "more"])
def test_bs_07_wrong_row_count_names_model_output_and_shapes(load: Load, tmp_path: Path, surplus: bool) -> None:
    model = load(ROWS, onnx_models.miscounting(tmp_path / "counted", surplus=surplus))
    rows = np.ones((8, 4), np.float32)
    executable = model.executable(0, 8)
    np.testing.assert_array_equal(staged(executable, [rows])[0], rows)
    rows[3, 0] = onnx_models.POISON
    got = 9 if surplus else 7
    message = rf"model 'counted': output 'OUTPUT': expected shape \[8, 4\], got \[{got}, 4\]"
    with pytest.raises(EngineFailed, match=message):
        staged(executable, [rows])
    if executable.binds:
        with pytest.raises(EngineFailed, match=message):
            bound(executable, [rows], [np.zeros_like(rows)])
    rows[3, 0] = 1
    np.testing.assert_array_equal(staged(executable, [rows])[0], rows)


def test_model_that_raises_fails_that_run_only(load: Load, tmp_path: Path) -> None:
    model = load(ROWS, onnx_models.poison(tmp_path / "poisoned"))
    rows = np.ones((8, 4), np.float32)
    rows[5, 0] = onnx_models.POISON
    with pytest.raises(EngineFailed, match=r"model 'poisoned': Gather node.*(out of|outside)") as raised:
        staged(model.executable(0, 8), [rows])
    assert len(str(raised.value)) < 500
    assert "onnxruntime_src" not in str(raised.value)
    with pytest.raises(EngineFailed, match="model 'poisoned'"):
        model.run([rows])
    rows[5, 0] = 0
    np.testing.assert_array_equal(staged(model.executable(0, 8), [rows])[0], rows)


def test_timing_counts_the_execution(load: Load, tmp_path: Path) -> None:
    executable = load(AFFINE, onnx_models.affine(tmp_path / "m")).executable(0, 8)
    slot = executable.slot()
    executable.stage(slot)
    executable.launch(slot)
    timing = executable.finish(slot)
    assert timing.compute_ns > 0
    assert timing.copy_in_ns >= 0


def test_nd_03_two_models_interleaved(load: Load, tmp_path: Path) -> None:
    first = load(AFFINE, onnx_models.affine(tmp_path / "a", 2.0, 1.0))
    second = load(AFFINE, onnx_models.affine(tmp_path / "b", -3.0, 5.0))
    random = np.random.default_rng(3)
    for _ in range(30):
        size_a, size_b = (int(size) for size in random.choice([1, 8, 32], 2))
        rows_a = random.random((size_a, 8), dtype=np.float32)
        rows_b = random.random((size_b, 8), dtype=np.float32)
        a, b = first.executable(0, size_a), second.executable(0, size_b)
        slot_a, slot_b = a.slot(), b.slot()
        slot_a.inputs[0][...], slot_b.inputs[0][...] = rows_a, rows_b
        a.stage(slot_a)
        b.stage(slot_b)
        a.launch(slot_a)
        b.launch(slot_b)
        b.finish(slot_b)
        a.finish(slot_a)
        np.testing.assert_allclose(slot_a.outputs[0], rows_a * 2 + 1, rtol=1e-6)
        np.testing.assert_allclose(slot_b.outputs[0], rows_b * -3 + 5, rtol=1e-6, atol=1e-6)


def test_rows_are_taken_from_and_brought_to_where_they_lie(load: Load, engine: Engine, tmp_path: Path) -> None:
    """A batch of 8 in four parts: rows in an arena, rows in the slot, rows in other memory, a row of padding."""
    executable = load(AFFINE, onnx_models.affine(tmp_path / "m")).executable(0, 8)
    if executable.direct_bytes == 0:
        with pytest.raises(AssertionError, match="gathered into the slot"):
            executable.rows(executable.slot(), [], [])
        return
    shared: SharedDevice = engine.shared  # type: ignore[attr-defined]
    arena, random = np.zeros((2, 16, 8), np.float32), np.random.default_rng(8)
    assert shared.register(arena, "arena")
    for turn in range(6):
        rows = random.random((7, 8), dtype=np.float32)
        far_in, far_out = rows[5:].copy(), np.zeros((2, 8), np.float32)
        arena[0, turn : turn + 3], arena[1] = rows[:3], 0
        slot = executable.slot()
        # Not looked at where rows lie elsewhere; padding is zeros.
        slot.inputs[0][...] = 99
        slot.inputs[0][3:5], slot.inputs[0][7] = rows[3:5], 0
        executable.rows(
            slot,
            [Rows(0, 5, far_in), Rows(0, 0, arena[0, turn : turn + 3])],
            [Rows(0, 0, arena[1, 9:12]), Rows(0, 5, far_out)],
        )
        executable.stage(slot)
        if turn == 2:
            executable.unstage(slot)
            executable.stage(slot)
        executable.launch(slot)
        executable.finish(slot)
        expected = rows * 2 + 1
        np.testing.assert_allclose(arena[1, 9:12], expected[:3], rtol=1e-6)
        np.testing.assert_allclose(slot.outputs[0][3:5], expected[3:5], rtol=1e-6)
        np.testing.assert_allclose(far_out, expected[5:], rtol=1e-6)
        assert not arena[1, :9].any()
        assert not arena[1, 12:].any()
        # The next batch on these slots has all of its rows in the slot again.
        np.testing.assert_allclose(staged(executable, [rows])[0][:7], expected, rtol=1e-6)
    shared.unregister(arena)


def test_next_batch_is_staged_while_one_is_not_read_yet(load: Load, tmp_path: Path) -> None:
    """Batches of one executable, each gathered and staged before the results of the last one are read."""
    executable = load(AFFINE, onnx_models.affine(tmp_path / "m")).executable(0, 8)
    random = np.random.default_rng(4)
    ahead: tuple[Slot, NDArray] | None = None
    slots: set[int] = set()
    for turn in range(7):
        slot, rows = executable.slot(), random.random((8, 8), dtype=np.float32)
        slots.add(id(slot))
        slot.inputs[0][...] = rows
        executable.stage(slot)
        if ahead is not None:
            np.testing.assert_allclose(ahead[0].outputs[0], ahead[1] * 2 + 1, rtol=1e-6)
        executable.launch(slot)
        executable.finish(slot)
        ahead = slot, rows
        if turn == 3:
            # Staged and given up, as when its only request is withdrawn: it costs nobody a turn.
            executable.stage(executable.slot())
            ahead = None
    assert len(slots) == SLOTS


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (manifest(["PIXELS f32 n 4"], ["OUTPUT f32 n 4"]), r"executable_inputs\[0\]\.name.*'PIXELS'.*'INPUT'"),
        (manifest(["INPUT f32 n 4"], ["LOGITS f32 n 4"]), r"executable_outputs\[0\]\.name.*'LOGITS'.*'OUTPUT'"),
        (manifest(["INPUT i32 n 4"], ["OUTPUT f32 n 4"]), r"executable_inputs\[0\]\.dtype.*f32 in the file, i32"),
        (
            manifest(["INPUT f32 n 4 1"], ["OUTPUT f32 n 4"]),
            r"inputs\[0\]\.shape.*2 axes.*3 in the manifest",
        ),
        (manifest(["INPUT f32 n 5"], ["OUTPUT f32 n 4"]), r"executable_inputs\[0\]\.dims: axis 1.*4 in the file, 5"),
        (manifest(["INPUT f32 n 4"], ["OUTPUT f32 n 9"]), r"executable_outputs\[0\]\.dims: axis 1.*4 in the file, 9"),
        (manifest(["INPUT f32 n -1"], ["OUTPUT f32 n 4"], shapes=[[4]]), r"executable_inputs\[0\]\.dims.*write 4"),
        (manifest(["INPUT f32 n 4", "MASK f32 n 4"], ["OUTPUT f32 n 4"]), r"executable_inputs\[1\]\.name.*'MASK'"),
    ],
)
def test_manifest_that_contradicts_the_file(engine: Engine, tmp_path: Path, wanted: Manifest, why: str) -> None:
    path = onnx_models.identity(tmp_path / "wrong")
    with pytest.raises(NotReady, match=f"wrong: manifest and model.onnx disagree.*{why}"):
        engine.open(wanted, path)


def test_every_contradiction_is_told_at_once(engine: Engine, tmp_path: Path) -> None:
    wanted = manifest(["INPUT0 f32 n 16"], ["OUTPUT0 i32 n 8"])
    with pytest.raises(NotReady) as raised:
        engine.open(wanted, onnx_models.simple(tmp_path / "m"))
    for place in ("executable_inputs[0].dtype", "'INPUT1' is missing", "executable_outputs[0].dims"):
        assert place in str(raised.value)


def test_outputs_may_be_left_out(load: Load, tmp_path: Path) -> None:
    wanted = manifest(["INPUT0 i32 n 16", "INPUT1 i32 n 16"], ["OUTPUT1 i32 n 16"], (1, 8))
    model = load(wanted, onnx_models.simple(tmp_path / "m"))
    rows = np.arange(128, dtype=np.int32).reshape(8, 16)
    (difference,) = staged(model.executable(0, 8), [rows, rows * 3])
    np.testing.assert_array_equal(difference, rows * -2)


def test_file_with_a_fixed_batch_serves_that_size_only(engine: Engine, tmp_path: Path) -> None:
    path = onnx_models.mlp(tmp_path / "fixed", width=16, batch=4)
    with pytest.raises(NotReady, match=r"compiled_batch_sizes.*'INPUT' at 4, so only \[4\]"):
        engine.open(manifest(["INPUT f32 n 16"], ["OUTPUT f32 n 16"], (1, 4)), path)
    wanted = manifest(["INPUT f32 n 16"], ["OUTPUT f32 n 16"], (4,))
    model = engine.open(wanted, path)
    model.prepare(resolve(model, wanted))
    rows = np.random.default_rng(0).random((4, 16), dtype=np.float32)
    np.testing.assert_array_equal(staged(model.executable(0, 4), [rows])[0], model.run([rows])[0])
    model.close()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (onnx_models.not_a_model, "cannot be read as an ONNX model"),
        (onnx_models.unknown_opset, "opset"),
        (onnx_models.unknown_operator, "Frobnicate"),
    ],
)
def test_files_that_do_not_load(engine: Engine, tmp_path: Path, make: Callable[[Path], Path], why: str) -> None:
    path = make(tmp_path / "broken")
    with pytest.raises(NotReady, match=rf"(?s)broken: .*{why}") as raised:
        engine.open(ROWS, path)
    assert str(path) in str(raised.value)


def test_truncated_file(engine: Engine, tmp_path: Path) -> None:
    path = onnx_models.mlp(tmp_path / "cut", width=64)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(NotReady, match="cut: "):
        engine.open(manifest(["INPUT f32 n 64"], ["OUTPUT f32 n 64"]), path)
    path.write_bytes(b"")
    with pytest.raises(NotReady, match=r"cut: .*empty"):
        engine.open(manifest(["INPUT f32 n 64"], ["OUTPUT f32 n 64"]), path)


def test_missing_file(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(NotReady, match=r"model\.onnx: cannot be read as an ONNX model: No such file"):
        engine.open(ROWS, tmp_path / "gone" / "model.onnx")


def test_footprint_counts_the_weights(load: Load, tmp_path: Path) -> None:
    wanted = manifest(["INPUT f32 n 256"], ["OUTPUT f32 n 256"], (1, 8))
    model = load(wanted, onnx_models.mlp(tmp_path / "m", layers=2, width=256))
    assert model.footprint.weights_bytes == 2 * (256 * 256 + 256) * 4
    assert model.footprint.scratch_bytes >= 0


def test_ml_02_closing_gives_memory_back(engine: Engine, tmp_path: Path) -> None:
    """Load and close a 32 MB model several times: no growth beyond a fraction of one model."""
    wanted = manifest(["INPUT f32 n 1024"], ["OUTPUT f32 n 1024"], (1, 8))
    path = onnx_models.mlp(tmp_path / "m", layers=8, width=1024)
    release_freed()

    def cycle() -> int:
        model = engine.open(wanted, path)
        model.prepare(resolve(model, wanted))
        staged(model.executable(0, 8), [np.ones((8, 1024), np.float32)])
        model.close()
        return resident_bytes()

    first = [cycle() for _ in range(2)][-1]
    last = [cycle() for _ in range(4)][-1]
    assert last - first < 8 * 1024 * 1024, f"{(last - first) / 1e6:.1f} MB more after 4 cycles"


def test_sm_12_failed_load_gives_memory_back(engine: Engine, tmp_path: Path) -> None:
    path = onnx_models.mlp(tmp_path / "m", layers=8, width=1024)
    wrong = manifest(["INPUT f32 n 1024"], ["ELSEWHERE f32 n 1024"], (1, 8))

    def attempt() -> int:
        with pytest.raises(NotReady):
            engine.open(wrong, path)
        return resident_bytes()

    first = [attempt() for _ in range(2)][-1]
    last = [attempt() for _ in range(4)][-1]
    assert last - first < 8 * 1024 * 1024, f"{(last - first) / 1e6:.1f} MB more after 4 attempts"


def test_launch_lets_other_threads_run(load: Load, tmp_path: Path) -> None:
    """Another thread must get its turns while an execution computes; one that held the lock would stop it."""
    wanted = manifest(["INPUT f32 n 1024"], ["OUTPUT f32 n 1024"], (512,))
    model = load(wanted, onnx_models.mlp(tmp_path / "m", layers=4, width=1024))
    executable = model.executable(0, 512)
    slot = executable.slot()
    executable.stage(slot)
    turns = 0
    stop = threading.Event()
    started = threading.Event()

    def count() -> None:
        nonlocal turns
        while not stop.is_set():
            turns += 1
            started.set()

    thread = threading.Thread(target=count)
    thread.start()
    assert started.wait(10)
    before = turns
    executable.launch(slot)
    executable.finish(slot)
    during = turns - before
    stop.set()
    thread.join()
    assert during > 100, f"only {during} turns during the execution"


def test_bfloat16_is_the_numpy_type_that_clients_share() -> None:
    assert BY_NAME["bf16"].numpy == np.dtype(ml_dtypes.bfloat16)


def test_address_of_is_where_the_array_begins() -> None:
    readonly = np.arange(4.0)
    readonly.flags.writeable = False
    for array in (np.arange(12.0)[3:], readonly, np.zeros(0), np.zeros(3, ml_dtypes.bfloat16), np.zeros(())):
        assert address_of(array) == array.ctypes.data
