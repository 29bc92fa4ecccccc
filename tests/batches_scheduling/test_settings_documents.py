"""The settings document: what is refused, with which text and place; what is accepted comes back as it was."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.batches.scheduling import zones
from frontend.batches.scheduling.metrics_reader import approved_urls
from frontend.batches.scheduling.settings_document import (
    DAYS,
    BadSettings,
    RouteFacts,
    read_settings,
    settings_document,
    window_of,
)
from frontend.batches.scheduling.window_state import Window
from frontend.batches.store.rows import SchedulingRow
from frontend.openai.addresses import read_endpoint

ENDPOINTS = [
    read_endpoint("http://gpu.example:8000/v1", ["10.0.0.5"], development=False),
    read_endpoint("https://proxy.example/vllm/v1", ["203.0.113.7"], development=False),
]
URL = "http://gpu.example:8000/metrics"
VLLM = RouteFacts("r", "vllm", approved_urls(ENDPOINTS))
EXAMPLE = {
    "max_concurrency": 4, "yield_live_threshold": 2,
    "metrics": {"url": URL, "max_waiting": 0, "max_running": None, "max_kv_cache_percent": 90},
    "priority": 10,
    "window": {
        "timezone": "America/New_York", "days": ["mon", "tue", "wed", "thu", "fri"], "start": "19:00", "end": "07:00",
    },
    "latency_share_percent": None, "reopen_after_s": None,
}  # fmt: skip
WINDOW = EXAMPLE["window"]
METRICS = EXAMPLE["metrics"]


def read(document: Any, route: RouteFacts = VLLM) -> SchedulingRow:
    return read_settings(document, route, updated_at=5, updated_by="key_a")


def refusal(document: Any, route: RouteFacts = VLLM) -> tuple[str, str]:
    with pytest.raises(BadSettings) as caught:
        read(document, route)
    return caught.value.param, str(caught.value)


def with_(name: str, value: Any) -> dict[str, Any]:
    """Return the example with one value changed; ``name`` may be a path."""
    outer, _, inner = name.partition(".")
    return EXAMPLE | {outer: {**EXAMPLE[outer], inner: value} if inner else value}  # type: ignore[dict-item]


def test_rule_80_the_example_of_the_page() -> None:
    row = read(EXAMPLE)
    assert row == SchedulingRow(
        "r", 4, 2, URL, 0, None, 90, 10, "America/New_York", 0b11111, 19 * 60, 7 * 60, 5, "key_a", None, None
    )
    assert window_of(row) == Window("America/New_York", frozenset(range(5)), 19 * 60, 7 * 60)
    assert settings_document(row) == EXAMPLE


def test_the_settings_in_the_readme_are_accepted() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (text,) = re.findall(r"batch-scheduling .*?-d '(\{.*?\})'\n", readme, re.DOTALL)
    facts = RouteFacts("gpu1", "vllm", ["http://10.0.0.5:8000/metrics"])
    assert read(json.loads(text), facts).window_timezone == "America/New_York"


def test_rule_80_what_is_omitted_is_off() -> None:
    assert read({"max_concurrency": 2}) == SchedulingRow("r", updated_at=5, updated_by="key_a")
    assert settings_document(SchedulingRow("r")) == {
        "max_concurrency": 2, "yield_live_threshold": None, "metrics": None, "priority": None, "window": None,
        "latency_share_percent": None, "reopen_after_s": None,
    }  # fmt: skip


def test_a_cap_may_be_a_range() -> None:
    row = read({"max_concurrency": {"min": 1, "max": 8}, "latency_share_percent": 30})
    assert (row.min_concurrency, row.max_concurrency, row.latency_share_percent) == (1, 8, 30)
    assert settings_document(row)["max_concurrency"] == {"min": 1, "max": 8}
    assert read({"max_concurrency": {"min": 3, "max": 3}}).latency_share_percent is None


def test_the_live_gate_may_stay_closed_for_a_while() -> None:
    row = read({"max_concurrency": 2, "yield_live_threshold": 1, "reopen_after_s": 10})
    assert row.reopen_after_s == 10
    assert settings_document(row)["reopen_after_s"] == 10


REFUSED: list[tuple[str, Any, str, str]] = [
    ("max_concurrency", 0, "max_concurrency", "from 1 to 256"),
    ("max_concurrency", 257, "max_concurrency", "from 1 to 256"),
    ("max_concurrency", True, "max_concurrency", "whole number"),
    ("max_concurrency", 2.0, "max_concurrency", "whole number"),
    ("max_concurrency", "2", "max_concurrency", "whole number"),
    ("max_concurrency", None, "max_concurrency", "whole number"),
    ("max_concurrency", {"min": 1}, "max_concurrency.max", "required"),
    ("max_concurrency", {"min": 0, "max": 3}, "max_concurrency.min", "from 1 to 256"),
    ("max_concurrency", {"min": 1, "max": 257}, "max_concurrency.max", "from 1 to 256"),
    ("max_concurrency", {"min": 4, "max": 3}, "max_concurrency.min", "must not be above"),
    ("max_concurrency", {"min": 1, "max": 3, "step": 1}, "max_concurrency.step", "unknown field; expected min, max"),
    ("latency_share_percent", 20, "latency_share_percent", "needs a max_concurrency with min and max"),
    ("yield_live_threshold", 0, "yield_live_threshold", "from 1 to 100000"),
    ("yield_live_threshold", 100_001, "yield_live_threshold", "from 1 to 100000"),
    ("yield_live_threshold", "2", "yield_live_threshold", "whole number"),
    ("reopen_after_s", 0, "reopen_after_s", "from 1 to 600"),
    ("reopen_after_s", 601, "reopen_after_s", "from 1 to 600"),
    ("reopen_after_s", 1.5, "reopen_after_s", "whole number"),
    ("metrics", [], "metrics", "must be an object"),
    ("metrics", {"url": URL}, "metrics", "at least one of max_waiting, max_running, max_kv_cache_percent"),
    ("metrics", {"max_waiting": 1}, "metrics.url", "required"),
    ("metrics.max_waiting", -1, "metrics.max_waiting", "from 0 to 100000"),
    ("metrics.max_running", 100_001, "metrics.max_running", "from 0 to 100000"),
    ("metrics.max_kv_cache_percent", 0, "metrics.max_kv_cache_percent", "from 1 to 100"),
    ("metrics.max_kv_cache_percent", 101, "metrics.max_kv_cache_percent", "from 1 to 100"),
    ("metrics.max_kv_cache_percent", 90.5, "metrics.max_kv_cache_percent", "whole number"),
    ("metrics.max_wating", 1, "metrics.max_wating", "unknown field"),
    ("priority", 0, "priority", "from 1 to 1000000"),
    ("priority", -1, "priority", "from 1 to 1000000"),
    ("priority", 1_000_001, "priority", "from 1 to 1000000"),
    ("window", "nights", "window", "must be an object"),
    ("window.timezone", "Mars/Olympus", "window.timezone", "no IANA time zone"),
    ("window.timezone", "", "window.timezone", "1 to 64 characters"),
    ("window.timezone", "Z" * 65, "window.timezone", "1 to 64 characters"),
    ("window.timezone", None, "window.timezone", "required"),
    ("window.days", [], "window.days", "at least one day"),
    ("window.days", ["mon", "mon"], "window.days", "twice"),
    ("window.days", ["monday"], "window.days", "must be of mon, tue"),
    ("window.days", ["Mon"], "window.days", "must be of mon, tue"),
    ("window.days", [0], "window.days", "must be of mon, tue"),
    ("window.days", [["mon"]], "window.days", "must be of mon, tue"),
    ("window.days", "mon", "window.days", "a list"),
    ("window.days", None, "window.days", "a list"),
    ("window.start", "24:00", "window.start", "HH:MM"),
    ("window.start", "6:00", "window.start", "HH:MM"),
    ("window.start", "", "window.start", "HH:MM"),
    ("window.start", "19:00\n", "window.start", "HH:MM"),
    ("window.start", "１９:００", "window.start", "HH:MM"),
    ("window.end", "07:60", "window.end", "HH:MM"),
    ("window.end", 7, "window.end", "required"),
    ("window.zone", "UTC", "window.zone", "unknown field"),
    ("surprise", 1, "surprise", "unknown field; expected max_concurrency, "),
]


@pytest.mark.parametrize(("name", "value", "param", "message"), REFUSED, ids=[f"{row[0]}={row[1]}" for row in REFUSED])
def test_rule_81_what_is_refused(name: str, value: Any, param: str, message: str) -> None:
    told = refusal(with_(name, value))
    assert told[0] == param
    assert message in told[1]


@pytest.mark.parametrize("document", [None, [], "x", 4, {}])
def test_what_is_no_settings_document(document: Any) -> None:
    assert refusal(document)[0] in ("", "max_concurrency")


def test_rule_81_the_first_failure_in_order_wins() -> None:
    """Mend one mistake after the other: they come up in the order of the rule."""
    document: Any = {
        "window": WINDOW | {"days": []}, "priority": 0,
        "metrics": {"url": "http://other.example/metrics", "max_kv_cache_percent": None},
        "yield_live_threshold": 0, "max_concurrency": 0,
    }  # fmt: skip
    openai = RouteFacts("r", "openai", VLLM.metrics_urls)
    seen = []
    for name, value in [
        ("max_concurrency", 1), ("yield_live_threshold", 1), ("metrics", document["metrics"] | {"max_waiting": -1}),
        ("metrics", document["metrics"] | {"max_waiting": 1}), ("metrics", METRICS),
    ]:  # fmt: skip
        seen.append(refusal(document, openai))
        document[name] = value
    alone = {"max_concurrency": 1, "reopen_after_s": 5, "metrics": {"url": "x"}}
    assert refusal(alone, openai) == ("reopen_after_s", "reopen_after_s needs a yield_live_threshold")
    assert [param for param, _ in seen] == [
        "max_concurrency", "yield_live_threshold", "metrics", "metrics.max_waiting", "metrics.url",
    ]  # fmt: skip
    assert refusal(document, openai) == ("priority", "priority is available on vLLM and OpenAI-compatible routes only")
    assert refusal(document) == ("priority", "priority must be from 1 to 1000000")
    assert refusal(document | {"priority": 1})[0] == "window.days"
    assert read(document | {"priority": 1, "window": WINDOW}).priority == 1


@pytest.mark.parametrize(("kind", "allowed"), [("vllm", 1), ("openai_compatible", 1), ("openai", 0), ("local", 0)])
def test_rule_77_which_routes_may_have_a_priority(kind: str, allowed: int) -> None:
    facts, document = RouteFacts("r", kind, ()), {"max_concurrency": 2, "priority": 7}
    if allowed:
        assert read(document, facts).priority == 7
    else:
        assert refusal(document, facts)[0] == "priority"
        assert read(document | {"priority": None}, facts).priority is None


@pytest.mark.parametrize("url", [URL, "https://proxy.example/vllm/metrics"])
def test_acceptance_12_urls_that_are_approved(url: str) -> None:
    assert read(with_("metrics.url", url)).metrics_url == url


@pytest.mark.parametrize(
    "url",
    [
        "http://gpu.example:9000/metrics", "http://other.example:8000/metrics", "http://gpu.example:8000/v1/metrics",
        "http://gpu.example:8000/metrics?x=1", "http://gpu.example:8000/metrics#x",
        "http://u:p@gpu.example:8000/metrics", "http://gpu.example:8000/stats", "https://gpu.example:8000/metrics",
        "https://proxy.example/metrics", "http://GPU.example:8000/metrics", "http://gpu.example:8000/metrics/",
        "http://gpu.example:8000/%6detrics", " http://gpu.example:8000/metrics", "http://169.254.169.254/metrics",
        "http://gpu.example:8000/" + "x" * 2048 + "/metrics", "metrics", "",
    ],
)  # fmt: skip
def test_acceptance_12_urls_that_are_not_approved(url: str) -> None:
    param, message = refusal(with_("metrics.url", url))
    assert param == "metrics.url"
    assert "example:" not in message and "u:p@" not in message


def test_acceptance_14_a_window_that_is_accepted() -> None:
    row = read(
        {
            "max_concurrency": 2,
            "window": {"timezone": "Europe/Berlin", "days": ["sun"], "start": "22:00", "end": "06:00"},
        }
    )
    assert window_of(row) == Window("Europe/Berlin", frozenset({6}), 22 * 60, 6 * 60)


TIMES = st.builds("{:02}:{:02}".format, st.integers(0, 23), st.integers(0, 59))
LIMITS = st.none() | st.integers(0, 100_000)
DOCUMENTS = st.fixed_dictionaries(
    {
        "max_concurrency": st.integers(1, 256)
        | st.tuples(st.integers(1, 256), st.integers(1, 256)).map(lambda two: {"min": min(two), "max": max(two)}),
        "yield_live_threshold": st.none() | st.integers(1, 100_000),
        "metrics": st.none()
        | st.fixed_dictionaries(
            {
                "url": st.sampled_from(sorted(VLLM.metrics_urls)), "max_waiting": LIMITS, "max_running": LIMITS,
                "max_kv_cache_percent": st.integers(1, 100),
            }
        ),
        "priority": st.none() | st.integers(1, 1_000_000),
        "window": st.none()
        | st.fixed_dictionaries(
            {
                "timezone": st.sampled_from(sorted(zones.names())),
                "days": st.frozensets(st.sampled_from(DAYS), min_size=1).map(lambda days: sorted(days, key=DAYS.index)),
                "start": TIMES, "end": TIMES,
            }
        ),
        "latency_share_percent": st.none(), "reopen_after_s": st.none(),
    }
)  # fmt: skip


@given(DOCUMENTS)
def test_what_is_accepted_comes_back_as_it_was(document: dict[str, Any]) -> None:
    assert settings_document(read(document)) == document


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)


@given(
    DOCUMENTS, st.sampled_from([*EXAMPLE, "window.days", "window.start", "metrics.url", "metrics.max_waiting"]), JSON
)
def test_any_value_anywhere_is_taken_or_refused(document: dict[str, Any], name: str, value: Any) -> None:
    outer, _, inner = name.partition(".")
    changed = document | {outer: {**(document[outer] or {}), inner: value} if inner else value}
    refused, row = "", None
    try:
        row = read(changed)
    except BadSettings as error:
        refused = error.param.split(".")[0]
    assert refused in (outer, "latency_share_percent") if row is None else read(settings_document(row)) == row
