"""Loading model.py: what counts as hooks, how mistakes are told, and that nothing is left behind."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.bundle.signature import Signature, Variant
from engines.errors import HookFailed
from engines.tensor import TensorSpec
from frontend.hooks.context import Context
from frontend.hooks.load import MAX_SOURCE_BYTES, Hooks, load_hooks, require_hooks

Load = Callable[[str], Hooks]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Return a function that writes a ``model.py`` and loads it."""

    def load(source: str) -> Hooks:
        (tmp_path / "model.py").write_text(source)
        hooks = load_hooks(tmp_path, tmp_path / "model.py", model="m", version="3")
        assert hooks is not None
        return hooks

    return load


def private_modules() -> set[str]:
    return {name for name in sys.modules if name.startswith("_bundle_hooks_")}


def test_without_a_file_there_are_no_hooks(tmp_path: Path) -> None:
    assert load_hooks(tmp_path, None, model="m", version="1") is None


def test_load_runs_once_with_the_bundle_path(load: Load, tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("cat dog")
    hooks = load(
        "calls = []\n"
        "def load(path):\n    calls.append(path)\n    return (path / 'labels.txt').read_text().split(), calls\n"
        "def postprocess(outputs, ctx):\n    return outputs\n"
    )
    assert hooks.state == (["cat", "dog"], [tmp_path])
    assert hooks.preprocess is None
    assert hooks.postprocess is not None


def test_state_is_not_part_of_what_logs_show(load: Load) -> None:
    hooks = load("def load(path):\n    return 'a very long vocabulary'\n")
    assert "vocabulary" not in repr(hooks)
    assert "vocabulary" not in repr(Context("m", "3", state=hooks.state))


def test_definitions_that_look_up_their_own_module_work(load: Load) -> None:
    hooks = load(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass State:\n    labels: list[str]\n"
        "def load(path):\n    return State(['a'])\n"
    )
    assert hooks.state.labels == ["a"]


def test_two_bundles_do_not_see_each_other_nor_the_path(load: Load, tmp_path: Path) -> None:
    path, modules = list(sys.path), private_modules()
    first = load("name = 1\ndef load(path):\n    return name\n")
    second = load("def load(path):\n    return 'name' in globals()\n")
    assert (first.state, second.state) == (1, False)
    assert sys.path == path
    assert "model" not in sys.modules
    assert private_modules() - modules == {first.module_name, second.module_name}
    first.close()
    second.close()
    second.close()
    assert private_modules() == modules


def test_changed_file_is_loaded_anew_and_nothing_is_written_beside_it(load: Load, tmp_path: Path) -> None:
    for expected in range(3):
        assert load(f"def load(path):\n    return {expected}\n").state == expected
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.py"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def preprocess(inputs:\n", r"is not valid Python: line 1"),
        ("x = '\0'\n", r"is not valid Python"),
        ("preprocess = 3\n", r"preprocess must be a function preprocess\(inputs, ctx\), found int"),
        (
            "def preprocess(inputs):\n    pass\n",
            r"preprocess must be callable as preprocess\(inputs, ctx\), found p",
        ),
        ("def load():\n    pass\n", r"load must be callable as load\(path\), found load\(\)"),
        ("async def load(path):\n    pass\n", r"load must be a plain def, found async def"),
        (
            "def pre_process(inputs, ctx):\n    pass\n",
            r"defines none of .*; found pre_process \(write preprocess\)",
        ),
        ("", r"defines none of load, preprocess, postprocess$"),
        ("1 / 0\n", r"raised ZeroDivisionError when it was imported; the traceback is in the log"),
        ("import sys\nsys.exit(3)\n", r"raised SystemExit when it was imported"),
        ("raise KeyboardInterrupt\n", r"raised KeyboardInterrupt when it was imported"),
        ("def load(path):\n    raise KeyboardInterrupt\n", r"load raised KeyboardInterrupt"),
        ("import no_such_package.part\n", r"imports 'no_such_package', which is not installed"),
        ("def load(path):\n    raise OSError('secret')\n", r"load raised OSError; the traceback is in the log"),
        ("from json import load\n", r"load \(imported from json; if it is not meant as the hook, import it under"),
    ],
)
def test_mistakes_name_model_version_and_file(load: Load, source: str, message: str) -> None:
    modules = private_modules()
    with pytest.raises(HookFailed, match=message) as caught:
        load(source)
    assert str(caught.value).startswith("model 'm' version '3': model.py")
    assert "secret" not in str(caught.value)
    assert private_modules() == modules


def test_neighbouring_file_cannot_be_imported_and_that_is_told(load: Load, tmp_path: Path) -> None:
    (tmp_path / "tokens_nearby.py").touch()
    with pytest.raises(HookFailed, match=r"files beside model\.py cannot be imported, move the code into it"):
        load("import tokens_nearby\n")


def test_traceback_of_a_failed_load_is_in_the_log(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(HookFailed):
        load("def load(path):\n    raise KeyError('detail')\n")
    assert "KeyError: 'detail'" in caplog.text
    assert "model.py" in caplog.text


def test_missing_and_too_large_files(tmp_path: Path) -> None:
    with pytest.raises(HookFailed, match=r"model\.py cannot be read: No such file"):
        load_hooks(tmp_path, tmp_path / "model.py", model="m", version="1")
    (tmp_path / "model.py").write_bytes(b"#" * (MAX_SOURCE_BYTES + 1))
    with pytest.raises(HookFailed, match=f"the limit is {MAX_SOURCE_BYTES}"):
        load_hooks(tmp_path, tmp_path / "model.py", model="m", version="1")


def test_client_tensors_that_differ_need_their_hook(load: Load) -> None:
    number, text = (TensorSpec("x", "f32", (-1,), 0),), (TensorSpec("T", "bytes", (-1,), 0),)
    variants = (Variant((), ((-1,),), ((-1,),), (False,)),)
    same = Signature(number, number, number, number, (1,), variants)
    other_in = Signature(number, number, text, number, (1,), variants)
    other_out = Signature(number, number, number, text, (1,), variants)
    pre = load("def preprocess(inputs, ctx):\n    return inputs\n")
    require_hooks(None, same, model="m", version="1")
    require_hooks(pre, other_in, model="m", version="1")
    with pytest.raises(HookFailed, match=r"client_inputs differ from the executable tensors, .* no preprocess"):
        require_hooks(None, other_in, model="m", version="1")
    with pytest.raises(HookFailed, match=r"client_outputs differ from the executable tensors, .* no postprocess"):
        require_hooks(pre, other_out, model="m", version="1")
