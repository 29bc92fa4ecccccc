"""What ONNX Runtime takes from the process: threads as told, memory up to a plateau, errors a person can read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import onnx_models
from engines.errors import NotReady
from engines.onnxruntime import MAX_MESSAGE_CHARS, OnnxRuntimeEngine, _shortened
from engines.probe import resolve
from engines.process_memory import resident_bytes
from engines.staging import SLOTS
from manifests import manifest


def threads_now() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.parametrize("threads", [1, 3])
def test_mo_06_a_session_starts_the_threads_it_was_told(tmp_path: Path, threads: int) -> None:
    wanted = manifest(["INPUT f32 n 8"], ["OUTPUT f32 n 8"])
    path = onnx_models.affine(tmp_path / "m")
    before = threads_now()
    model = OnnxRuntimeEngine(threads=threads).open(wanted, path)
    # The calling thread computes too.
    assert threads_now() - before == threads - 1
    model.close()
    assert threads_now() == before


def test_mo_07_memory_stays_at_its_plateau(tmp_path: Path) -> None:
    """One large execution, then many of all sizes: the closed list of sizes bounds what the arena keeps."""
    lengths, sizes = (16, 128, 1024), (1, 8, 32)
    wanted = manifest(["IDS i64 n -1"], ["HIDDEN f32 n -1 64", "MEAN f32 n 64"], sizes, [[n] for n in lengths])
    model = OnnxRuntimeEngine(threads=1).open(wanted, onnx_models.sequence(tmp_path / "m", width=64))
    model.prepare(resolve(model, wanted))

    def run(variant: int, batch_size: int) -> None:
        executable = model.executable(variant, batch_size)
        slot = executable.slot()
        executable.launch(slot)
        executable.finish(slot)

    for variant in reversed(range(len(lengths))):
        for batch_size in reversed(sizes):
            for _ in range(SLOTS):
                run(variant, batch_size)
    plateau = resident_bytes()
    random = np.random.default_rng(0)
    for _ in range(400):
        run(int(random.integers(len(lengths))), int(random.choice(sizes)))
    assert resident_bytes() - plateau < 2 * 1024 * 1024
    model.close()


def test_operator_without_a_kernel_names_the_way_out(tmp_path: Path) -> None:
    path = onnx_models.write(
        tmp_path / "m",
        [onnx_models.helper.make_node("MatMul", ["INPUT", "INPUT"], ["OUTPUT"], name="product")],
        [onnx_models.value("INPUT", "bf16", ["n", 4, 4])],
        [onnx_models.value("OUTPUT", "bf16", ["n", 4, 4])],
    )
    with pytest.raises(NotReady, match=r"MatMul.*no CPU kernel for this operator and data type; export the model as"):
        OnnxRuntimeEngine(threads=1).open(manifest(["INPUT bf16 n 4 4"], ["OUTPUT bf16 n 4 4"]), path)


def test_messages_lose_build_paths_and_stay_short() -> None:
    raw = (
        "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running Reshape node. Name:'r1' Status "
        "Message: /onnxruntime_src/onnxruntime/core/providers/cpu/tensor/reshape_helper.h:91 onnxruntime::"
        "ReshapeHelper::ReshapeHelper(const onnxruntime::TensorShape&, onnxruntime::TensorShapeVector&, bool) "
        "input_shape_size == requested_shape_size was false. The input tensor cannot be reshaped.\n"
    )
    short = _shortened(raw)
    assert short.startswith("Reshape node 'r1' failed: input_shape_size == requested_shape_size was false.")
    assert "onnxruntime_src" not in short
    assert len(_shortened("x" * 5000)) == MAX_MESSAGE_CHARS
