"""What is read from a page of metrics, and what a route's limits make of it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.batches.runner.gates import Reason
from frontend.batches.scheduling.exposition import KV_CACHE, MAX_COUNT, RUNNING, WAITING, Load, read_load
from frontend.batches.scheduling.load_limits import Judgement, ReadError, Reading, judge
from frontend.batches.store.rows import SchedulingRow

PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="a \\"quoted} name",model_name="m"} 2.0 1792918800000
vllm:num_requests_waiting{engine="2"} NaN
vllm:num_requests_waiting{engine="3"} -4
vllm:num_requests_waiting_by_reason{reason="capacity"} 99
this is junk {{{
vllm:num_requests_waiting{engine="4" 7

vllm:kv_cache_usage_perc{engine="0"} 0.42
vllm:kv_cache_usage_perc{engine="1"} 0.913
"""


def test_acceptance_11_a_page_with_everything() -> None:
    assert read_load(PAGE) == Load(waiting=2, running=4, kv_cache_permille=913)


def test_bg_07_several_models_and_engines_are_one_server() -> None:
    page = "\n".join(
        f'vllm:num_requests_waiting{{engine="{engine}",model_name="{model}"}} {value}'
        for engine, model, value in [(0, "a", 1), (1, "a", 2), (0, "b", 4)]
    )
    assert read_load(page).waiting == 7


@pytest.mark.parametrize(
    ("page", "load"),
    [
        # Old name only; new only; both; either with and without labels: acceptance 11 and BG-19.
        ("vllm:gpu_cache_usage_perc 0.5", Load(None, None, 500)),
        ("vllm:kv_cache_usage_perc 0.5", Load(None, None, 500)),
        ('vllm:gpu_cache_usage_perc{engine="0"} 0.2\nvllm:kv_cache_usage_perc 0.5', Load(None, None, 500)),
        ('vllm:gpu_cache_usage_perc{engine="0"} 0.7\nvllm:kv_cache_usage_perc 0.5', Load(None, None, 700)),
        # BG-07: no signal is no signal.
        ("", Load()),
        ("<html><body>vllm:num_requests_waiting 0</body></html>", Load()),
        ("vllm:num_requests_waiting NaN", Load()),
        ("vllm:num_requests_waiting +Inf", Load()),
        ("vllm:num_requests_waiting 0", Load(0)),
        ("vllm:num_requests_waiting_total 5", Load()),
        ("my_vllm:num_requests_waiting 5", Load()),
        ("num_requests_waiting 5", Load()),
        ("VLLM:num_requests_waiting 5", Load()),
        # The form of a line.
        ("vllm:num_requests_waiting\t5\t123", Load(5)),
        ("  vllm:num_requests_waiting 5  \r\nvllm:num_requests_running 1\r", Load(5, 1)),
        ('vllm:num_requests_waiting{a="}"}5', Load(5)),
        ('vllm:num_requests_waiting {a="b"} 5', Load(5)),
        ("vllm:num_requests_waiting{} 5", Load(5)),
        ('vllm:num_requests_waiting{a="b\\\\"} 5', Load(5)),
        ('vllm:num_requests_waiting{a="b} 5\nvllm:num_requests_waiting 6', Load(6)),
        ("vllm:num_requests_waiting", Load()),
        ("vllm:num_requests_waiting five", Load()),
        ("vllm:num_requests_waiting 1_000", Load()),
        ("vllm:num_requests_waiting 0x10", Load()),
        ("vllm:num_requests_waiting ٥", Load()),
        ("vllm:num_requests_waiting 5 # {trace=\"1\"} 9", Load(5)),
        ("# vllm:num_requests_waiting 5", Load()),
        ("vllm:num_requests_waiting 1e1\nvllm:num_requests_running +.5", Load(10, 1)),
        # Rounding and bounds.
        ("vllm:num_requests_waiting 0.49", Load(0)),
        ("vllm:num_requests_waiting 0.25\nvllm:num_requests_waiting 0.25", Load(1)),
        ("vllm:num_requests_waiting 2.5", Load(3)),
        ("vllm:num_requests_waiting 1e308\nvllm:num_requests_waiting 1e308", Load(MAX_COUNT)),
        ("vllm:num_requests_waiting 1e999", Load()),
        ("vllm:kv_cache_usage_perc 1.7", Load(None, None, 1000)),
        ("vllm:kv_cache_usage_perc 0.9004", Load(None, None, 900)),
        ("vllm:kv_cache_usage_perc 0.9005", Load(None, None, 901)),
        ("vllm:kv_cache_usage_perc 0.0005", Load(None, None, 1)),
        ("vllm:kv_cache_usage_perc 0.5745", Load(None, None, 575)),
    ],
)  # fmt: skip
def test_rule_28_lines(page: str, load: Load) -> None:
    assert read_load(page) == load


@given(st.text())
def test_any_text_can_be_read(page: str) -> None:
    read_load(page)
    read_load("\n".join([f"{WAITING}{page} 4", f"{RUNNING} 7"]))


LABELS = st.dictionaries(st.sampled_from("abc"), st.text(st.characters(exclude_categories=["Cs"]), max_size=8))
SAMPLES = st.lists(
    st.tuples(
        st.sampled_from([WAITING, RUNNING, *KV_CACHE, "other", WAITING + "_by_reason"]),
        LABELS,
        st.floats(0, 2000) | st.sampled_from([math.nan, math.inf, -1.0]),
    )
)


def written(name: str, labels: dict[str, str], value: float) -> str:
    """Return a line as servers write it: backslash, quote and line feed escaped."""
    told = [
        f'{key}="' + text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") + '"'
        for key, text in labels.items()
    ]
    return f"{name}{{{','.join(told)}}} {value!r}"


@given(SAMPLES)
def test_rule_28_sums_and_the_largest(samples: list[tuple[str, dict[str, str], float]]) -> None:
    load = read_load("\n".join(written(*sample) for sample in samples))
    usable = [(name, value) for name, _, value in samples if math.isfinite(value) and value >= 0]
    for name, found in ((WAITING, load.waiting), (RUNNING, load.running)):
        values = [value for other, value in usable if other == name]
        assert (found is None) == (not values)
        assert found is None or abs(found - math.fsum(values)) <= 0.5000001
    caches = [value for name, value in usable if name in KV_CACHE]
    assert (load.kv_cache_permille is None) == (not caches)
    if load.kv_cache_permille is not None:
        assert abs(load.kv_cache_permille - min(max(caches), 1) * 1000) <= 0.5000001


# Limits

ALL = SchedulingRow("r", 2, None, "http://h/metrics", 0, 8, 90)
BUSY, NOT_THERE = Judgement(Reason.SERVER_BUSY), Judgement(Reason.METRICS_UNAVAILABLE, ReadError.MISSING_METRIC)


def limits(waiting: int | None = None, running: int | None = None, kv: int | None = None) -> SchedulingRow:
    return SchedulingRow("r", 2, None, "http://h/metrics", waiting, running, kv)


@pytest.mark.parametrize(
    ("row", "load", "expected"),
    [
        (ALL, (0, 8, 900), Judgement(None)),
        (ALL, (1, 8, 900), BUSY),
        (ALL, (0, 9, 900), BUSY),
        (ALL, (0, 8, 901), BUSY),
        (limits(kv=90), (99, 99, 900), Judgement(None)),
        (limits(kv=90), (0, 0, 901), BUSY),
        (limits(waiting=0), (0, None, None), Judgement(None)),
        (limits(waiting=0), (None, None, 100), NOT_THERE),
        (limits(running=3), (0, None, 0), NOT_THERE),
        (limits(kv=90), (0, 0, None), NOT_THERE),
        # Rule 20: whichever gauge is above its limit.
        (ALL, (5, None, 0), NOT_THERE),
        (ALL, (None, 99, 1000), NOT_THERE),
        (ALL, (0, 99, None), NOT_THERE),
    ],
)
def test_rule_18_and_20_readings_against_limits(
    row: SchedulingRow, load: tuple[int | None, ...], expected: Judgement
) -> None:
    assert judge(row, Reading(1, 2, None, *load)) == expected


@pytest.mark.parametrize("error", [error for error in ReadError if error is not ReadError.MISSING_METRIC])
def test_rule_27_what_cannot_be_read_is_closed(error: ReadError) -> None:
    assert judge(ALL, Reading(1, 2, error)) == Judgement(Reason.METRICS_UNAVAILABLE, error)


def test_acceptance_11_the_limit_of_the_cache_to_the_permille() -> None:
    for value, reason in (("0.90", None), ("0.901", Reason.SERVER_BUSY)):
        load = read_load(f"vllm:kv_cache_usage_perc {value}")
        assert judge(limits(kv=90), Reading(1, 2, None, *gauges(load))).reason == reason


def gauges(load: Load) -> tuple[int | None, int | None, int | None]:
    return load.waiting, load.running, load.kv_cache_permille
