"""One scrape over all processes: sums that never fall, gauges that do not outlive their process, valid formats."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from fake_node_process import NodeProcess, Watched
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from frontend.node.exposition import Figures, registry_of, render
from worker.channel.series import Series

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
TEXT = "text/plain;version=0.0.4"
OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,"
    "text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)


def samples(figures: Figures, accept: str = TEXT, own: tuple[Series, ...] = ()) -> Samples:
    body, content_type = render(registry_of(figures, own), accept)
    parse = parse_openmetrics if content_type.startswith("application/openmetrics-text") else parse_text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse(body.decode())
        for sample in family.samples
    }


def counter(value: float, **labels: str) -> Series:
    return Series(name="requests_total", kind="counter", help="Requests.", labels=labels, value=value)


def gauge(value: float, **labels: str) -> Series:
    return Series(name="in_flight", kind="gauge", help="In flight.", labels=labels, value=value)


def histogram(*counts: int, bounds: tuple[float, ...] = (0.001, 1.0)) -> Series:
    return Series(name="wait_seconds", kind="histogram", help="Wait.", bounds=bounds, counts=counts, sum=sum(counts))


def test_mo_03_counters_of_the_dead_stay_and_their_gauges_go() -> None:
    figures = Figures()
    figures.update(1, [counter(5), gauge(20), histogram(1, 2, 3)])
    figures.update(2, [counter(7), gauge(1), histogram(1, 0, 0)])
    assert samples(figures)[("in_flight", ())] == 21
    figures.end(1)
    after = samples(figures)
    assert after[("requests_total", ())] == 12
    assert after[("in_flight", ())] == 1
    assert after[("wait_seconds_count", ())] == 7
    figures.update(3, [counter(0)])
    figures.end(2)
    assert samples(figures)[("requests_total", ())] == 12
    assert ("in_flight", ()) not in samples(figures)


Event = tuple[str, int, int]
EVENTS = st.lists(st.tuples(st.sampled_from(["count", "end", "forget"]), st.integers(0, 3), st.integers(0, 5)))


@given(EVENTS)
def test_mo_03_no_sum_ever_falls(events: list[Event]) -> None:
    figures, totals, next_life = Figures(), dict.fromkeys(range(4), 0), 10
    life_of: dict[int, int] = {}
    expected, last = 0, 0.0
    for what, process, amount in events:
        life = life_of.setdefault(process, next_life)
        next_life += 1
        if what == "count":
            totals[process] += amount
            expected += amount
            figures.update(life, [counter(totals[process]), histogram(totals[process], 0, 0)])
        else:
            # A vanished series (an unloaded model) and a dead process begin again from nothing.
            totals[process] = 0
            if what == "end":
                figures.end(life)
                del life_of[process]
            else:
                figures.update(life, [])
        found = samples(figures)
        value = found.get(("requests_total", ()), 0.0)
        assert value == expected == found.get(("wait_seconds_count", ()), 0.0)
        assert value >= last
        last = value


def test_mo_05_mo_08_histograms_of_processes_add_up_and_are_cumulative() -> None:
    figures = Figures()
    figures.update(1, [histogram(1, 2, 3)])
    figures.update(2, [histogram(10, 20, 30)])
    found = samples(figures)
    assert [found[("wait_seconds_bucket", (("le", le),))] for le in ("0.001", "1.0", "+Inf")] == [11, 33, 66]
    assert found[("wait_seconds_count", ())] == found[("wait_seconds_bucket", (("le", "+Inf"),))]
    assert found[("wait_seconds_sum", ())] == 66


@pytest.mark.parametrize("accept", [TEXT, OPENMETRICS, PROMETHEUS_3, "", "application/openmetrics-text"])
@given(name=st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=12))
def test_mo_08_any_model_name_survives_both_formats(accept: str, name: str) -> None:
    # The parsers split lines as str.splitlines does, which is theirs to mend; real scrapers split at \n only.
    name = "".join(" " if char in "\r\v\f\x1c\x1d\x1e\x85\u2028\u2029" else char for char in name)
    figures = Figures()
    figures.update(1, [counter(1, model=f'"{name}\n\\')])
    found = samples(figures, accept)
    assert [key for key in found if key[0] == "requests_total"] == [
        ("requests_total", (("model", f'"{name}\n\\'),))
    ]  # fmt: skip


@pytest.mark.parametrize(
    "bad",
    [
        Series(name="a b", kind="gauge", help=""),
        Series(name="a", kind="counter", help=""),
        Series(name="a_total", kind="gauge", help=""),
        Series(name="a", kind="summary", help=""),
        Series(name="a", kind="gauge", help="", labels={"a-b": "c"}),
        Series(name="a", kind="histogram", help="", labels={"le": "c"}, bounds=(1.0,), counts=(1, 2)),
        Series(name="a", kind="histogram", help="", bounds=(1.0,), counts=(1,)),
        Series(name="a", kind="histogram", help="", bounds=(2.0, 1.0), counts=(1, 1, 1)),
        Series(name="a", kind="gauge", help="", counts=(1,)),
    ],
)
def test_one_bad_series_costs_no_other(bad: Series) -> None:
    figures = Figures()
    figures.update(1, [bad, counter(3)])
    assert samples(figures) == {("requests_total", ()): 3}
    assert figures.dropped == 1


def test_series_that_cannot_be_added_up_are_counted_as_dropped() -> None:
    figures = Figures()
    figures.update(1, [histogram(1, 1, 1)])
    figures.update(2, [histogram(1, 1, bounds=(5.0,))])
    assert samples(figures)[("wait_seconds_count", ())] == 3
    assert figures.dropped == 1


@pytest.mark.parametrize("accept", ["application/openmetrics-text;version=x.y", "text/plain;version=;escaping=what"])
def test_an_accept_header_nobody_understands_gets_plain_text(accept: str) -> None:
    body, content_type = render(registry_of(Figures(), (gauge(1),)), accept)
    assert content_type.startswith("text/plain; version=")
    assert b"in_flight 1.0" in body


@pytest.mark.process
def test_mo_03_scraping_a_node_across_a_killed_frontend(tmp_path: Path) -> None:
    with NodeProcess(tmp_path, "", "--frontends", "2") as node:
        node.wait_ready()
        code, body, headers = node.get("/metrics", {"Accept": OPENMETRICS, "Accept-Encoding": "gzip"})
        assert code == 200
        assert headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
        assert headers["Content-Encoding"] == "gzip"
        before = flat(parse_openmetrics(gzip.decompress(body).decode()))
        assert before[("frontend_requests_total", (("model", "m"),))] == 20
        assert before[("worker_requests_total", (("model", "m"),))] == 10
        assert before[("frontend_in_flight", (("life", "frontend0-1"),))] == 20
        Watched(node.pid("frontend0")).kill()
        node.wait_line("process.restart name=frontend0")
        _, body, headers = node.get("/metrics")
        assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        after = flat(parse_text(body.decode()))
        assert after[("frontend_requests_total", (("model", "m"),))] >= 20
        assert ("frontend_in_flight", (("life", "frontend0-1"),)) not in after
        assert after[("ringserve_process_restarts_total", (("process", "frontend0"),))] == 1
        assert after[("ringserve_process_restarts_total", (("process", "worker0"),))] == 0
        assert after[("ringserve_process_up", (("process", "worker0"), ("role", "worker")))] == 1
        assert ("ringserve_process_start_time_seconds", (("process", "worker0"), ("role", "worker"))) in after
        assert after[("ringserve_ready", ())] == 1


def flat(families: object) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families  # type: ignore[attr-defined]
        for sample in family.samples
    }


@pytest.mark.process
def test_pages_of_the_metrics_port(tmp_path: Path) -> None:
    with NodeProcess(tmp_path) as node:
        node.wait_ready()
        code, body, headers = node.get("/metrics", method="HEAD")
        assert (code, body) == (200, b"")
        assert int(headers["Content-Length"]) > 100
        assert node.get("/healthz")[:2] == (200, b'{"live":true}')
        assert json.loads(node.get("/readyz")[1]) == {"ready": True, "state": "ready", "reasons": []}
        assert node.get("/readyz", method="HEAD")[:2] == (200, b"")
        assert json.loads(node.get("/status")[1])["models"][0]["name"] == "m"
        code, _, headers = node.get("/metrics", method="POST")
        assert (code, headers["Allow"]) == (405, "GET, HEAD")
        assert node.get("/")[0] == 404
        assert node.get("/metrics", {"Accept-Encoding": "gzip;q=0"})[2].get("Content-Encoding") is None
