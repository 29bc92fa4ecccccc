"""Mistakes planted into the engine itself: each must be found by the strict fake, the host device, or a wrong answer.

What this proves is the net, not the engine: a rule that could be broken without anything failing here would be tested
nowhere, since there is no GPU.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnx_models
from engines.base import Executable, Rows
from engines.device.transfer import Transfer
from engines.errors import ServingError
from engines.probe import resolve
from engines.tensor import NDArray
from engines.tensorrt.builder import build
from engines.tensorrt.context import ProfileContext
from engines.tensorrt.rooms import Rooms
from engines.tensorrt.slot import DeviceSlot
from engines.tensorrt.weights import OutsideWeights
from manifests import manifest
from tensorrt_fake.engines import FakeTensorRT

WIDTH = 32
WIDE = manifest([f"INPUT f32 n {WIDTH}"], [f"OUTPUT f32 n {WIDTH}"], (1, 4))


def scenario(directory: Path) -> None:
    """Everything an engine goes through: overlap, eviction, compaction, growth, graphs; answers are compared."""
    engine = FakeTensorRT("11.4", arena_bytes=1 << 20)
    models = []
    for seed in range(3):
        path = onnx_models.mlp(directory / str(seed), layers=2, width=WIDTH, seed=seed)
        model = engine.open(WIDE, path)
        model.prepare(resolve(model, WIDE))
        models.append(model)
    rows = [np.random.default_rng(seed).random((4, WIDTH), dtype=np.float32) for seed in range(3)]
    expected = [model.run([given])[0] for model, given in zip(models, rows, strict=True)]
    assert len({answer.tobytes() for answer in expected}) == 3

    def overlapped(early: bool) -> None:
        slots = []
        for model, given in zip(models, rows, strict=True):
            slot = model.executable(0, 4).slot()
            slot.inputs[0][...] = given
            model.executable(0, 4).stage(slot)
            slots.append(slot)
        # More than there are regions.
        extra = models[0].executable(0, 4).slot()
        extra.inputs[0][...] = rows[0]
        if early:
            models[0].executable(0, 4).stage(extra)
        for model, slot in zip(models, slots, strict=True):
            model.executable(0, 4).launch(slot)
        if not early:
            models[0].executable(0, 4).stage(extra)
        models[0].executable(0, 4).launch(extra)
        for model, slot, answer in zip(models, slots, expected, strict=True):
            model.executable(0, 4).finish(slot)
            np.testing.assert_array_equal(slot.outputs[0], answer)
        models[0].executable(0, 4).finish(extra)
        np.testing.assert_array_equal(extra.outputs[0], expected[0])

    for turn in range(4):
        overlapped(turn % 2 == 1)
    slot = models[0].executable(0, 4).slot()
    models[0].executable(0, 4).launch(slot)
    models[0].unload()
    engine.engine.compact()
    models[0].load()
    for turn in range(4):
        overlapped(turn % 2 == 1)
    wanted = manifest(["INPUT f32 n 128"], ["OUTPUT f32 n 128"], (64,))
    slot = models[1].executable(0, 4).slot()
    slot.inputs[0][...] = rows[1]
    models[1].executable(0, 4).launch(slot)
    large = engine.open(wanted, onnx_models.mlp(directory / "large", layers=2, width=128))
    models[1].executable(0, 4).finish(slot)
    np.testing.assert_array_equal(slot.outputs[0], expected[1])
    for turn in range(4):
        overlapped(turn % 2 == 1)
    scattered(engine, models[1].executable(0, 4), rows[1], expected[1])
    for model in (large, *models):
        model.close()
    engine.close()


def scattered(engine: FakeTensorRT, executable: Executable, rows: NDArray, expected: NDArray) -> None:
    """A batch of one row in an arena, two in the slot, and one in memory that the device does not reach."""
    arena, far = np.zeros((2, WIDTH), np.float32), (rows[3:].copy(), np.zeros((1, WIDTH), np.float32))
    engine.shared.register(arena, "arena")
    arena[0] = rows[0]
    slot = executable.slot()
    slot.inputs[0][...] = 0
    slot.inputs[0][1:3] = rows[1:3]
    executable.rows(slot, [Rows(0, 0, arena[:1]), Rows(0, 3, far[0])], [Rows(0, 0, arena[1:]), Rows(0, 3, far[1])])
    executable.stage(slot)
    executable.launch(slot)
    executable.finish(slot)
    np.testing.assert_array_equal(np.concatenate([arena[1:], slot.outputs[0][1:3], far[1]]), expected)
    engine.shared.unregister(arena)


def plant(monkeypatch: pytest.MonkeyPatch, target: Any, changes: dict[str, str]) -> None:
    """Replace pieces of a function's text; each must be there."""
    source = textwrap.dedent(inspect.getsource(target))
    for old, new in changes.items():
        assert old in source, f"{target.__qualname__} has no {old!r} any more: plant the mistake anew"
        source = source.replace(old, new)
    module = sys.modules[target.__module__]
    space = dict(vars(module))
    exec(compile(source, f"<mistake in {target.__qualname__}>", "exec", 1 << 24), space)
    changed = space[target.__name__]
    owner, _, name = target.__qualname__.rpartition(".")
    if owner:
        monkeypatch.setattr(getattr(module, owner), name, changed)
    else:
        for user in list(sys.modules.values()):
            if getattr(user, name, None) is target:
                monkeypatch.setattr(user, name, changed)


MISTAKES: dict[str, tuple[Any, dict[str, str]]] = {
    "execution does not wait for its inputs": (DeviceSlot.launch, {"compute.wait(region.inputs_ready)": "pass"}),
    "results are copied before they are there": (DeviceSlot.launch, {"copy_out.wait(region.ended)": "pass"}),
    "results are read before they are copied": (
        DeviceSlot.settle,
        {"region.outputs_ready.synchronize()": "pass", "region.ended.synchronize()": "pass"},
    ),
    "a region is taken while it runs": (Rooms.acquire, {"region.lodger.settle()": "pass"}),
    "a staged region is taken and its owner not told": (Rooms.acquire, {"region.lodger.unstage()": "pass"}),
    "old addresses after weights moved": (OutsideWeights._moved, {"self.generation += 1": "pass"}),
    "weights go while something runs": (OutsideWeights.unload, {"self._rooms.settle()": "pass"}),
    "old addresses after regions grew": (Rooms.require, {"self.generation += 1": "pass"}),
    "scratch is freed while something runs": (Rooms.require, {"self.settle()": "pass"}),
    "scratch is used and not declared": (ProfileContext._prepare, {"writes.append(scratch)": "pass"}),
    "weights are read and not declared": (ProfileContext._prepare, {"reads.append(weights)": "pass"}),
    "weights have no addresses": (ProfileContext._bind, {"weights.items()": "()"}),
    "scratch is never given": (ProfileContext._bind, {"if scratch is not None:": "if False:"}),
    "an output's address is another's": (ProfileContext._bind, {"+ tensor.offset_bytes": ""}),
    "contexts allocate for themselves": (ProfileContext.start, {"USER_MANAGED": "STATIC"}),
    "a name that 11 removed": (ProfileContext.start, {"device_memory_size_v2": "device_memory_size"}),
    "scratch of too few bytes": (ProfileContext.start, {"int(self._engine.device_memory_size_v2)": "256"}),
    "captured before it ran": (ProfileContext.launch, {"prepared.runs == 1": "prepared.runs == 0"}),
    "the default stream": (ProfileContext._prepare, {"self._rooms.shared.compute.handle": "0"}),
    "no profile is chosen": (
        ProfileContext._set_shapes,
        {"context.set_optimization_profile_async(self.profile.index, self._rooms.shared.compute.handle)": "True"},
    ),
    "every context has the first profile": (
        ProfileContext._set_shapes, {"async(self.profile.index,": "async(0,"},
    ),
    "a profile is missing": (build, {"_add_profiles(builder, config, definition, profiles, messages)": "pass"}),
    "numerics by a flag of old": (
        build,
        {"_configure(api, config, options)": "config.set_flag(api.module.BuilderFlag.FP16)"},
    ),
    "rows that the device does not reach are copied all the same": (
        Transfer._sort_out, {"if not reaches(entry[1])": "if False"},
    ),
    "rows between those of the caller are forgotten": (
        Transfer.copy_in, {"self._own_ranges(straight) if straight": "() if straight"},
    ),
    "rows are not collected": (DeviceSlot.stage, {"self._in_transfer.collect()": "self._in_transfer._sort_out()"}),
    "rows are not delivered": (DeviceSlot._collect, {"self._out_transfer.deliver()": "pass"}),
    "a plan that is none is kept": (build, {"if plan is None:": "if False:"}),
}  # fmt: skip


def test_without_a_mistake_it_passes(tmp_path: Path) -> None:
    scenario(tmp_path)


@pytest.mark.parametrize("title", sorted(MISTAKES))
def test_planted_mistake_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, title: str) -> None:
    target, changes = MISTAKES[title]
    plant(monkeypatch, target, changes)
    if title == "a plan that is none is kept":
        # It shows only where a build fails.
        engine = FakeTensorRT("11.4", unbuildable=frozenset({"Gemm"}))
        with pytest.raises(TypeError):
            engine.open(WIDE, onnx_models.mlp(tmp_path / "m", layers=2, width=WIDTH))
        return
    with pytest.raises((AssertionError, AttributeError, TypeError, ServingError, KeyError)):
        scenario(tmp_path)
