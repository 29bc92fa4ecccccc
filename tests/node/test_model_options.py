"""Per-model settings from the file and from the environment, together, and everything wrong with them at once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.model_options import MODELS_VARIABLE, ModelOptions, read_models
from worker.config import ModelSettings

PATH = "global.scheduler.models"
NOTE = f" (from environment {MODELS_VARIABLE})"


def read(models: Any = None, variable: str | None = None) -> ModelOptions:
    environ = {} if variable is None else {MODELS_VARIABLE: variable}
    return read_models({"global": {"scheduler": {"models": models}}}, environ, "node.yaml")


def test_rule_33_the_environment_wins_key_by_key_and_sources_are_kept() -> None:
    found = read(
        {"a": {"weight": 2, "max_batch_size": 8}, "b.c": {"max_queue_delay_ms": 5}},
        '{"a": {"weight": 3.5}, "d": {"weight": 1}}',
    )
    assert found.mistakes == []
    assert found.settings == {
        "a": ModelSettings(weight=3.5, max_batch_size=8),
        "b.c": ModelSettings(max_queue_delay_ms=5.0),
        "d": ModelSettings(weight=1.0),
    }
    assert found.sources == {
        f"{PATH}.a.weight": f"environment {MODELS_VARIABLE}",
        f"{PATH}.a.max_batch_size": "file node.yaml",
        f"{PATH}.b.c.max_queue_delay_ms": "file node.yaml",
        f"{PATH}.d.weight": f"environment {MODELS_VARIABLE}",
    }


def test_rule_33_all_mistakes_of_both_sources_are_told_with_paths() -> None:
    found = read(
        {"a": {"weight": 0, "wieght": 1}, "b": [], "c": {"residency": "pinned", "max_batch_size": -1}},
        '{"a": {"weight": "2"}, "d": {"max_queue_delay_ms": 1e9}}',
    )
    assert found.mistakes == [
        f"{PATH}.a.wieght: unknown key; did you mean weight?",
        f"{PATH}.a.weight: expected a number above 0, got 0",
        f"{PATH}.b: expected a mapping, got []",
        f"{PATH}.c.residency: not available yet",
        f"{PATH}.c.max_batch_size: expected a whole number of at least 0, got -1",
        f"{PATH}.a.weight: expected a number above 0, got '2'{NOTE}",
        f"{PATH}.d.max_queue_delay_ms: expected a number from 0 to 60000, got 1000000000.0{NOTE}",
    ]


@pytest.mark.parametrize("text", ["", "{", "weight=2", "NaN", '{"a": {"weight": NaN}}', "[" * 100_000])
def test_a_variable_that_is_no_json_says_what_was_expected(text: str) -> None:
    (mistake,) = read(None, text).mistakes
    assert mistake.startswith(f'{PATH}: expected JSON such as {{"resnet50": {{"weight": 2}}}}, got ')
    assert mistake.endswith(NOTE)
    assert len(mistake) < 400


@pytest.mark.parametrize("text", ["[]", "1", '"a"'])
def test_a_variable_that_is_no_mapping_says_so(text: str) -> None:
    assert read(None, text).mistakes == [f"{PATH}: expected a mapping, got {json.loads(text)!r}{NOTE}"]


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.dictionaries(
            st.sampled_from(["weight", "max_batch_size", "max_queue_delay_ms", "x"]),
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
            max_size=3,
        ),
        max_size=3,
    )
)
def test_any_mapping_is_taken_or_every_mistake_has_its_path(models: dict[str, dict[str, Any]]) -> None:
    found = read(models)
    assert set(found.settings) == set(models)
    taken = sum(len(keys) for keys in models.values()) - len(found.mistakes)
    assert len(found.sources) == taken
    assert all(mistake.startswith(PATH) for mistake in found.mistakes)
