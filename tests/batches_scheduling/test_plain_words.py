"""What people read: settings, windows, what the clocks do to them, readings."""

from __future__ import annotations

import pytest
from window_scan import text, us, window

from frontend.batches.scheduling.load_limits import ReadError, Reading
from frontend.batches.scheduling.plain_words import (
    InWords,
    in_words,
    length_in_words,
    notes_in_words,
    reading_in_words,
    window_in_words,
)
from frontend.batches.scheduling.window_state import MINUTE_US, NoteKind, intervals
from frontend.batches.store.rows import SchedulingRow


def test_rule_84_the_example_of_the_page() -> None:
    url = "http://10.0.0.5:8000/metrics"
    row = SchedulingRow("r", 4, 2, url, 0, None, 90, 10, "America/New_York", 0b11111, 1140, 420)
    assert in_words(row) == InWords(
        concurrency="4 at once",
        live_traffic="Pause while live requests ≥ 2",
        server_load="Pause if waiting > 0 or KV cache > 90%",
        metrics_url=url,
        window="Mon–Fri 19:00–07:00 (America/New_York)",
        priority="10",
    )


def test_rule_84_defaults() -> None:
    assert in_words(SchedulingRow("r")) == InWords("2 at once", "Off", "Off", "Off", "Any time", "Off")


@pytest.mark.parametrize(("share", "words"), [(None, "20%"), (35, "35%")])
def test_a_cap_that_adapts(share: int | None, words: str) -> None:
    row = SchedulingRow("r", 16, min_concurrency=2, latency_share_percent=share)
    assert in_words(row).concurrency == f"2 to 16 at once, while live p95 is at most {words} above its baseline"


def test_a_gate_that_waits_for_more_calls() -> None:
    row = SchedulingRow("r", yield_live_threshold=1, reopen_after_s=10)
    assert in_words(row).live_traffic == "Pause while live requests ≥ 1, and for up to 10 s after them"


@pytest.mark.parametrize(
    ("days", "times", "words"),
    [
        ("mon-sun", "22:30-05:30", "Every day 22:30–05:30 (UTC)"),
        ("mon", "00:00-00:01", "Mon 00:00–00:01 (UTC)"),
        ("sat sun", "08:00-08:00", "Sat–Sun all day (UTC)"),
        ("mon wed thu sun", "01:00-02:00", "Mon, Wed–Thu, Sun 01:00–02:00 (UTC)"),
    ],
)
def test_windows(days: str, times: str, words: str) -> None:
    assert window_in_words(window("UTC", days, times)) == words


FORWARD, BACK = (
    "the clocks go forward on Sun 29 Mar from 01:00 to 02:00",
    "the clocks go back on Sun 25 Oct from 02:00 to 01:00",
)


@pytest.mark.parametrize(
    ("days", "times", "at", "expected"),
    [
        ("sat", "22:00-06:00", "2026-03-28 00:00", [("2026-03-28 22:00", f"1 h shorter: {FORWARD}")]),
        ("sat", "22:00-06:00", "2026-10-24 00:00", [("2026-10-24 21:00", f"1 h longer: {BACK}")]),
        ("sun", "00:30-01:30", "2026-03-28 00:00", [("2026-03-29 00:30", f"30 min shorter: {FORWARD}")]),
        ("sun", "01:00-02:00", "2026-03-28 00:00",
         [("2026-04-05 00:00", f"does not open on Sun 29 Mar: {FORWARD}")]),
        ("sun", "01:30-02:30", "2026-10-24 00:00",
         [("2026-10-25 00:30", f"opens twice: {BACK}"), ("2026-10-25 01:30", f"opens twice: {BACK}"),
          ("2026-11-01 01:30", None)]),
        ("sun", "01:30-02:30", "2026-10-25 00:45",
         [("2026-10-25 00:45", f"opens twice: {BACK}"), ("2026-10-25 01:30", f"opens twice: {BACK}")]),
        ("sat", "22:00-06:00", "2026-10-25 03:00", [("2026-10-25 03:00", f"1 h longer: {BACK}")]),
        ("sat", "20:00-22:00", "2026-10-25 03:00", [("2026-10-31 20:00", None)]),
        ("mon-sun", "00:00-00:00", "2026-10-24 03:00", [("2026-10-24 03:00", None)]),
        ("sun", "01:00-02:00", "2026-03-29 01:00", [("2026-04-05 00:00", f"does not open on Sun 29 Mar: {FORWARD}")]),
        ("sun", "01:00-02:00", "2026-03-29 01:01", [("2026-04-05 00:00", None)]),
    ],
)  # fmt: skip
def test_what_the_clocks_do_to_intervals(
    days: str, times: str, at: str, expected: list[tuple[str, str | None]]
) -> None:
    found = intervals(window("Europe/London", days, times), us(at), len(expected))
    assert [(text(one.opens_us), notes_in_words(one)) for one in found] == expected


def test_changes_that_lead_to_another_day() -> None:
    (one,) = intervals(window("Africa/Cairo", "fri", "00:00-02:00"), us("2026-04-22 00:00"), 1)
    assert notes_in_words(one) == "1 h shorter: the clocks go forward on Fri 24 Apr from 00:00 to 01:00"
    (one,) = intervals(window("Pacific/Apia", "fri", "09:00-17:00"), us("2011-12-28 00:00"), 1)
    change = "the clocks go forward on Fri 30 Dec from 00:00 to Sat 31 Dec 00:00"
    assert notes_in_words(one) == f"does not open on Fri 30 Dec: {change}"


def test_most_intervals_have_no_note() -> None:
    found = intervals(window("Europe/London", "mon-fri", "19:00-07:00"), us("2026-01-05 00:00"), 260)
    noted = {note.kind for one in found for note in one.notes}
    # Changes of the clocks are on Sunday mornings, when this window is closed.
    assert noted == set()
    nights = intervals(window("Europe/London", "mon-sun", "19:00-07:00"), us("2026-01-05 00:00"), 360)
    kinds = [(note.kind, note.difference_us // MINUTE_US) for one in nights for note in one.notes]
    assert kinds == [(NoteKind.SHORTER, -60), (NoteKind.LONGER, 60)]


@pytest.mark.parametrize(
    ("minutes", "words"), [(0, "0 min"), (30, "30 min"), (60, "1 h"), (90, "1 h 30 min"), (1500, "25 h")]
)
def test_lengths(minutes: int, words: str) -> None:
    assert length_in_words(minutes * MINUTE_US) == words


@pytest.mark.parametrize(
    ("reading", "words"),
    [
        (Reading(0, 0, None, 3, 1, 913), "3 waiting · 1 running · KV cache 91.3%"),
        (Reading(0, 0, None, 3, 1, 900), "3 waiting · 1 running · KV cache 90%"),
        (Reading(0, 0, None, 1200), "1,200 waiting"),
        (Reading(0, 0), "None of the gauges is there"),
        (Reading(0, 0, ReadError.HTTP_STATUS), "Unavailable (http status) · treated as busy"),
    ],
)
def test_readings(reading: Reading, words: str) -> None:
    assert reading_in_words(reading) == words
