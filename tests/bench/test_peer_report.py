"""Statements of a comparison: ratios within passes, promises judged by the median, tables that hide nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.peers import report
from bench.peers.report import Promise


def point(peer: str, form: str, per_s: float, number: int = 0, **more: Any) -> dict[str, Any]:
    """Return a point as a session records it."""
    return {
        "peer": peer, "format": form, "per_s": per_s, "pass": number, "model": "mlp_a", "concurrency": 64,
        "p50_ms": 1.0, "p90_ms": 2.0, "p99_ms": 3.0, "errors": 0, "server_cores": 1.0, "client_cores": 0.1,
        "other_cores": 0.0, "speed": 30.0, **more,
    }  # fmt: skip


def comparison(points: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Return a result with nothing but points."""
    return {
        "points": points, "raw_loop": {}, "idle": {}, "unavailable": {}, "left_out": [], "open_loop": [],
        "malformed": [], "scope": {"models": ["mlp_a"], "seconds": 1, "passes": 2},
        "machine": {
            "commit": "abc", "date": "2026-01-01", "cpus": 2, "cpu": "some", "python": "3", "onnxruntime": "1",
            "load_before": 0.1, "load_after": 0.2, "urgent": False,
        },
        **more,
    }  # fmt: skip


def kept(result: dict[str, Any], beginning: str) -> bool | None:
    """Return how the promise that begins so was judged."""
    (found,) = [promise for promise in report.promises(result) if promise.text.startswith(beginning)]
    return found.kept


def test_ratios_are_formed_within_a_pass() -> None:
    ours = [point("ringserve", "v2bin", 100, 0), point("ringserve", "v2bin", 10, 1)]
    theirs = [point("mosec", "raw", 50, 0), point("mosec", "raw", 5, 1)]
    assert report.ratios(ours, theirs) == (2.0, 2.0)


def test_the_best_contender_is_chosen_anew_in_every_pass() -> None:
    ours = [point("ringserve", "v2bin", 60, number) for number in range(2)]
    theirs = [
        point("mosec", "raw", 30, 0), point("triton-w0", "v2bin", 20, 0),
        point("mosec", "raw", 10, 1), point("triton-w0", "v2bin", 60, 1),
    ]  # fmt: skip
    assert report.ratios(ours, theirs) == (2.0, 1.0)


def test_a_peer_with_fewer_passes_enters_the_others_with_its_median() -> None:
    ours = [point("ringserve", "v2bin", 60, number) for number in range(3)]
    assert report.ratios(ours, [point("ray", "raw", 30, 0)]) == (2.0, 2.0, 2.0)


def test_a_missing_side_gives_no_ratio() -> None:
    assert report.ratios([], [point("mosec", "raw", 1)]) == ()
    assert report.ratios([point("ringserve", "v2bin", 1)], []) == ()


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=9))
def test_a_promise_is_judged_by_its_median(values: list[float]) -> None:
    ordered = sorted(values)
    assert Promise("x", ordered[0], None, tuple(values)).kept is True
    assert Promise("x", ordered[-1] + 1, None, tuple(values)).kept is False
    assert Promise("x", None, ordered[-1], tuple(values)).kept is True
    assert Promise("x", 1, None, ()).kept is None


def test_promises_compare_with_the_better_of_two_triton_windows() -> None:
    points = [
        point("ringserve", "v2bin", 400), point("triton-w0", "v2bin", 90), point("triton-w1ms", "v2bin", 110),
        point("inline", "v2bin", 9999),
    ]  # fmt: skip
    result = comparison(points)
    assert kept(result, "mlp_a c=64 v2bin / Triton") is False, "400 / 110 is less than 4"
    assert kept(result, "mlp_a c=64 v2bin / best peer") is True, "our own inline server is no peer"
    assert kept(result, "mlp_a c=64 grpc") is None


def test_latency_promises_look_for_the_smallest() -> None:
    points = [
        point("ringserve", "v2bin", 1, concurrency=1, p50_ms=0.3),
        point("inline", "v2bin", 1, concurrency=1, p50_ms=0.2),
        point("mosec", "raw", 1, concurrency=1, p50_ms=0.4),
        point("triton-w0", "v2bin", 1, concurrency=1, p50_ms=0.2),
    ]
    result = comparison(points)
    assert kept(result, "mlp_a c=1 p50 / inline") is True
    assert kept(result, "mlp_a c=1 p50 / best peer") is False


def test_promises_of_the_extras() -> None:
    result = comparison(
        [],
        open_loop=[{"peer": "ringserve", "model": "mlp_b", "p50_ms": 1.0, "p99_ms": 6.0}],
        malformed=[{"peer": "ringserve", "good_failed": 1}, {"peer": "mosec", "good_failed": 0}],
    )
    assert kept(result, "mlp_b open loop") is False
    assert kept(result, "good requests failed") is False


def test_a_table_marks_disturbance_and_errors_and_puts_the_fastest_first() -> None:
    points = [point("slow", "raw", 10, errors=2), point("fast", "v2bin", 20, other_cores=0.5)]
    rows = report.model_table(comparison(points), "mlp_a").splitlines()[2:]
    assert rows[0].startswith("| fast | v2bin | 20*,")
    assert rows[1].startswith("| slow | raw | 10!,")


def test_the_document_names_what_was_not_measured() -> None:
    result = comparison(
        [point("ringserve", "v2bin", 1)],
        unavailable={"ray": "not installed: pip said no\nmore"},
        left_out=[{"peer": "mosec", "model": "mlp_a", "what": "raw c=1", "why": "no result"}],
    )
    text = report.document(result)
    assert "- ray: not installed: pip said no\n" in text
    assert "- mosec mlp_a raw c=1: no result\n" in text
    assert json.loads(json.dumps(result)) == result


def test_spread_tells_median_and_range() -> None:
    assert report.spread([3.0, 1.0, 2.0]) == "2.00 (1.00 to 3.00)"
    assert report.spread([1.0]) == "1.00"
    assert report.spread([]) == "-"


def test_a_section_is_replaced_and_nothing_else() -> None:
    text = "a\n<!-- m begin -->\nold\n<!-- m end -->\nz"
    once = report.replace_section(text, "m", "new")
    assert once == "a\n<!-- m begin -->\nnew\n<!-- m end -->\nz"
    assert report.replace_section(once, "m", "new") == once
    with pytest.raises(ValueError, match="no section"):
        report.replace_section("nothing here", "m", "new")
