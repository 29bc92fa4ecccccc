"""Forecasts in the answers of the Batches API, as the official SDK sees them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from live_gateway import LiveGateway, live_gateway
from test_batches_api import create, line, put

from frontend.batches.prospects import Prospects, forecast_document, warning
from frontend.batches.scheduling.outlook import Outlook
from frontend.batches.store.errors import StoreUnavailable
from frontend.batches.store.route_rows import MinuteRow
from frontend.batches.store.rows import BatchRow

MINUTE_US = 60_000_000


@pytest.fixture(params=["sqlite", "postgresql"])
def measured(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LiveGateway]:
    """A gateway whose routes took ten minutes a line for the last hours (r) and an hour a line (r2)."""
    store = "" if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    with live_gateway(tmp_path, store=store) as running:
        now = running.run(running.store.now_us()) // MINUTE_US
        rows = [
            MinuteRow(
                route, now - ago, cap=2, open_us=MINUTE_US, observed_us=MINUTE_US, lines_done=2,
                line_s_sum=2 * line_s, line_s_sq_sum=2 * line_s**2,
            )
            for ago in range(200)
            for route, line_s in (("r", 600.0), ("r2", 3600.0))
        ]  # fmt: skip
        running.run(running.store.explain.add_minutes(rows))
        yield running


def lines(*counts: tuple[str, int]) -> bytes:
    return b"".join(line(f"{model}{i}", model) for model, count in counts for i in range(count))


def test_a_create_says_when_the_batch_is_expected_to_end(measured: LiveGateway) -> None:
    client = measured.client()
    batch = create(client, put(client, lines(("m", 20))))
    forecast = batch.model_extra["forecast"]
    # 10 minutes a line, 2 at once.
    assert forecast["eta_p50"] - time.time() == pytest.approx(6000, rel=0.15)
    assert forecast["eta_p90"] >= forecast["eta_p50"]
    assert forecast["at_risk"] is False
    assert forecast["warning"] is None
    assert forecast["suggested_completion_window"] == "24h"
    # What the SDK knows is as it was.
    assert batch.object == "batch"
    assert batch.status == "validating"
    assert batch.request_counts.total == 20
    client.batches.cancel(batch.id)


def test_a_create_whose_window_will_not_hold_says_which_one_would(measured: LiveGateway) -> None:
    client = measured.client()
    batch = create(client, put(client, lines(("m", 400))))
    forecast = batch.model_extra["forecast"]
    assert forecast["at_risk"] is True
    assert forecast["suggested_completion_window"] == "48h"
    assert "a completion window of 48h would hold" in forecast["warning"]
    client.batches.cancel(batch.id)
    measured.forecaster._picture = None
    longer = create(client, put(client, lines(("m", 400))), completion_window="48h")
    assert longer.model_extra["forecast"]["at_risk"] is False
    client.batches.cancel(longer.id)


def test_a_batch_of_two_models_ends_with_the_slower_route(measured: LiveGateway) -> None:
    client = measured.client()
    batch = create(client, put(client, lines(("m", 20), ("n", 20))))
    assert batch.model_extra["forecast"]["eta_p50"] - time.time() == pytest.approx(10.5 * 3600, rel=0.15)
    client.batches.cancel(batch.id)


def test_an_unfinished_batch_is_shown_with_its_forecast_and_an_ended_one_without(measured: LiveGateway) -> None:
    client = measured.client()
    batch = create(client, put(client, lines(("m", 10))))

    async def looked() -> None:
        measured.forecaster._picture = None
        await measured.forecaster.all()

    measured.run(looked())
    shown: Any = client.batches.retrieve(batch.id)
    assert shown.model_extra["forecast"]["measured_lines"] > 0
    client.batches.cancel(batch.id)
    measured.run(looked())
    assert not client.batches.retrieve(batch.id).model_extra
    assert all(not one.model_extra for one in client.batches.list().data)


def test_nothing_measured_claims_nothing(tmp_path: Path) -> None:
    with live_gateway(tmp_path) as running:
        client = running.client()
        batch = create(client, put(client, lines(("m", 400))))
        assert not batch.model_extra


def row(**changes: Any) -> BatchRow:
    values: dict[str, Any] = dict.fromkeys(BatchRow.__dataclass_fields__)
    return BatchRow(**values | {"id": "b", "endpoint": "/v1/x", "completion_window_hours": 24} | changes)


AT_RISK = Outlook(1_780_387_200, 1_780_394_400, 1_780_387_200, True, 72, 10)


def test_the_warning_in_words() -> None:
    assert warning(row(), AT_RISK) == (
        "the batch may expire before it is done: in 9 of 10 cases it ends by 2026-06-02 10:00 UTC, and its window of"
        " 24h is over at 2026-06-02 08:00 UTC; a completion window of 72h would hold"
    )
    never = warning(row(), replace(AT_RISK, eta_p90=None, window_hours=None))
    assert "it ends later than can be foreseen" in never
    assert never.endswith("no completion window would hold")
    assert forecast_document(row(), replace(AT_RISK, at_risk=False))["warning"] is None


class Forecasts:
    """Answers ``outlook``, raises it, or never answers."""

    def __init__(self, outlook: Outlook | Exception | None = AT_RISK) -> None:
        self.outlook = outlook
        self.asked: list[Mapping[str, int]] = []

    async def all(self) -> Mapping[str, Outlook]:
        raise AssertionError

    async def of(self, batch_id: str) -> Outlook | None:
        if self.outlook is None:
            await asyncio.Event().wait()
        if isinstance(self.outlook, Exception):
            raise self.outlook
        return self.outlook

    async def would(self, batch: BatchRow, lines: Mapping[str, int]) -> Outlook | None:
        self.asked.append(lines)
        return await self.of(batch.id)

    def route_of(self, endpoint: str, model: str) -> str:
        return {"a": "R", "b": "R", "c": "S"}.get(model, "")


@pytest.mark.parametrize("trouble", [None, StoreUnavailable("gone"), ValueError("a mistake")])
def test_a_forecast_that_cannot_be_had_is_left_out(trouble: Exception | None, caplog: pytest.LogCaptureFixture) -> None:
    prospects = Prospects(Forecasts(trouble), patience_s=0.01)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO):
        assert asyncio.run(prospects.of(row())) is None
        assert asyncio.run(prospects.of_new(row(), {"a": 1})) is None
    assert "forecast" in caplog.text


def test_models_of_one_route_count_together_and_an_unknown_one_is_no_forecast() -> None:
    forecasts = Forecasts()
    prospects = Prospects(forecasts)  # type: ignore[arg-type]
    assert asyncio.run(prospects.of_new(row(), {"a": 1, "b": 2, "c": 4})) is not None
    assert forecasts.asked == [{"R": 3, "S": 4}]
    assert asyncio.run(prospects.of_new(row(), {"a": 1, "gone": 2})) is None
    assert asyncio.run(prospects.of(row(completed_at=1))) is None
