"""The runner's pure parts: pauses, retries, lanes, gates, result lines."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.batches.runner import results
from frontend.batches.runner.gates import NOT_LEGITIMATE, READY, Ask, Reason, first_closed
from frontend.batches.runner.job import legitimate
from frontend.batches.runner.lanes import Lane, Retry, lanes_of
from frontend.batches.runner.pause_state import IDLE, Pause, after_overload, after_success
from frontend.batches.runner.retry_state import retry_at_ns
from frontend.batches.runner.timings import Timings, ns
from frontend.batches.store.rows import Demand
from frontend.openai.calls import Sent, UpstreamAnswer

TIMES = Timings(retry_jitter=0.0)
S = 1_000_000_000


def overload(pause: Pause, now_s: float, started_s: float | None = None, retry_after_s: float | None = None) -> Pause:
    started_ns = ns(now_s if started_s is None else started_s)
    return after_overload(pause, ns(now_s), started_ns, retry_after_s, TIMES, declined=True)


def test_rule_50_pauses_double_to_a_minute() -> None:
    pause, now_s, lengths = IDLE, 0.0, []
    for _ in range(9):
        pause = overload(pause, now_s)
        lengths.append((pause.until_ns - ns(now_s)) / 1e9)
        now_s = pause.until_ns / 1e9
        assert not pause.runs(ns(now_s)) and pause.runs(ns(now_s) - 1)
    assert lengths == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_rule_50_a_success_resets_the_row_but_not_the_pause() -> None:
    pause = overload(overload(IDLE, 0), 1)
    reset = after_success(pause)
    assert reset.until_ns == pause.until_ns == 3 * S
    assert overload(reset, 10).until_ns == 11 * S


@pytest.mark.parametrize(
    ("asked_s", "until_s"), [(None, 1), (0.5, 1), (120, 120), (299.0, 299), (3600, 300), (-5, 1), (float("inf"), 300)]
)
def test_rule_50_retry_after_counts_when_larger_up_to_300_s(asked_s: float | None, until_s: float) -> None:
    assert overload(IDLE, 0, retry_after_s=asked_s).until_ns == until_s * S


def test_rule_50_lines_that_failed_together_count_once() -> None:
    pause = overload(IDLE, 10, started_s=9)
    for _ in range(63):
        pause = overload(pause, 10.1, started_s=9.5)
    assert pause.streak == 1 and pause.until_ns == 11 * S
    longer = overload(pause, 10.2, started_s=9.5, retry_after_s=30)
    assert longer.until_ns == ns(40.2), "what it asks for counts all the same"
    assert overload(longer, 50, started_s=45).streak == 2


@given(st.lists(st.tuples(st.floats(0, 1e4), st.one_of(st.none(), st.floats(0, 1e5))), max_size=80))
def test_a_pause_never_ends_earlier_nor_lasts_for_ever(events: list[tuple[float, float | None]]) -> None:
    pause, now_s = IDLE, 0.0
    for step_s, asked_s in events:
        now_s += step_s
        later = overload(pause, now_s, retry_after_s=asked_s)
        assert later.until_ns >= pause.until_ns and later.until_ns <= ns(now_s) + 300 * S + 1
        pause = later


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_rule_49_retryable_failures_wait_2_then_4_s(status: int) -> None:
    assert retry_at_ns(status, 1, 2, 0, 0.5, TIMES) == 2 * S
    assert retry_at_ns(status, 2, 2, 0, 0.5, TIMES) == 4 * S
    assert retry_at_ns(status, 3, 2, 0, 0.5, TIMES) is None
    assert retry_at_ns(status, 1, 0, 0, 0.5, TIMES) is None, "retries are opt-in"


@pytest.mark.parametrize("status", [None, 200, 400, 401, 404, 408, 413, 422, 500, 501])
def test_rule_49_other_failures_are_results(status: int | None) -> None:
    assert retry_at_ns(status, 1, 2, 0, 0.0, TIMES) is None


def test_bg_20_retries_are_spread_and_never_early() -> None:
    times = Timings()
    waits = [retry_at_ns(503, 1, 2, 0, jitter / 10, times) for jitter in range(11)]
    assert waits[0] == 2 * S and waits[-1] == ns(2.2) and waits == sorted(set(waits), key=lambda at: at or 0)


def test_rule_37_lanes_keep_input_order_and_skip_what_was_claimed() -> None:
    lanes = lanes_of([("a", np.array([0, 2, 4, 6])), ("b", np.array([1, 3, 5]))], np.array([0, 3, 4]))
    assert [(lane.model, lane.next_new(10)) for lane in lanes] == [("a", [2, 6]), ("b", [1, 5])]
    lanes[0].take_new(1)
    assert lanes[0].next_new(10) == [6] and lanes[0].planned_ns is None


@given(st.data())
def test_rule_37_lines_that_were_given_back_come_first_and_in_order(data: st.DataObject) -> None:
    """Whatever was taken, given back and dropped in any order: every line is there once, in input order."""
    lane = Lane("m", np.arange(40, dtype=np.int32), planned_ns=1)
    taken: set[int] = set()
    dropped: set[int] = set()
    for _ in range(data.draw(st.integers(1, 12))):
        step = data.draw(st.sampled_from(["take", "give back", "drop"]))
        if step == "take":
            numbers = lane.next_new(data.draw(st.integers(0, lane.new)))
            lane.take_new(len(numbers))
            taken |= set(numbers)
        elif step == "give back" and taken:
            again = data.draw(st.lists(st.sampled_from(sorted(taken)), unique=True))
            lane.give_back(again)
            taken -= set(again)
        elif step == "drop":
            gone = lane.next_new(data.draw(st.integers(0, lane.new)))
            if taken and data.draw(st.booleans()):
                # One is given back in between: a lane that only counted would drop the wrong ones.
                lane.give_back([min(taken)])
                taken.remove(min(taken))
            lane.drop(gone)
            dropped |= set(gone)
        left = sorted(set(range(40)) - taken - dropped)
        assert lane.next_new(50) == left and lane.new == len(left)


def test_a_retry_waits_for_its_time_on_its_own_route() -> None:
    lane = Lane("m", np.array([7, 8], dtype=np.int32), route="R1")
    late, soon = Retry(20, 3, 2, "R2"), Retry(10, 5, 2, "R1")
    lane.put_back(late)
    lane.put_back(soon)
    assert lane.demand() == {"R1": 3, "R2": 1} and lane.waiting == 4
    assert [retry.line_no for retry in lane.due(9)] == []
    assert [retry.line_no for retry in lane.due(20)] == [5, 3]
    assert (lane.startable("R1", 9), lane.startable("R1", 10), lane.startable("R2", 10)) == (2, 3, 0)
    lane.take_retry(late)
    assert lane.waiting == 3


def test_rule_17_the_first_closed_gate_is_the_reason_and_the_last_one_asked() -> None:
    asked: list[str] = []

    class Named:
        def __init__(self, reason: Reason | None) -> None:
            self.reason = reason

        def closed(self, ask: Ask) -> Reason | None:
            asked.append(str(self.reason))
            return self.reason

    gates = [Named(None), Named(Reason.LIVE_TRAFFIC), Named(Reason.SERVER_BUSY)]
    assert first_closed(gates, Ask("b", "w", "R", 0)) is Reason.LIVE_TRAFFIC
    assert asked == ["None", "live_traffic"]
    assert first_closed([], Ask("b", "w", "R", 0)) is None


def test_rule_38_only_gates_keep_a_batch_out_of_the_order() -> None:
    assert {None, Reason.CONCURRENCY, Reason.FAIR_SHARE} == READY
    assert {Reason.METRICS_UNAVAILABLE, Reason.ROUTE_COOLING} == NOT_LEGITIMATE


def test_rule_71_one_fault_among_the_reasons_is_no_legitimate_wait() -> None:
    def demand(reason: Reason | None) -> Demand:
        return Demand("R", 1, reason, reason in READY)

    assert legitimate((demand(Reason.OUTSIDE_WINDOW), demand(Reason.CONCURRENCY)))
    assert not legitimate((demand(Reason.OUTSIDE_WINDOW), demand(Reason.METRICS_UNAVAILABLE)))
    assert not legitimate((demand(Reason.ROUTE_COOLING),))
    assert not legitimate((demand(None),)) and not legitimate(())


def answer(body: bytes, status: int = 200) -> UpstreamAnswer:
    return UpstreamAnswer(status, body, "R", Sent.ANSWERED, "req_1", code=None if status == 200 else "bad")


def test_rule_60_shape_of_a_success() -> None:
    result = results.answered("batch_1", 7, b'"mine"', answer(b'{"model":"m", "n": 1.50}'))
    value = json.loads(result.record)
    assert result.ok and list(value) == ["id", "custom_id", "response", "error"]
    assert value["id"] == results.request_id("batch_1", 7) and len(value["id"]) == len("batch_req_") + 32
    assert value["custom_id"] == "mine" and value["error"] is None
    assert value["response"] == {"status_code": 200, "request_id": "req_1", "body": {"model": "m", "n": 1.5}}
    assert b"1.50" in result.record, "numbers stay as they were written"


def test_rule_60_shape_of_a_failure_and_of_no_response() -> None:
    body = b'{"error":{"message":"no","type":"x","param":null,"code":"bad"}}'
    result = results.answered("batch_1", 0, b'"c"', answer(body, 422))
    value = json.loads(result.record)
    assert (result.ok, result.status, result.code) == (False, 422, "bad")
    assert value["response"]["status_code"] == 422 and value["response"]["body"]["error"]["code"] == "bad"
    none = json.loads(results.without_response("batch_1", 0, b'"c"', "batch_expired").record)
    assert none["response"] is None and none["error"]["code"] == "batch_expired" and none["error"]["message"]


@pytest.mark.parametrize(
    ("body", "ok"),
    [
        (b'{"a":1}', True),
        (b'{"usage":null}', True),
        (b'{"usage":"many"}', True),
        (b"[1,2]", True),
        (b'{\n  "a": [1,\r\n 2]\n}', True),
        ('{"text":"a\u2028b\u2029c\u0085d"}'.encode(), True),
        (b'{"text":"' + b"x" * 3_000_000 + b'"}', True),
        (b"", False),
        (b"\xff\xfe", False),
        (b'{"text":"\xff"}', False),
        (b"<html>", False),
        (b'{"a":1} trailing', False),
        (b"\x1f\x8b\x08\x00", False),
        (b"[" * 100_000, False),
    ],
)
def test_bf_21_each_odd_body_is_one_line_by_its_own_merit(body: bytes, ok: bool) -> None:
    result = results.answered("batch_1", 0, b'"c"', answer(body))
    assert result.ok is ok
    assert len(result.record.decode().splitlines()) == 1
    value = json.loads(result.record)
    assert value["response"]["body"] == json.loads(body) if ok else value["response"]["status_code"] == 502


@given(st.text(max_size=40), st.recursive(st.none() | st.text(max_size=20) | st.integers(), st.lists, max_leaves=5))
def test_bf_21_any_id_and_body_survive_on_one_line(custom_id: str, body: object) -> None:
    record = results.answered(
        "b", 1, json.dumps(custom_id, ensure_ascii=False).encode("utf-8", "surrogatepass"),
        answer(json.dumps(body, indent=2, ensure_ascii=False).encode("utf-8", "surrogatepass")),
    ).record  # fmt: skip
    assert len(record.decode().splitlines()) == 1
    value = json.loads(record)
    if value["response"]["status_code"] == 200:
        assert value["response"]["body"] == body


@pytest.mark.parametrize("raw", [b"", b"{}", b"[]", b'{"custom_id":"a","url":"/v1/x"}', b"\xff", b"[" * 100_000])
def test_bf_07_a_damaged_line_is_no_line(raw: bytes) -> None:
    assert results.read_input(raw) is None


@pytest.mark.parametrize(
    ("code", "status", "stored"),
    [
        ("rate_limit_exceeded", 429, "rate_limit_exceeded"),
        ("Bad-Code", 400, "request_failed"),
        (None, 502, "upstream_error"),
        ("x" * 65, 500, "upstream_error"),
        ("_", 404, "request_failed"),
    ],
)
def test_error_codes_fit_the_store(code: str | None, status: int, stored: str) -> None:
    made = UpstreamAnswer(status, b"{}", "R", Sent.ANSWERED, "req", code=code)
    assert results.answered("b", 0, b'"c"', made).code == stored
