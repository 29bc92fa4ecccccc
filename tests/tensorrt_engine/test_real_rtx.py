"""TensorRT-RTX itself parses and builds our networks on the CPU. It cannot run them without a GPU.

Opt-in: ``pip install tensorrt-rtx`` (90 MB), or put a directory with it on PYTHONPATH. Models that are not on this
machine are skipped: ``scripts/demo_bundles`` makes MiniLM, ``pip install rapidocr-onnxruntime`` brings OCR.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

import onnx_models
from engines.bundle.manifest import Manifest
from engines.errors import NotReady
from engines.tensorrt.builder import BuildOptions
from engines.tensorrt.names import Api
from engines.tensorrt.plan_cache import PlanCache
from engines.tensorrt.planning import Planned, Planner
from manifests import manifest

trt = pytest.importorskip("tensorrt_rtx", reason="opt-in: pip install tensorrt-rtx", exc_type=ImportError)
BATCHES = (1, 2, 4, 8)


def package_file(package: str, path: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"pip install {package.replace('_', '-')} brings this model")
    return Path(found.origin).parent / path


def copied(directory: Path, file: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "model.onnx").symlink_to(file)
    return directory / "model.onnx"


def mlp(directory: Path) -> Path:
    return onnx_models.mlp(directory / "mlp", layers=4, width=512)


def magika(directory: Path) -> Path:
    return copied(directory / "magika", package_file("magika", "models/standard_v3_3/model.onnx"))


def minilm(directory: Path) -> Path:
    file = Path(__file__).resolve().parents[2] / "demo" / "models" / "minilm" / "model.onnx"
    if not file.exists():
        pytest.skip("scripts/demo_bundles makes this model")
    return copied(directory / "minilm", file)


def ocr_detection(directory: Path) -> Path:
    return copied(directory / "det", package_file("rapidocr_onnxruntime", "models/ch_PP-OCRv4_det_infer.onnx"))


def ocr_recognition(directory: Path) -> Path:
    return copied(directory / "rec", package_file("rapidocr_onnxruntime", "models/ch_PP-OCRv4_rec_infer.onnx"))


def manifest_of(name: str, batches: tuple[int, ...]) -> Manifest:
    match name:
        case "mlp":
            return manifest(["INPUT f32 n 512"], ["OUTPUT f32 n 512"], batches)
        case "magika":
            return manifest(["bytes i32 n 2048"], ["target_label f32 n 214"], batches)
        case "minilm":
            return manifest(
                ["ids i64 n -1", "mask i64 n -1", "types i64 n -1"],
                ["EMBEDDING f32 n 384"], batches, [[16] * 3, [64] * 3],
            )  # fmt: skip
        case "ocr_detection":
            return manifest(["x f32 n 3 -1 -1"], ["sigmoid_0.tmp_0 f32 n 1 -1 -1"], batches, [[320, 320]])
    return manifest(["x f32 n 3 48 -1"], ["softmax_11.tmp_0 f32 n -1 6625"], batches, [[160], [320]])


MODELS: dict[str, Callable[[Path], Path]] = {
    "mlp": mlp, "magika": magika, "minilm": minilm, "ocr_detection": ocr_detection, "ocr_recognition": ocr_recognition,
}  # fmt: skip


def planned(name: str, path: Path, batches: tuple[int, ...], cache: Path | None = None) -> tuple[Planned, int]:
    """Return the plan and the bytes of the weights outside it."""
    planner = Planner(Api(trt, "tensorrt_rtx").checked(), PlanCache(cache), BuildOptions.of("auto"))
    plan, arrays = planner.plan(path.parent.name, manifest_of(name, batches), path, "")
    return plan, sum(array.nbytes for array in arrays.values())


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_profile_builds_and_all_share_the_weights(
    tmp_path: Path, name: str, record_property: Callable[[str, object], None]
) -> None:
    path = MODELS[name](tmp_path)
    one, one_bytes = planned(name, path, BATCHES[:1])
    all_of_them, all_bytes = planned(name, path, BATCHES)
    assert one.reason == all_of_them.reason == "", "the weights had to stay inside"
    assert one_bytes == all_bytes > 0
    # What is inside a plan besides kernels is far less than one more copy of the weights would be.
    assert len(all_of_them.plan) - len(one.plan) < max(len(BATCHES) * len(one.plan), all_bytes)
    figures = {"weights": all_bytes, "plan, 1 batch size": len(one.plan), "plan, 4": len(all_of_them.plan)}
    print(f"{name}: {', '.join(f'{title} {size / 1e6:.2f} MB' for title, size in figures.items())}")
    for title, size in figures.items():
        record_property(title, size)


def test_library_takes_our_callbacks_and_has_what_weights_inside_need(capfd: pytest.CaptureFixture[str]) -> None:
    """Called through the real base class, which goes through C++: the types are those that the fake calls with."""
    api = Api(trt, "tensorrt_rtx")
    assert api.defers_weights
    asked: list[tuple[str, int, int]] = []

    class Blocks:
        def allocate(self, size_bytes: int, stream: int) -> int | None:
            asked.append(("allocate", size_bytes, stream))
            return 4096 if size_bytes else None

        def release(self, address: int, stream: int) -> bool:
            asked.append(("release", address, stream))
            return True

    allocator = api.gpu_allocator(Blocks())
    assert isinstance(allocator, trt.IGpuAsyncAllocator)
    block = trt.IGpuAllocator.allocate_async(allocator, 100, 256, 0, 7)
    assert trt.IGpuAllocator.deallocate_async(allocator, block, 7)
    assert trt.IGpuAllocator.reallocate(allocator, block, 256, 200) is None
    assert trt.IGpuAllocator.allocate_async(allocator, 0, 256, 0, 7) is None
    assert asked == [("allocate", 100, 7), ("release", 4096, 7), ("allocate", 0, 7)]
    assert "[ERROR]" not in capfd.readouterr().err
    runtime_properties = {name for name in dir(trt.Runtime) if not name.startswith("_")}
    assert {"gpu_allocator", "defer_weights_loading"} <= runtime_properties


def test_second_build_comes_from_the_cache(tmp_path: Path) -> None:
    path = mlp(tmp_path)
    assert not planned("mlp", path, BATCHES, tmp_path / "plans")[0].cached
    assert planned("mlp", path, BATCHES, tmp_path / "plans")[0].cached


def test_operator_that_is_not_known_is_named(tmp_path: Path) -> None:
    planner = Planner(Api(trt, "tensorrt_rtx"), PlanCache(None), BuildOptions.of("auto"))
    wanted = manifest(["INPUT f32 n 4"], ["OUTPUT f32 n 4"])
    with pytest.raises(NotReady, match=r"does not build it: cannot be parsed: Frobnicate node 'strange': .*Plugin not"):
        planner.plan("m", wanted, onnx_models.unknown_operator(tmp_path / "m"), "")


def test_frozen_row_count_fails_to_build_with_the_librarys_reason(tmp_path: Path) -> None:
    planner = Planner(Api(trt, "tensorrt_rtx"), PlanCache(None), BuildOptions.of("auto"))
    wanted = manifest(["INPUT f32 n 4"], ["OUTPUT f32 n 4"], (1, 4))
    with pytest.raises(NotReady, match=r"cannot be built: Shape Error \(reshape changes volume"):
        planner.plan("m", wanted, onnx_models.frozen_batch(tmp_path / "m"), "")


@pytest.mark.parametrize("dtype", ["bf16", "bool", "f16", "f32", "i32", "i64", "i8", "u8"])
def test_types_that_we_say_are_carried_build(tmp_path: Path, dtype: str) -> None:
    api = Api(trt, "tensorrt_rtx")
    assert api.carries(dtype)
    planner = Planner(api, PlanCache(None), BuildOptions.of("auto"))
    wanted = manifest([f"INPUT {dtype} n 4"], [f"OUTPUT {dtype} n 4"], (1, 3))
    assert planner.plan("m", wanted, onnx_models.identity(tmp_path / "m", dtype), "")[0].plan
