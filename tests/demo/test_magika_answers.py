"""The Magika bundle answers as the library itself does.

The hooks are compared with the library around its own model, where answers are equal. The bundle's model, which
normalises more exactly, is compared with that one on files where the difference is rounding.
"""

from __future__ import annotations

import importlib.metadata
import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from direct_bundle import DirectBundle, as_bytes_tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from magika import Magika

PYTHON_FILE = Path(__file__).resolve().parents[2] / "engines" / "errors.py"


def png() -> bytes:
    """Return a real PNG file, 64 x 64 RGB."""
    pixels = b"".join(
        b"\0" + bytes(value % 256 for x in range(64) for value in (x * 5 + y * 3, x * x + y, x ^ y)) for y in range(64)
    )

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 64, 64, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


JSON_FILE = json.dumps({"name": "ringserve", "sizes": [1, 8, 32], "nested": {"a": None, "b": True}}, indent=2).encode()


@pytest.fixture(scope="session")
def magika(demo_bundle: Callable[[str], DirectBundle]) -> DirectBundle:
    return demo_bundle("magika")


class LibraryModel:
    """The wheel's model, one row at a time as the library runs it, with the bundle's verdict passed by."""

    def __init__(self, bundle: DirectBundle) -> None:
        file = importlib.metadata.distribution("magika").locate_file("magika/models/standard_v3_3/model.onnx")
        self._session = onnxruntime.InferenceSession(str(file))
        self._bundle = bundle

    def get_outputs(self) -> list[Any]:
        return self._bundle.session.get_outputs()

    def run(self, names: list[str] | None, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        rows = [self._session.run(["target_label"], {"bytes": row[None, :]})[0] for row in inputs["bytes"]]
        return [np.concatenate(rows), inputs["verdict"]]


@pytest.fixture(scope="session")
def hooks(magika: DirectBundle) -> DirectBundle:
    """Return the bundle's hooks around the library's own model."""
    return replace(magika, session=LibraryModel(magika))


@pytest.fixture(scope="session")
def library() -> Magika:
    return Magika()


def assert_same_as_library(
    bundle: DirectBundle, library: Magika, contents: list[bytes], largest: float, pad_to: int = 0
) -> None:
    answer = bundle.infer({"CONTENT": as_bytes_tensor(*contents)}, pad_to)
    assert answer["SCORE"].dtype == np.float32
    for content, label, score in zip(contents, answer["LABEL"], answer["SCORE"], strict=True):
        expected = library.identify_bytes(content).prediction
        assert label.decode() == str(expected.output.label)
        assert score == pytest.approx(expected.score, abs=largest)


@pytest.mark.parametrize(
    ("label", "content"),
    [(b"python", PYTHON_FILE.read_bytes()), (b"json", JSON_FILE), (b"png", png())],
    ids=["py", "json", "png"],
)
def test_known_files_get_their_label(magika: DirectBundle, label: bytes, content: bytes) -> None:
    answer = magika.infer({"CONTENT": as_bytes_tensor(content)})
    assert answer["LABEL"].tolist() == [label]
    assert answer["SCORE"][0] > 0.5


def test_several_files_in_one_request_get_their_own_answers(magika: DirectBundle, library: Magika) -> None:
    contents = [png(), b"", PYTHON_FILE.read_bytes(), b"abc", JSON_FILE, b"\xff\xfe", b"    \n" * 900 + b"x"]
    assert_same_as_library(magika, library, contents, largest=1e-4, pad_to=16)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",  # one byte short of what the model is shown
        b"12345678",
        b" " * 100,
        b"\x00" * 7 + b"\xff",
        b"\x80abc",
        b" " * 5000 + b"import os\nprint(os.getcwd())\n",  # nothing but space in the first block
        b"<html><body>" + b"a" * 9000 + b"</body></html>\n\n",
        bytes(range(256)) * 40,
    ],
    ids=["empty", "seven", "eight", "spaces", "binary", "not-utf8", "late-start", "long", "all-bytes"],
)
def test_borderline_content_as_the_library(hooks: DirectBundle, library: Magika, content: bytes) -> None:
    assert_same_as_library(hooks, library, [content], largest=1e-6)


@given(st.binary(max_size=40) | st.text(max_size=40).map(str.encode), st.integers(0, 5000), st.integers(0, 5000))
@settings(max_examples=30, deadline=None)
def test_any_content_as_the_library(
    hooks: DirectBundle, library: Magika, middle: bytes, before: int, after: int
) -> None:
    assert_same_as_library(hooks, library, [b"\n" * before + middle + b" " * after], largest=1e-6)


@pytest.mark.parametrize("rows", [2, 3, 4, 16])
def test_a_file_scores_the_same_in_any_batch(magika: DirectBundle, rows: int) -> None:
    # Short files: where the wheel's own model moves by up to 0.005 with the number of rows.
    shorts = [f"value_{number} = {number * 7919}\n".encode() for number in range(rows)]
    together = magika.infer({"CONTENT": as_bytes_tensor(*shorts)})
    for row, content in enumerate(shorts):
        alone = magika.infer({"CONTENT": as_bytes_tensor(content)})
        assert together["LABEL"][row] == alone["LABEL"][0]
        assert together["SCORE"][row] == pytest.approx(alone["SCORE"][0], abs=1e-5)
