"""What a hook returned against what the manifest declares."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.errors import HookFailed
from engines.tensor import DTYPES, TensorSpec
from frontend.hooks.check import check_tensors

X = TensorSpec("x", "f32", (-1, 3), 0)
M = TensorSpec("mask", "i64", (3, -1), 1)
T = TensorSpec("t", "bytes", (-1,), 0)


def check(declared: tuple[TensorSpec, ...], arrays: dict[Any, Any], **options: Any) -> Any:
    return check_tensors(declared, arrays, "model 'm' version '1': preprocess", **options)


def floats(*shape: int) -> np.ndarray[Any, Any]:
    return np.zeros(shape, np.float32)


def objects(*elements: Any) -> np.ndarray[Any, Any]:
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    return array


def test_right_arrays_come_back_in_declared_order_without_a_copy() -> None:
    arrays = {"mask": np.zeros((3, 2), np.int64), "x": floats(2, 3)}
    checked, rows = check((X, M), arrays)
    assert list(checked) == ["x", "mask"]
    assert rows == 2
    assert all(checked[name] is arrays[name] or np.shares_memory(checked[name], arrays[name]) for name in arrays)


def test_rows_are_none_without_a_batch_axis() -> None:
    assert check((TensorSpec("x", "f32", (3,), None),), {"x": floats(3)})[1] is None


def test_views_become_contiguous() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    checked, _ = check((TensorSpec("x", "f32", (-1, 3), 0),), {"x": array.T})
    assert checked["x"].flags.c_contiguous
    assert np.array_equal(checked["x"], array.T)


def test_scalars_and_every_dtype() -> None:
    for dtype in DTYPES:
        if dtype.name != "bytes":
            spec = TensorSpec("x", dtype.name, (), None)
            assert check((spec,), {"x": dtype.numpy.type(1)})[0]["x"].dtype == dtype.numpy


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "expected tensors x; missing x"),
        ({"x": floats(2, 3), "y": floats(1)}, "expected tensors x; unexpected y"),
        ({"xs": floats(2, 3)}, "missing x; unexpected xs"),
        ({7: floats(2, 3)}, "missing x; unexpected 7"),
        ({"x": None}, "tensor 'x': expected a numpy array of float32, got None"),
        ({"x": [[1.0, 2.0, 3.0]]}, "expected a numpy array of float32, got a list"),
        ({"x": np.zeros((2, 3))}, r"expected dtype float32, got float64; convert it with .astype\(numpy.float32\)"),
        ({"x": np.zeros((2, 3), ">f4")}, "expected dtype float32, got >f4"),
        ({"x": np.zeros((2, 3), np.object_)}, "expected dtype float32, got object$"),
        ({"x": floats(3)}, r"expected shape \[n, 3\], got \[3\]"),
        ({"x": floats(2, 4)}, r"expected shape \[n, 3\], got \[2, 4\]"),
        ({"x": floats(2, 3, 1)}, r"expected shape \[n, 3\], got \[2, 3, 1\]"),
    ],
)
def test_what_is_wrong_is_named(arrays: dict[Any, Any], message: str) -> None:
    with pytest.raises(HookFailed, match=message) as caught:
        check((X,), arrays)
    assert str(caught.value).startswith("model 'm' version '1': preprocess")


def test_misspelt_tensor_is_recognised() -> None:
    with pytest.raises(HookFailed, match="rename masks to mask"):
        check((M,), {"masks": np.zeros((3, 2), np.int64)})


def test_bfloat16_is_not_float16() -> None:
    spec = TensorSpec("x", "bf16", (-1,), 0)
    assert check((spec,), {"x": np.zeros(2, ml_dtypes.bfloat16)})[1] == 2
    with pytest.raises(HookFailed, match=r"expected dtype bfloat16, got float16$"):
        check((spec,), {"x": np.zeros(2, np.float16)})


def test_variable_axes_take_any_size() -> None:
    spec = TensorSpec("x", "f32", (-1, -1, 2), 0)
    assert check((spec,), {"x": floats(4, 9, 2)})[1] == 4
    with pytest.raises(HookFailed, match=r"expected shape \[n, any, 2\], got \[4, 9, 3\]"):
        check((spec,), {"x": floats(4, 9, 3)})


def test_batch_axes_must_agree() -> None:
    with pytest.raises(HookFailed, match="tensor 'mask': expected 2 rows as tensor 'x' has, got 4"):
        check((X, M), {"x": floats(2, 3), "mask": np.zeros((3, 4), np.int64)})


def test_changed_number_of_rows_is_reported_and_refused_only_where_it_must_match() -> None:
    assert check((X,), {"x": floats(5, 3)})[1] == 5
    assert check((X,), {"x": floats(5, 3)}, rows=5)[1] == 5
    with pytest.raises(HookFailed, match="preprocess returned 5 rows, expected 2: rows must stay one to one"):
        check((X,), {"x": floats(5, 3)}, rows=2)


@pytest.mark.parametrize(
    "array", [objects(b"a", "ä", b""), np.array(["a", "ä", ""]), np.array(["a", "ä", ""], dtype=np.object_)]
)
def test_bytes_come_back_as_bytes(array: np.ndarray[Any, Any]) -> None:
    checked, rows = check((T,), {"t": array})
    assert checked["t"].tolist() == [b"a", "ä".encode(), b""]
    assert rows == 3


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (objects(b"a", None), "expected bytes or str in element 1, got None"),
        (objects(b"a", 3), "expected bytes or str in element 1, got a int"),
        (objects(b"a", [b"b"]), "in element 1, got a list"),
        (objects("\ud800"), "element 0 is text that cannot be written as UTF-8"),
        (np.zeros(2), "expected a numpy array of dtype object holding bytes or str, got an array of float64"),
        ([b"a"], "holding bytes or str, got a list"),
        (None, "holding bytes or str, got None"),
    ],
)
def test_bytes_that_are_none(array: Any, message: str) -> None:
    with pytest.raises(HookFailed, match=f"tensor 't'.*{message}"):
        check((T,), {"t": array})


@given(st.lists(st.binary(max_size=4) | st.text(st.characters(exclude_categories=["Cs"]), max_size=4)))
def test_any_bytes_and_text_survive(elements: list[bytes | str]) -> None:
    checked, rows = check((T,), {"t": objects(*elements)})
    assert checked["t"].tolist() == [each.encode() if isinstance(each, str) else each for each in elements]
    assert rows == len(elements)
