"""Which variant a request's shapes select, and what rule 11 says if none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engines.bundle.signature import Signature, Variant
from engines.bundle.variants import MAX_TOLD_VARIANTS, NO_VARIANT, compiled_text, match_variant
from engines.tensor import TensorSpec


def signature(sizes: list[int], *, tensors: int = 1, batch_sizes: tuple[int, ...] = (1, 8)) -> Signature:
    """``tensors`` inputs [n, s] and one output [n, 4]; one variant per size."""
    inputs = tuple(TensorSpec(f"x{index}", "f32", (-1, -1), 0) for index in range(tensors))
    outputs = (TensorSpec("y", "f32", (-1, 4), 0),)
    variants = tuple(Variant((size,) * tensors, ((-1, size),) * tensors, ((-1, 4),), (False,)) for size in sizes)
    return Signature(inputs, outputs, inputs, outputs, batch_sizes, variants)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8, unique=True), st.integers(1, 50), st.integers(0, 9))
def test_variant_is_the_one_with_these_sizes_whatever_the_rows(sizes: list[int], wanted: int, rows: int) -> None:
    expected = sizes.index(wanted) if wanted in sizes else NO_VARIANT
    assert match_variant(signature(sizes), [(rows, wanted)]) == expected


def test_every_input_must_fit() -> None:
    two = signature([16, 32], tensors=2)
    assert match_variant(two, [(3, 32), (3, 32)]) == 1
    assert match_variant(two, [(3, 32), (3, 16)]) == NO_VARIANT
    assert match_variant(two, [(3, 32)]) == NO_VARIANT


def test_other_ranks_match_nothing() -> None:
    assert match_variant(signature([16]), [(1, 16, 1)]) == NO_VARIANT
    assert match_variant(signature([16]), [()]) == NO_VARIANT


def test_rule_11_message_names_the_shape_and_the_compiled_ones() -> None:
    text = compiled_text(signature([16, 32]), [(2, 17)])
    assert text == "no compiled program for input shape [2, 17]; compiled: [[n, 16], [n, 32] with n up to 8]"


def test_rule_11_message_of_several_inputs_names_them() -> None:
    text = compiled_text(signature([16], tensors=2), [(2, 17), (2, 16)])
    assert text == (
        "no compiled program for input shape [x0: [2, 17], x1: [2, 16]]; "
        "compiled: [[x0: [n, 16], x1: [n, 16]] with n up to 8]"
    )


def test_rule_11_message_without_a_batch_axis_and_with_very_many_shapes() -> None:
    fixed = (TensorSpec("x", "f32", (3,), None),)
    plain = Signature(fixed, fixed, fixed, fixed, (0,), (Variant((), ((3,),), ((3,),), (False,)),))
    assert compiled_text(plain, [(4,)]) == "no compiled program for input shape [4]; compiled: [[3]]"
    many = compiled_text(signature(list(range(1, 101))), [(2, 200)])
    assert f"and {100 - MAX_TOLD_VARIANTS} more" in many
