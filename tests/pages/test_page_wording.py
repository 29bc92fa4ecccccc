"""What people read: the tiles of rule 84, states of rules 68 and 85, and the form of settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pages_world import EXAMPLE

from frontend.batches.scheduling.outlook import Outlook
from frontend.batches.scheduling.plain_words import in_words
from frontend.batches.scheduling.settings_document import settings_document
from frontend.batches.store.rows import SchedulingRow
from frontend.platform.pages import settings_form, wording
from frontend.platform.pages.assets import Assets
from frontend.platform.pages.rendering import Renderer
from frontend.platform.pages.route_pages import in_a_form, preview_values
from frontend.platform.pages.visits import read_fields, safe_next
from frontend.platform.read_models import (
    BatchSummary,
    BatchView,
    Deployment,
    LaneView,
    OpenInterval,
    PreviewView,
    Reading,
    RouteStatus,
)

READ = Reading(0, True, 3, 1, 913, None)
DEPLOYMENT = Deployment("gpu-a", "llama-70b", "vllm", "", None, True)
STATUS = RouteStatus(0, 0, 0, 2, None, None, None, None, None)


def page(template: str, **values: Any) -> str:
    assets = Assets()
    assets.start()
    return Renderer(assets).render(template, **values).decode()


@pytest.mark.parametrize(
    ("reading", "configured", "text"),
    [
        (READ, True, "3 waiting · 1 running · KV cache 91.3%"),
        (replace(READ, running=None, kv_cache_permille=None), True, "3 waiting"),
        (Reading(0, False, None, None, None, "http_status"), True, "Unavailable (http status) · treated as busy"),
        (None, True, "Not read yet"),
        (None, False, "Not configured"),
    ],
)
def test_rule_84_server_load(reading: Reading | None, configured: bool, text: str) -> None:
    assert wording.load_text(reading, configured=configured) == text


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (replace(STATUS, paused_reason="outside_window"), ("Outside its time window", "wait")),
        (replace(STATUS, paused_reason="metrics_unavailable"), ("Server metrics unavailable", "fault")),
        (replace(STATUS, running_lines=1), ("Starting lines", "good")),
        (STATUS, ("Idle", "calm")),
    ],
)
def test_rule_84_status(status: RouteStatus, said: tuple[str, str]) -> None:
    assert wording.route_state(status) == said


def test_rule_85_lanes() -> None:
    lane = LaneView("R", "m", None, 3, 1, None, 0, None)
    assert wording.lane_state(lane) == ("Starting lines", "good")
    assert wording.lane_state(replace(lane, reason="fair_share")) == ("Other batches' turn", "wait")
    assert wording.lane_state(replace(lane, reason="metrics_unavailable"))[1] == "fault"
    assert wording.lane_state(replace(lane, waiting_lines=0, running_lines=0)) == ("Idle", "calm")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59, "59 s"),
        (60, "1 min"),
        (3600, "1 h"),
        (3661, "1 h 1 min"),
        (172_800, "2 d"),
        (180_000, "2 d 2 h"),
    ],
)
def test_durations(seconds: int, text: str) -> None:
    assert wording.duration(seconds * 1_000_000) == text


def test_counts_and_shares() -> None:
    assert [wording.count(1, "line"), wording.count(1200, "line"), wording.count(2, "batch", "batches")] == [
        "1 line", "1,200 lines", "2 batches",
    ]  # fmt: skip
    assert [wording.share(1, 0), wording.share(1, 4), wording.share(9, 4)] == [0, 25, 100]


ROWS = st.one_of(
    st.just(SchedulingRow("R")),
    st.just(EXAMPLE),
    st.builds(
        replace,
        st.just(EXAMPLE),
        max_concurrency=st.integers(8, 256),
        min_concurrency=st.none() | st.integers(1, 8),
        yield_live_threshold=st.none() | st.integers(1, 100_000),
        metrics_max_running=st.none() | st.integers(0, 100_000),
        reopen_after_s=st.none() | st.integers(1, 600),
        priority=st.none() | st.integers(1, 1_000_000),
        window_days=st.integers(1, 127),
        window_start_minute=st.integers(0, 1439),
        window_end_minute=st.integers(0, 1439),
    ),
)


@settings(deadline=None, max_examples=100)
@given(ROWS)
def test_a_form_sends_the_settings_it_shows(row: SchedulingRow) -> None:
    document = settings_document(row)
    sent = settings_form.from_document(document).document()
    assert {name: value for name, value in sent.items() if value is not None} == {
        name: value for name, value in document.items() if value is not None
    }


def test_limits_without_a_url_and_times_without_a_day_are_not_sent() -> None:
    fields = read_fields(b"max_concurrency=2&max_waiting=5&start=19:00&end=07:00&timezone=UTC&metrics_url=+")
    document = settings_form.from_fields(fields).document()
    assert (document["metrics"], document["window"]) == (None, None)


def test_what_is_no_number_is_kept_for_the_check_to_refuse() -> None:
    form = settings_form.from_fields(read_fields(b"max_concurrency=two&priority=1.5&yield_live_threshold=-1"))
    document = form.document()
    assert (document["max_concurrency"], document["priority"], document["yield_live_threshold"]) == ("two", "1.5", -1)


@pytest.mark.parametrize(
    ("message", "param", "said"),
    [
        ("max_concurrency must be from 1 to 256", "max_concurrency", "Must be from 1 to 256"),
        (
            "max_concurrency must be a whole number, or an object with min and max", "max_concurrency",
            "Must be a whole number",
        ),
        (
            "metrics needs at least one of max_waiting, max_running, max_kv_cache_percent", "metrics",
            "Needs at least one of waiting requests, running requests, KV cache use",
        ),
        (
            "max_concurrency.min must not be above max_concurrency.max", "max_concurrency.min",
            "Must not be above “At most”",
        ),
        ("window.timezone: no IANA time zone is called 'X'", "window.timezone", "No IANA time zone is called 'X'"),
    ],
)  # fmt: skip
def test_refusals_beside_a_field_use_no_names_of_the_api(message: str, param: str, said: str) -> None:
    assert in_a_form(message, param) == said


@pytest.mark.parametrize(
    ("param", "field"),
    [
        ("max_concurrency", "max_concurrency"), ("metrics", "max_waiting"), ("metrics.url", "metrics_url"),
        ("metrics.max_kv_cache_percent", "max_kv_cache_percent"), ("window.days", "days"), ("window.start", "start"),
        ("window.timezone", "timezone"), ("priority", "priority"), ("surprise", ""), (None, ""), ("document", ""),
    ],
)  # fmt: skip
def test_every_refusal_finds_its_field(param: str | None, field: str) -> None:
    assert settings_form.from_document({"max_concurrency": 2}).field_of(param) == field


@pytest.mark.parametrize(
    "text",
    [
        "//evil.example", "https://evil.example/ui", "/ui//evil", "/uix", "", "/ui/\\evil", "/ui/\r\nX: y",
        "/v1/models", "/ui/sign-in?next=/ui", "javascript:alert(1)", "/ui/" + "a" * 3000,
    ],
)  # fmt: skip
def test_signing_in_leads_to_our_own_pages_only(text: str) -> None:
    assert safe_next(text) in ("/ui", "/ui//evil")


def test_signing_in_leads_back() -> None:
    assert safe_next("/ui/batches/batch_1?x=1") == "/ui/batches/batch_1?x=1"


def test_a_preview_names_what_a_change_of_clocks_does() -> None:
    # America/New_York, Saturday 19:00 to 07:00: 13 hours on 31 October 2026.
    opens, closes = 1_793_487_600_000_000, 1_793_534_400_000_000
    one = OpenInterval(opens, closes, "", "", False, "one hour longer: the clocks go back")
    words = in_words(EXAMPLE)
    form = settings_form.from_document(settings_document(EXAMPLE))
    preview = PreviewView(
        words, False, (one, replace(one, closes_us=None, closes_local=None, note="")), 12.4, 2000, None
    )
    shown = preview_values(preview, form, DEPLOYMENT, "", 0)
    first, endless = shown["intervals"]
    assert (first["day"], first["opens"], first["closes"], first["length"]) == (
        "Sat 31 Oct",
        "19:00",
        "Sun 07:00",
        "13 h",
    )
    assert (endless["closes"], endless["length"]) == ("…", "")
    html = page("preview.html", **shown)
    assert "one hour longer: the clocks go back" in html
    assert "12%" in html
    assert "2,000 minutes observed" in html
    assert "later EST" not in html
    assert "This takes longer than usual" in html, "of the batches nothing could be told"


def test_a_window_that_never_opens_is_said_before_it_is_saved() -> None:
    form = settings_form.from_document(settings_document(EXAMPLE))
    preview = PreviewView(in_words(EXAMPLE), False, (), None, 0, None)
    assert "This window never opens" in page("preview.html", **preview_values(preview, form, DEPLOYMENT, "", 0))
    always = preview_values(replace(preview, always=True), form, DEPLOYMENT, "", 0)
    assert "At any time." in page("preview.html", **always)


BATCH = BatchSummary(
    id="batch_" + "a" * 32, workspace_id="ws_a", workspace_name="a", key_id="key_a", key_name="laptop", mine=True,
    mode="gateway", endpoint="/v1/chat/completions", model="m", state="in_progress", status="in_progress", total=100,
    completed=10, failed=0, error_code=None, completion_window_hours=24, retry_limit=0, created_at_us=0,
    in_progress_at_us=0, finalizing_at_us=None, completed_at_us=None, cancel_requested_at_us=None,
    expires_at_us=86_400_000_000, input_file_id="file-1", output_file_id=None, error_file_id=None, running_lines=0,
    waiting_reason="outside_window", outlook=None,
)  # fmt: skip


@pytest.mark.parametrize(
    ("outlook", "said"),
    [
        (Outlook(7200, 10_800, 86_400, False, 24, 500), ["in 1 h", "9 of 10 cases: in 2 h"]),
        (Outlook(80_000, None, 86_400, True, 72, 500), ["could take much longer", "window of 72 h would hold"]),
        (Outlook(None, None, 86_400, True, None, 500), ["Not foreseeable", "Not even the longest completion window"]),
        (None, ["Not known yet"]),
    ],
)  # fmt: skip
def test_a_batch_page_says_when_it_should_end(outlook: Outlook | None, said: list[str]) -> None:
    view = BatchView(replace(BATCH, outlook=outlook), (), (), outlook)
    html = page("batch_live.html", view=view, may_cancel=True, may_read_files=True, now_us=3_600_000_000, visit=None)
    for text in said:
        assert text in html
    assert ("This batch may expire" in html) == (outlook is not None and outlook.at_risk)
    ended = replace(BATCH, outlook=outlook, state="completed", status="completed", completed_at_us=7_200_000_000)
    ended = replace(ended, waiting_reason=None)
    over = page(
        "batch_live.html", view=BatchView(ended, (), (), outlook), may_cancel=True, may_read_files=True,
        now_us=7_300_000_000, visit=None,
    )  # fmt: skip
    assert "Took" in over
    assert "This batch may expire" not in over
    assert "Cancel…" not in over
