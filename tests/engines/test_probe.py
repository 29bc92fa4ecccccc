"""The probe finds out what a model really does with its batch axis, and says what to change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import onnx_models
from engines.bundle.manifest import Manifest
from engines.bundle.signature import Signature
from engines.errors import EngineFailed, NotReady
from engines.onnxruntime import OnnxRuntimeEngine
from engines.probe import Probe, probe
from engines.tensor import NDArray
from manifests import manifest

ROWS = manifest(["INPUT f32 n 4"], ["OUTPUT f32 n 4"], (1, 3, 8))


@pytest.fixture
def engine() -> Iterator[OnnxRuntimeEngine]:
    engine = OnnxRuntimeEngine(threads=1)
    yield engine
    engine.close()


def probed(engine: OnnxRuntimeEngine, wanted: Manifest, path: Path) -> Probe:
    model = engine.open(wanted, path)
    try:
        return probe(model, wanted)
    finally:
        model.close()


def refused(engine: OnnxRuntimeEngine, wanted: Manifest, path: Path) -> str:
    with pytest.raises(NotReady) as raised:
        probed(engine, wanted, path)
    return str(raised.value)


def test_clean_model_coalesces_and_is_bit_equal(engine: OnnxRuntimeEngine, tmp_path: Path) -> None:
    found = probed(engine, ROWS, onnx_models.identity(tmp_path / "m"))
    signature = found.signature
    assert isinstance(signature, Signature)
    assert signature.coalesces
    assert signature.shares_blocks
    assert signature.batch_sizes == (1, 3, 8)
    assert [variant.inputs for variant in signature.variants] == [((-1, 4),)]
    assert [variant.outputs for variant in signature.variants] == [((-1, 4),)]
    assert {difference.output for difference in found.differences} == {"OUTPUT"}
    assert found.differences[0].largest == 0
    assert found.warm_ns[0] > 0


def test_variable_output_axes_are_resolved_per_variant(engine: OnnxRuntimeEngine, tmp_path: Path) -> None:
    wanted = manifest(["IDS i64 n -1"], ["HIDDEN f32 n -1 -1", "MEAN f32 n -1"], (1, 4), [[4], [16]])
    signature = probed(engine, wanted, onnx_models.sequence(tmp_path / "m")).signature
    assert [variant.sizes for variant in signature.variants] == [(4,), (16,)]
    assert [variant.inputs for variant in signature.variants] == [((-1, 4),), ((-1, 16),)]
    assert [variant.outputs for variant in signature.variants] == [((-1, 4, 8), (-1, 8)), ((-1, 16, 8), (-1, 8))]


def test_limits_of_data_dependent_axes_are_kept(engine: OnnxRuntimeEngine, tmp_path: Path) -> None:
    wanted = manifest(["SCORES f32 8"], ["KEPT f32 -1<=8", "INDEX i64 -1<=8"], (0,))
    signature = probed(engine, wanted, onnx_models.positives(tmp_path / "m")).signature
    assert signature.variants[0].outputs == ((8,), (8,))
    assert signature.variants[0].dynamic_outputs == (True, True)
    assert not signature.coalesces


def test_data_dependent_axis_without_a_limit(engine: OnnxRuntimeEngine, tmp_path: Path) -> None:
    wanted = manifest(["SCORES f32 8"], ["KEPT f32 -1", "INDEX i64 -1"], (0,))
    message = refused(engine, wanted, onnx_models.positives(tmp_path / "m"))
    assert "executable_outputs[0].max: the size of axis 0 of 'KEPT' depends on the data (0 entries on zeros" in message


def test_data_dependent_axis_above_its_limit(engine: OnnxRuntimeEngine, tmp_path: Path) -> None:
    wanted = manifest(["SCORES f32 8"], ["KEPT f32 -1<=3", "INDEX i64 -1<=3"], (0,))
    message = refused(engine, wanted, onnx_models.positives(tmp_path / "m"))
    assert "executable_outputs[0].max: axis 0 of 'KEPT' had 8 entries when run, max allows 3" in message


def test_output_without_batch_axis_does_not_coalesce(engine: OnnxRuntimeEngine, tmp_path: Path) -> None:
    wanted = manifest(["INPUT f32 n 4"], ["EACH f32 n 4", "TOTAL f32 4"], (1, 3))
    signature = probed(engine, wanted, onnx_models.total(tmp_path / "m")).signature
    assert not signature.coalesces


def test_batch_axis_elsewhere_coalesces_without_sharing_blocks(engine: OnnxRuntimeEngine, tmp_path: Path) -> None:
    wanted = manifest(["STATE f32 2 n 3"], ["NEXT f32 2 n 3"], (1, 4))
    signature = probed(engine, wanted, onnx_models.batch_axis_one(tmp_path / "m")).signature
    assert signature.coalesces
    assert not signature.shares_blocks


def test_nd_04_mixed_rows_name_output_and_difference(engine: OnnxRuntimeEngine, tmp_path: Path) -> None:
    path = onnx_models.batch_mixing(tmp_path / "m")
    message = refused(engine, ROWS, path)
    assert message.startswith("output 'OUTPUT': row ")
    assert "of a batch of 3 differs" in message
    difference = float(message.split("neighbours by ")[1].split(",")[0])
    assert 0.05 < difference < 1
    assert "compiled_batch_sizes: [1]" in message
    # The advice works.
    single = manifest(["INPUT f32 n 4"], ["OUTPUT f32 n 4"], (1,))
    assert probed(engine, single, path).signature.batch_sizes == (1,)


def test_nd_04_mixed_rows_behind_a_single_larger_size(engine: OnnxRuntimeEngine, tmp_path: Path) -> None:
    wanted = manifest(["INPUT f32 n 4"], ["OUTPUT f32 n 4"], (8,))
    assert "row 0 of a batch of 8 differs" in refused(engine, wanted, onnx_models.batch_mixing(tmp_path / "m"))


def test_nd_07_right_for_one_row_wrong_above(engine: OnnxRuntimeEngine, tmp_path: Path) -> None:
    message = refused(engine, ROWS, onnx_models.first_row_only(tmp_path / "m"))
    assert "row 0" not in message
    assert "of a batch of 3 differs" in message


@pytest.mark.parametrize(("make", "got"), [(onnx_models.lost_row, 3), (onnx_models.surplus_row, 9)])
def test_bs_07_rows_lost_only_at_the_largest_size(engine: OnnxRuntimeEngine, tmp_path: Path, make, got) -> None:  # type: ignore[no-untyped-def]
    message = refused(engine, ROWS, make(tmp_path / "m"))
    assert f"the batch axis 0 has {got} entries when run with 8 rows" in message


def test_batch_frozen_inside(engine: OnnxRuntimeEngine, tmp_path: Path) -> None:
    message = refused(engine, ROWS, onnx_models.frozen_batch(tmp_path / "m"))
    assert "compiled_batch_sizes: the file fixes the batch axis of 'OUTPUT' at 1" in message


def test_unmarked_output_that_follows_the_batch(engine: OnnxRuntimeEngine, tmp_path: Path) -> None:
    wanted = manifest(["INPUT f32 n 4"], ["OUTPUT f32 -1 4"], (1, 8))
    path = onnx_models.identity(tmp_path / "m")
    assert "has no batch axis in the manifest, but axis 0 grows from 1 to 3" in refused(engine, wanted, path)


def test_declared_size_that_is_not_what_comes_out(engine: OnnxRuntimeEngine, tmp_path: Path) -> None:
    path = onnx_models.write(
        tmp_path / "m",
        [onnx_models.helper.make_node("Identity", ["INPUT"], ["OUTPUT"])],
        [onnx_models.value("INPUT", "f32", ["n", 4])],
        [onnx_models.value("OUTPUT", "f32", [None, None])],
    )
    wanted = manifest(["INPUT f32 n 4"], ["OUTPUT f32 n 7"], (1, 8))
    message = refused(engine, wanted, path)
    assert "executable_outputs[0].dims: axis 1 of 'OUTPUT'" in message
    assert "4" in message
    assert "7" in message


class Stub:
    """A model of numpy functions, for faults that no file of the test factory has."""

    def __init__(self, function) -> None:  # type: ignore[no-untyped-def]
        self._function = function

    def run(self, inputs: list[NDArray]) -> list[NDArray]:
        return [self._function(*inputs)]


def test_batch_frozen_where_only_a_run_shows_it() -> None:
    def frozen(rows: NDArray) -> NDArray:
        if len(rows) != 1:
            raise EngineFailed("model 'm': Reshape node failed")
        return rows

    with pytest.raises(NotReady, match=r"runs with 1 row but fails with 3: model 'm': Reshape.*batch_sizes: \[1\]"):
        probe(Stub(frozen), ROWS)  # type: ignore[arg-type]


def test_wrong_batch_axis_names_the_one_that_follows() -> None:
    wanted = manifest(["INPUT f32 n 1"], ["OUTPUT f32 n -1"], (1, 8))
    with pytest.raises(NotReady, match="axis 1 follows the batch: mark that one with the letter n"):
        probe(Stub(lambda rows: rows.T.copy()), wanted)  # type: ignore[arg-type]


def test_nan_on_one_side_only_is_a_difference() -> None:
    def spoiled(rows: NDArray) -> NDArray:
        out = rows.copy()
        out[1:] = np.nan
        return out

    with pytest.raises(NotReady, match=r"differs .* by inf"):
        probe(Stub(spoiled), ROWS)  # type: ignore[arg-type]


def test_nan_everywhere_is_no_difference() -> None:
    found = probe(Stub(lambda rows: rows * np.float32(np.nan)), ROWS)  # type: ignore[arg-type]
    assert found.signature.coalesces


def test_rounding_is_no_difference_but_a_small_leak_is() -> None:
    def leaking(part: float):  # type: ignore[no-untyped-def]
        return lambda rows: (rows + part * rows.sum(axis=0)).astype(np.float32)

    assert probe(Stub(leaking(1e-7)), ROWS).signature.coalesces  # type: ignore[arg-type]
    with pytest.raises(NotReady, match="mixes"):
        probe(Stub(leaking(1e-2)), ROWS)  # type: ignore[arg-type]


def test_integers_must_be_equal() -> None:
    wanted = manifest(["INPUT i32 n 4"], ["OUTPUT i32 n 4"], (1, 8))
    with pytest.raises(NotReady, match="allowed is 0 for i32"):
        probe(Stub(lambda rows: (rows + len(rows)).astype(np.int32)), wanted)  # type: ignore[arg-type]


def test_type_that_changes_when_run() -> None:
    with pytest.raises(NotReady, match=r"executable_outputs\[0\]\.dtype: 'OUTPUT' is float64 when run, f32"):
        probe(Stub(lambda rows: rows.astype(np.float64)), ROWS)  # type: ignore[arg-type]


def test_rank_that_differs_when_run() -> None:
    with pytest.raises(NotReady, match=r"executable_outputs\[0\]\.shape: 'OUTPUT' has 0 axes when run"):
        probe(Stub(lambda rows: np.float32(rows.sum()).reshape(())), ROWS)  # type: ignore[arg-type]


def test_model_that_refuses_zeros_cannot_be_padded(engine: OnnxRuntimeEngine, tmp_path: Path) -> None:
    path = onnx_models.write(
        tmp_path / "m",
        [
            onnx_models.helper.make_node("Sub", ["INPUT", "one"], ["index"]),
            onnx_models.helper.make_node("Gather", ["table", "index"], ["OUTPUT"]),
        ],
        [onnx_models.value("INPUT", "i64", ["n", 4])],
        [onnx_models.value("OUTPUT", "f32", ["n", 4])],
        # Index -1 is the last element, so one less must be out of range.
        [onnx_models.constant("one", np.int64(9)), onnx_models.constant("table", np.zeros(8, np.float32))],
    )
    wanted = manifest(["INPUT i64 n 4"], ["OUTPUT f32 n 4"], (1, 8))
    message = refused(engine, wanted, path)
    assert message.startswith("the model fails on zeros")
    assert "padding rows are zeros" in message
