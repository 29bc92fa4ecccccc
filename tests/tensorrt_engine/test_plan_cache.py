"""Plans are built once for everything they depend on, and again, with a reason, when one of those changes."""

from __future__ import annotations

import json
import logging
import os
import stat
from pathlib import Path

import numpy as np
import pytest

import onnx_models
from engines.errors import NotReady
from engines.probe import resolve
from engines.tensorrt.plan_cache import MAX_PLANS_PER_MODEL, Cached, PlanCache, digest
from manifests import manifest
from tensorrt_fake.engines import FakeTensorRT

WIDE = manifest(["INPUT f32 n 32"], ["OUTPUT f32 n 32"], (1, 4))


def builds(version: str, cache: Path, model: Path, **options: object) -> int:
    """Open the model once with a fresh engine, check that it computes, and return how many plans were built."""
    engine = FakeTensorRT(version, cache=cache, **options)  # type: ignore[arg-type]
    opened = engine.open(WIDE, model)
    opened.prepare(resolve(opened, WIDE))
    rows = np.random.default_rng(0).random((4, 32), dtype=np.float32)
    slot = opened.executable(0, 4).slot()
    slot.inputs[0][...] = rows
    for step in (opened.executable(0, 4).stage, opened.executable(0, 4).launch, opened.executable(0, 4).finish):
        step(slot)  # type: ignore[operator]
    np.testing.assert_array_equal(slot.outputs[0], opened.run([rows])[0])
    opened.close()
    engine.close()
    return engine.world.builds


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return onnx_models.mlp(tmp_path / "repo" / "net", layers=2, width=32)


def test_second_start_builds_nothing(tmp_path: Path, model: Path) -> None:
    assert builds("11.4", tmp_path / "plans", model) == 1
    assert builds("11.4", tmp_path / "plans", model) == 0


def test_other_weights_need_no_build_if_all_are_outside(tmp_path: Path) -> None:
    """256 columns: biases are of 1 KiB and outside as well."""
    for seed, expected in ((0, 1), (5, 0)):
        engine = FakeTensorRT("11.4", cache=tmp_path / "plans")
        path = onnx_models.mlp(tmp_path / "net", layers=2, width=256, seed=seed)
        model = engine.open(manifest(["INPUT f32 n 256"], ["OUTPUT f32 n 256"], (1, 4)), path)
        assert engine.world.builds == expected
        model.close()
        engine.close()


def test_other_small_weights_are_part_of_the_plan(tmp_path: Path, model: Path) -> None:
    assert builds("11.4", tmp_path / "plans", model) == 1
    onnx_models.mlp(model.parent, layers=2, width=32, seed=5)
    assert builds("11.4", tmp_path / "plans", model) == 1


@pytest.mark.parametrize(
    ("version", "options", "told"),
    [
        ("10.16", {}, "library tensorrt 11.4.0.106 -> tensorrt 10.16.1.11"),
        ("rtx-1.7", {}, "library tensorrt 11.4.0.106 -> tensorrt_rtx 1.7.1.116"),
        ("11.4", {"numerics": "f32"}, "numerics tf32 -> f32"),
    ],
)
def test_ml_14_changed_fact_builds_again_and_names_it(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture, version: str, options: dict[str, str], told: str
) -> None:
    caplog.set_level(logging.INFO, "engines.tensorrt")
    assert builds("11.4", tmp_path / "plans", model) == 1
    assert builds(version, tmp_path / "plans", model, **options) == 1
    assert f"tensorrt.plan_outdated model=net file=net.{_only_digest(caplog.text)}.plan changed={told}" in caplog.text
    assert builds("11.4", tmp_path / "plans", model) == 0


def _only_digest(text: str) -> str:
    return text.split("file=net.")[1].split(".plan")[0]


def test_changed_network_builds_again(tmp_path: Path, model: Path) -> None:
    assert builds("11.4", tmp_path / "plans", model) == 1
    onnx_models.mlp(model.parent, layers=3, width=32)
    assert builds("11.4", tmp_path / "plans", model) == 1


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "no header"])
def test_ml_14_damaged_plan_counts_as_absent(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    assert builds("11.4", tmp_path / "plans", model) == 1
    (path,) = (tmp_path / "plans").glob("*.plan")
    raw = path.read_bytes()
    changed = {
        "cut": raw[:-10], "empty": b"", "flipped": raw[:-1] + bytes([raw[-1] ^ 1]), "no header": b"x" * 100,
    }  # fmt: skip
    path.write_bytes(changed[damage])
    assert builds("11.4", tmp_path / "plans", model) == 1
    assert builds("11.4", tmp_path / "plans", model) == 0


def test_ml_14_plan_that_the_library_refuses_is_built_again(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A driver may change under the same version numbers; then only loading it tells."""
    assert builds("11.4", tmp_path / "plans", model) == 1
    (path,) = (tmp_path / "plans").glob("*.plan")
    line, _, plan = path.read_bytes().partition(b"\n")
    header = json.loads(line)
    cache = PlanCache(tmp_path / "plans")
    other = plan.replace(b'"device": "host"', b'"device": "elsewhere"')
    assert other != plan
    cache.store("net", header["facts"], Cached(other, outside=True, reason=""))
    assert builds("11.4", tmp_path / "plans", model) == 1
    assert "tensorrt.plan_refused model=net reason=the plan was built for another device: it is built again" in (
        caplog.text
    )
    assert builds("11.4", tmp_path / "plans", model) == 0


def test_weights_stay_inside_where_an_operator_wants_constants(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stubborn = {"constant_operands": {"Gemm": (1,), "MatMul": (1,)}}
    assert builds("11.4", tmp_path / "plans", model, **stubborn) == 1
    assert "tensorrt.weights_inside model=net reason=cannot be parsed: Gemm node" in caplog.text
    caplog.clear()
    assert builds("11.4", tmp_path / "plans", model, **stubborn) == 0
    assert "weights_inside" not in caplog.text, "the vain attempt was made again"
    # Inside, the values belong to the plan.
    onnx_models.mlp(model.parent, layers=2, width=32, seed=5)
    assert builds("11.4", tmp_path / "plans", model, **stubborn) == 1


def test_model_that_builds_in_no_way_says_why(tmp_path: Path, model: Path) -> None:
    engine = FakeTensorRT("11.4", unbuildable=frozenset({"Gemm"}))
    with pytest.raises(NotReady) as raised:
        engine.open(WIDE, model)
    assert str(raised.value) == (
        f"net: {model}: TensorRT 11.4.0.106 does not build it: cannot be built: Internal Error (Could not find any "
        "implementation for node Gemm); change the model, or write engine: onnxruntime"
    )
    engine.close()


def test_old_plans_are_removed(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    for number in range(MAX_PLANS_PER_MODEL + 3):
        facts = {"network": str(number)}
        cache.store("net", facts, Cached(b"plan", outside=True, reason=""))
        os.utime(tmp_path / f"net.{digest(facts)}.plan", (number, number))
    cache.store("net.b", {"network": "0"}, Cached(b"plan", outside=True, reason=""))
    kept = [cache.load("net", {"network": str(number)}) is not None for number in range(MAX_PLANS_PER_MODEL + 3)]
    assert kept == [False] * 3 + [True] * MAX_PLANS_PER_MODEL
    assert cache.load("net.b", {"network": "0"}) is not None
    assert not list(tmp_path.glob("*.part"))


def test_directory_that_cannot_be_written_costs_the_cache_only(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    in_the_way = tmp_path / "plans"
    in_the_way.write_text("a file")
    assert builds("11.4", in_the_way, model) == 1
    assert f"tensorrt.not_cached file={in_the_way}" in caplog.text
    assert stat.S_ISREG(in_the_way.stat().st_mode)


def test_measurements_are_kept_for_later_builds_and_refused_ones_replaced(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    builds("11.4", tmp_path / "plans", model)
    onnx_models.mlp(model.parent, layers=3, width=32)
    builds("11.4", tmp_path / "plans", model)
    (path,) = (tmp_path / "plans").glob("*.timing")
    assert path.read_bytes() == b"11.4.0.106 host 2"
    path.write_bytes(b"of another device")
    onnx_models.mlp(model.parent, layers=4, width=32)
    builds("11.4", tmp_path / "plans", model)
    assert "tensorrt.timing_cache_refused" in caplog.text
    assert path.read_bytes() == b"11.4.0.106 host 1"


@pytest.mark.parametrize(("numerics", "tf32"), [("auto", True), ("tf32", True), ("f32", False)])
def test_numerics_setting_reaches_the_builder(model: Path, numerics: str, tf32: bool) -> None:
    engine = FakeTensorRT("11.4", numerics=numerics)
    engine.open(WIDE, model).close()
    (config,) = engine.world.configs
    assert config.get_flag(engine.api.module.BuilderFlag.TF32) is tf32
    assert config.builder_optimization_level == 3
    engine.close()
