"""The MiniLM bundle gives the similarities that its makers published."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from direct_bundle import DirectBundle, as_bytes_tensor

from engines.errors import InvalidInput


@pytest.fixture(scope="session")
def minilm(demo_bundle: Callable[[str], DirectBundle]) -> DirectBundle:
    return demo_bundle("minilm")


def embed(minilm: DirectBundle, *texts: str, pad_to: int = 0) -> np.ndarray:
    return minilm.infer({"TEXT": as_bytes_tensor(*(text.encode() for text in texts))}, pad_to)["EMBEDDING"]


@pytest.mark.parametrize(
    ("one", "other", "published"),
    [
        # Source: the similarity examples in the documentation of sentence-transformers, for all-MiniLM-L6-v2.
        ("A man is eating food.", "A man is eating a piece of bread.", 0.7553),
        ("The weather is lovely today.", "It's so sunny outside!", 0.6660),
        ("The weather is lovely today.", "He drove to the stadium.", 0.1046),
        ("It's so sunny outside!", "He drove to the stadium.", 0.1411),
    ],
)
def test_published_cosine(minilm: DirectBundle, one: str, other: str, published: float) -> None:
    vectors = embed(minilm, one, other)
    assert vectors.dtype == np.float32
    assert float(vectors[0] @ vectors[1]) == pytest.approx(published, abs=5e-5)


def test_vectors_have_length_one(minilm: DirectBundle) -> None:
    vectors = embed(minilm, "", "one", "two words", "long " * 400)
    assert vectors.shape == (4, 384)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)


def test_a_text_has_one_vector_whatever_it_travels_with(minilm: DirectBundle) -> None:
    alone = embed(minilm, "a short text")
    beside_long = embed(minilm, "a short text", "word " * 100)[:1]
    among_padding = embed(minilm, "a short text", pad_to=16)
    np.testing.assert_allclose(beside_long, alone, atol=1e-5)
    np.testing.assert_allclose(among_padding, alone, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "length"), [(1, 16), (14, 16), (15, 32), (30, 32), (31, 64), (62, 64), (126, 128), (254, 256), (900, 256)]
)
def test_smallest_served_length_that_holds_the_text(minilm: DirectBundle, words: int, length: int) -> None:
    assert minilm.hooks is not None
    context = type("Context", (), {"state": minilm.state})
    tensors = minilm.hooks.preprocess({"TEXT": as_bytes_tensor(b"word " * words)}, context)
    assert {name: tensor.shape for name, tensor in tensors.items()} == dict.fromkeys(
        ("ids", "mask", "types"), (1, length)
    )
    assert tensors["mask"].sum() == min(words + 2, 256)


def test_text_that_is_not_utf8_is_refused_with_its_row(minilm: DirectBundle) -> None:
    with pytest.raises(InvalidInput, match="row 1 is not UTF-8: byte 3"):
        minilm.infer({"TEXT": as_bytes_tensor(b"fine", b"bad\xff")})


def test_rows_of_padding_stay_finite(minilm: DirectBundle) -> None:
    zeros = np.zeros((2, 16), np.int64)
    (vectors,) = minilm.session.run(None, {"ids": zeros, "mask": zeros, "types": zeros})
    assert np.isfinite(vectors).all()
