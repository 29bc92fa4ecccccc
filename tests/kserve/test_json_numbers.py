"""Reading JSON numbers quickly changes nothing: same bits, same errors, as the exact way that it goes round."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Raw

from engines.errors import InvalidInput, ServingError
from engines.tensor import BY_WIRE
from frontend.inference import OutputTensor
from frontend.kserve import json_data
from frontend.kserve.json_data import decode_data, encode_data

NUMBERS = [name for name, dtype in BY_WIRE.items() if dtype.numpy.kind in "fiu" and name not in json_data.HALF_TYPES]
ODD = [
    "-0", "-0.0", "0", "1e5", "1E+5", "1e-400", "1e400", "-1e39", "3.4028235e38", "3.4028235677973366e38", "16777217",
    "9007199254740993", "18446744073709551615", "18446744073709551616", "-9223372036854775808", "-9223372036854775809",
    "1.0", "01", "1.", ".5", "+1", "-", "NaN", "Infinity", "null", "true", "false", '"a"', '"tf"', "{}", '{"a":1}',
    "4.9e-324", "2.4703282292062328e-324", "0.1", "1" * 400, "0." + "1" * 900, "255", "256", "-1", "",
]  # fmt: skip


def spaced(parts: list[str]) -> st.SearchStrategy[str]:
    return st.sampled_from(["[{}]", "[ {} ]", "\n[\t{}]"]).map(lambda form: form.format(",".join(parts)))


LEAVES = st.one_of(
    st.integers(-300, 300).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.floats(width=32, allow_nan=False, allow_infinity=False).map(repr),
    st.integers(-(2**64), 2**65).map(str),
    st.sampled_from(ODD),
)
TREES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4).flatmap(spaced), max_leaves=12)
RECTANGLES = st.tuples(st.integers(1, 3), st.integers(1, 3)).flatmap(
    lambda size: st.lists(
        st.lists(LEAVES, min_size=size[1], max_size=size[1]).flatmap(spaced), min_size=size[0], max_size=size[0]
    ).flatmap(spaced)
)


@pytest.fixture(params=["struct", "simdjson"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read all numbers one of the quick ways, however few they are."""
    if request.param == "struct":
        monkeypatch.setattr(json_data, "_simd", None)
    elif json_data._simd is None:
        pytest.skip("simdjson is not installed; it has no wheels for this Python")
    monkeypatch.setattr(json_data, "SIMD_BYTES", 0)


def outcome(wire: str, shape: tuple[int, ...], text: str) -> Any:
    try:
        array = decode_data("x", BY_WIRE[wire], shape, Raw(text.encode()), 100)
    except ServingError as error:
        return type(error), str(error)
    return array.dtype, array.shape, array.tobytes(), array.flags.writeable


def exact(wire: str, shape: tuple[int, ...], text: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_data, "_quickly", lambda *given: None)
        return outcome(wire, shape, text)


@pytest.mark.usefixtures("way")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(NUMBERS), st.one_of(TREES, RECTANGLES), st.lists(st.integers(0, 5), max_size=2))
def test_any_text_gives_what_the_exact_way_gives(wire: str, text: str, shape: list[int]) -> None:
    assert outcome(wire, tuple(shape), text) == exact(wire, tuple(shape), text)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("wire", NUMBERS)
@pytest.mark.parametrize("odd", ODD)
def test_odd_elements_give_what_the_exact_way_gives(wire: str, odd: str) -> None:
    for text in (odd, f"[{odd}]", f" [{odd}]", f"[1,{odd}]", f"[[1],[{odd}]]", f"[[{odd},2]]", f"[1,[{odd}]]"):
        count = text.count(",") + 1
        assert outcome(wire, (count,), text) == exact(wire, (count,), text)


@pytest.mark.usefixtures("way")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["FP32", "FP64"]), st.data())
def test_plain_floats_are_read_quickly_and_exactly(wire: str, data: st.DataObject) -> None:
    dtype = BY_WIRE[wire]
    values = data.draw(
        st.lists(st.floats(width=8 * dtype.itemsize, allow_nan=False, allow_infinity=False), min_size=1, max_size=20)
    )
    array = json_data._quickly(dtype, len(values), Raw(repr(values).encode()))
    assert array is not None, "this is what clients send, and it must not take the slow way"
    assert array.tobytes() == np.array(values, dtype.numpy).tobytes()


@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_nd_01_only_finite_floats_are_written(values: list[float]) -> None:
    output = OutputTensor("y", "FP32", np.array(values, np.float32))
    if np.isfinite(values).all():
        text = encode_data(output)
        assert isinstance(text, Raw)
        assert outcome("FP32", (len(values),), bytes(memoryview(text)).decode())[2] == output.array.tobytes()
    else:
        first = int(np.flatnonzero(~np.isfinite(values))[0])
        with pytest.raises(InvalidInput, match=f"output 'y': element {first} is "):
            encode_data(output)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("count", [100, 1000, 40_000])
def test_texts_of_all_lengths_are_read(count: int) -> None:
    values = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    text = repr(values.tolist())
    assert outcome("FP32", (count,), text)[2] == values.tobytes()
    wrong = text.replace("]", ",true]")
    assert outcome("FP32", (count,), wrong) == exact("FP32", (count,), wrong)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "text",
    [
        b"", b"1", b'"[1]"', b"[", b"[1", b"[1,", b"[1]]", b"[1]}", b"[1],1", b'[1],"name":"y"', b"[1]1", b"{}",
        b"[1]\0", b"[1]\x0c", b"[1]\xff", b"[1\0]", b"[1\xc2\xa0]", b"\xef\xbb\xbf[1]", b"[1]//", b"[1d]", b"[1f]",
        b"[1_0]", b"[0x1]", b"[--1]", b"[1e]", b"[1e+]", b"[00]", b"[-01]", b"[1.e5]", b"[,1]", b"[1,]", b"['1']",
    ],
)  # fmt: skip
def test_only_a_list_is_taken(text: bytes) -> None:
    room = bytearray(4)
    assert not json_data.pack_quickly(BY_WIRE["FP32"], 1, text, room)
    assert json_data.pack_quickly(BY_WIRE["FP32"], 1, b" [ 1e0 ]\n", room)
    assert np.frombuffer(room, np.float32).tolist() == [1.0]
