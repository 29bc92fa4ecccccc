"""The right engine, or a sentence that says what to write or install."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engines.errors import NotReady
from engines.select import EngineSet
from worker.config import RuntimeSettings


def test_auto_takes_onnxruntime_and_each_engine_is_made_once() -> None:
    engines = EngineSet(RuntimeSettings(threads=1))
    assert engines.choose("auto").name == "onnxruntime"
    assert engines.choose("onnxruntime") is engines.choose("auto")
    assert engines.choose("array").name == "array"
    engines.close()


def test_threads_setting_reaches_the_engine() -> None:
    engine = EngineSet(RuntimeSettings(threads=3)).choose("onnxruntime")
    assert vars(engine)["threads"] == 3


def test_the_nodes_backend_decides_for_auto_and_the_bundle_decides_for_itself() -> None:
    engines = EngineSet(RuntimeSettings(backend="array"))
    assert engines.choose("auto").name == "array"
    assert engines.choose("onnxruntime").name == "onnxruntime"


@pytest.mark.parametrize(
    ("backend", "wanted", "message"),
    [
        ("auto", "tensorrt", "engine: tensorrt is not in this version; choose one of auto, onnxruntime, array"),
        ("tensorrt", "auto", "runtime.backend: tensorrt is not in this version"),
        ("fast", "auto", "runtime.backend: unknown engine 'fast'; choose one of auto, onnxruntime, array"),
    ],
)
def test_names_that_cannot_be_served(backend: str, wanted: str, message: str) -> None:
    with pytest.raises(NotReady) as raised:
        EngineSet(RuntimeSettings(backend=backend)).choose(wanted)
    assert message in str(raised.value)


_WITHOUT_RUNTIME = """
import sys
sys.modules["onnxruntime"] = None
from engines.errors import NotReady
from engines.select import EngineSet
from worker.config import RuntimeSettings
engines = EngineSet(RuntimeSettings())
print(engines.choose("auto").name)
try:
    engines.choose("onnxruntime")
except NotReady as error:
    print(error)
"""


@pytest.mark.process
def test_missing_library_is_named_and_auto_does_without() -> None:
    run = subprocess.run([sys.executable, "-c", _WITHOUT_RUNTIME], capture_output=True, text=True, check=True)
    chosen, message = run.stdout.splitlines()
    assert chosen == "array"
    assert message.startswith("engine: onnxruntime cannot be used: ")
    assert "pip install onnxruntime" in message


@pytest.mark.process
def test_choosing_loads_no_library_before_it_is_asked_for() -> None:
    code = "import sys, engines.select, engines.probe; print('onnxruntime' in sys.modules, 'onnx' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False"]
