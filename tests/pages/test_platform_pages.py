"""Incidents, changes and workspaces over plain HTTP, the form that does not overwrite, routes that are gone."""

from __future__ import annotations

import json
import re
from html import unescape

import pytest
from http_visitor import Answer, Visitor
from pages_world import BASE, PagesWorld, Scene, furnish

from frontend.batches.scheduling.outlook import Outlook
from frontend.batches.store.route_rows import AuditRow
from frontend.openai.principal import Principal, Role
from frontend.platform.pages.change_words import change_text
from frontend.platform.pages.effect_words import effect_text
from frontend.platform.pages.incident_words import incident_text
from frontend.platform.read_models import AuditView, BatchEffect, IncidentView

READERS, OTHERS = ("ana", "audit"), ("lead", "notebook")
PAGES = ("/ui/incidents", "/ui/incidents?status=past", "/ui/changes", "/ui/workspaces")
NOW_US = 1_800_000_000_000_000


@pytest.fixture(scope="module")
def scene(world: PagesWorld) -> Scene:
    found = furnish(world)
    ana = Principal("ws_research", world.keys["ana"].id, Role.PLATFORM_ADMIN)
    changes = world.service.platform.changes
    world.run(changes.put_settings(ana, "cloud", {"max_concurrency": 4}))
    world.run(changes.put_settings(ana, "spare", {"max_concurrency": 5}))
    audit = world.service.door.store.scheduling.audit
    old = '{"max_concurrency": 7, "yield_live_threshold": null, "server_metrics": true, "priority": 3, "window": false}'
    world.run(audit(AuditRow("batch_scheduling.updated", None, "key_gone", "own", old)))
    world.run(audit(AuditRow("batch.cancelled", "ws_home-ana", ana.key_id, "batch_of_hobby", '{"state": "queued"}')))
    return found


def visitor(world: PagesWorld, name: str) -> Visitor:
    found = Visitor(world.port).sign_in(world.keys[name].secret)
    found.get("/ui/batches")  # for the form token
    return found


def text(answer: Answer) -> str:
    main = answer.body.partition("<main")[2]
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", main)))


# Who sees them


@pytest.mark.usefixtures("scene")
def test_platform_roles_see_these_pages_and_nobody_else(world: PagesWorld) -> None:
    for name in READERS:
        one = visitor(world, name)
        assert all(f'href="/ui/{place}"' in one.seen[-1].body for place in ("incidents", "workspaces", "changes"))
        assert [one.get(path).status for path in PAGES] == [200] * len(PAGES)
        assert one.get("/ui/incidents/x").status == one.get("/ui/changes/x").status == 404
    for name in OTHERS:
        one = visitor(world, name)
        assert 'href="/ui/incidents"' not in one.seen[-1].body
        assert [one.get(path).status for path in PAGES] == [403] * len(PAGES)


# Incidents


def test_an_open_incident_says_what_raised_it_and_leads_to_its_batch(world: PagesWorld, scene: Scene) -> None:
    page = visitor(world, "audit").get("/ui/incidents")
    shown = text(page)
    assert "has made no progress for 61 minutes" in shown
    assert "The rule fires after 1 h without progress" in shown and "12 of 300 lines were done." in shown
    assert f'href="/ui/batches/{scene["broken"].id}"' in page.body
    assert scene["running"].id not in page.body, "that one has ended"
    assert "of a personal workspace" in shown and page.body.count('class="mono" href="/ui/batches/') == 1
    assert "data-live" not in visitor(world, "audit").get("/ui/incidents/-live").body


def test_a_past_incident_says_what_ended_it(world: PagesWorld, scene: Scene) -> None:
    page = visitor(world, "ana").get("/ui/incidents?status=past")
    assert "The batch went on: lines of it ended again." in text(page) and "lasted" in text(page)
    assert scene["running"].id in page.body and scene["broken"].id not in page.body
    assert "No more incidents" in text(visitor(world, "ana").get("/ui/incidents?status=past&page=7"))


def incident(**details: object) -> IncidentView:
    done = NOW_US if "ended_by" in details else None
    return IncidentView("i", "r", "b", None, None, False, "s", json.dumps(details), NOW_US - 1, done)


@pytest.mark.parametrize(
    ("details", "said"),
    [
        ({"ended_by": "batch_ended", "ended_state": "completed"}, "The batch ended: completed."),
        ({"ended_by": "batch_ended"}, "The batch ended."),
        ({"ended_by": "on_time"}, "The forecast has room to spare again."),
        ({"ended_by": "day_passed"}, "A day had passed: a failed batch is shown for 24 hours."),
        ({"ended_by": "of a newer version"}, "What raised it is over."),
        ({}, ""),
    ],
)
def test_every_end_has_words(details: dict[str, object], said: str) -> None:
    assert incident_text(incident(**details)).ended == said


def test_what_was_forecast_is_said_with_its_times() -> None:
    risk = {"kind": "batch_at_risk", "eta_p50": 1, "eta_p90": 1_800_009_000, "expires_at": 1_800_000_600}
    told = incident_text(incident(**risk, suggested_completion_window="48h"))
    assert told.kind == "May expire"
    (before, end, between, expires, dot), window = told.raised
    assert (before, between, dot) == ("In 9 of 10 cases it would end by ", "; its window is over at ", ".")
    assert (end.at_us, expires.at_us) == (1_800_009_000_000_000, 1_800_000_600_000_000)  # type: ignore[union-attr]
    assert window == ("A completion window of 48h would hold.",)
    never = incident_text(incident(**{**risk, "eta_p90": None}, suggested_completion_window=None))
    assert never.raised[0][0] == "In 9 of 10 cases it would end later than can be foreseen; its window is over at "
    assert never.raised[1] == ("No completion window would hold.",)


# Changes


@pytest.mark.usefixtures("scene")
def test_changes_are_listed_with_before_and_after_and_narrowed_by_route(world: PagesWorld) -> None:
    one = visitor(world, "audit")
    saved = text(one.get("/ui/changes?what=batch_scheduling.updated"))
    assert "before: 2 at once → after: 4 at once" in saved and "after: 5 at once" in saved
    cancelled = one.get("/ui/changes?what=batch.cancelled")
    assert "batch_of_hobby Batch cancelled" in text(cancelled)
    assert 'href="/ui/batches/batch_of_hobby"' not in cancelled.body, "it is of a personal workspace"
    only = one.get("/ui/changes?route=cloud&what=batch_scheduling.updated")
    assert "after: 4 at once" in text(only) and "after: 5 at once" not in text(only)
    assert "<option selected>cloud</option>" in only.body
    assert "key ana" in text(only)
    for nothing in ("route=gpu-b", "route=%00", "before=1", "route=own&what=batch.cancelled"):
        answer = one.get(f"/ui/changes?{nothing}")
        assert answer.status == 200
    assert "Nobody has changed anything like that." in text(one.get("/ui/changes?route=never"))


def test_a_row_of_an_older_version_says_what_was_saved() -> None:
    details = json.dumps({"max_concurrency": 7, "yield_live_threshold": None, "server_metrics": True, "window": False})
    told = change_text(AuditView(1, 0, "batch_scheduling.updated", None, None, None, "own", details))
    assert [(one.title, one.before, one.after) for one in told.differences] == [
        ("Batch lines at once", None, "7"),
        ("Yield to live traffic", None, "Off"),
        ("Server load signal", None, "On"),
        ("Time window", None, "Off"),
    ]
    same = change_text(AuditView(1, 0, "batch_scheduling.updated", None, None, None, "own", '{"changes": {}}'))
    assert (same.differences, same.note) == ((), "Saved without a change.")
    unknown = change_text(
        AuditView(1, 0, "new.thing", None, None, None, "x", '{"changes": {"a_b": {"before": "1", "after": "2"}}}')
    )
    assert (unknown.action, unknown.differences[0].title) == ("new.thing", "A b")


@pytest.mark.usefixtures("scene")
def test_older_changes_are_pages_away(world: PagesWorld) -> None:
    audit = world.service.door.store.scheduling.audit
    for at in range(35):
        world.run(audit(AuditRow("x.y", None, None, "filler", json.dumps({"changes": {}, "at": at}))))
    one = visitor(world, "ana")
    first_page = one.get("/ui/changes?route=filler")
    assert first_page.body.count('class="card entry"') == 30
    older = re.search(r'href="(/ui/changes\?route=filler&amp;before=\d+)"', first_page.body)
    assert older is not None
    second = one.get(older[1].replace("&amp;", "&"))
    assert second.body.count('class="card entry"') == 5 and "Newest" in second.body


# Workspaces


@pytest.mark.usefixtures("scene")
def test_weights_are_saved_by_admins_and_a_mistake_stands_at_its_place(world: PagesWorld) -> None:
    one = visitor(world, "ana")
    assert 'action="/ui/workspaces/ws_sales"' in one.get("/ui/workspaces").body
    saved = one.post("/ui/workspaces/ws_sales", {"weight": "3"})
    assert (saved.status, saved.location) == (303, "/ui/workspaces?saved=ws_sales")
    assert "Saved: sales has weight 3 from its next line on." in text(one.get(saved.location))
    for wrong in ("0", "101", "much", "", "-1", "9" * 15):
        refused = one.post("/ui/workspaces/ws_sales", {"weight": wrong, "page": "nonsense"})
        assert refused.status == 400
        assert "Nothing was saved. Expected a whole number from 1 to 100." in text(refused)
        assert f'value="{wrong}"' in refused.body
    assert world.run(world.service.door.store.scheduling.weights()) == {"ws_sales": 3}
    assert one.post("/ui/workspaces/ws_none", {"weight": "3"}).status == 404
    assert "before: 1 → after: 3" in text(one.get("/ui/changes?what=batch_weight.updated"))


@pytest.mark.usefixtures("scene")
def test_auditors_read_weights_and_change_none(world: PagesWorld) -> None:
    auditor = visitor(world, "audit")
    page = auditor.get("/ui/workspaces")
    assert "research" in text(page) and 'name="weight"' not in page.body
    assert auditor.post("/ui/workspaces/ws_research", {"weight": "9"}).status == 403
    assert world.run(world.service.door.store.scheduling.weights()).get("ws_research") is None


# Settings that somebody else changes meanwhile


@pytest.mark.usefixtures("scene")
def test_a_form_does_not_overwrite_what_others_saved_since_it_was_opened(world: PagesWorld) -> None:
    mine, theirs = visitor(world, "ana"), visitor(world, "ana")
    version = re.compile(r'name="version" value="(\w+)"')

    def opened(one: Visitor) -> str:
        found = version.search(one.get("/ui/routes/spare/edit").body)
        assert found is not None
        return found[1]

    seen = opened(mine)
    fields: dict[str, str | list[str]] = {"cap": "fixed", "max_concurrency": "9", "do": "save"}
    assert (
        theirs.post("/ui/routes/spare/edit", {**fields, "max_concurrency": "8", "version": opened(theirs)}).status
        == 303
    )
    refused = mine.post("/ui/routes/spare/edit", {**fields, "version": seen})
    assert refused.status == 412
    assert "Nothing was saved: key ana changed these settings" in text(refused)
    assert "in force now: 8 at once in this form: 9 at once" in text(refused)
    assert 'name="max_concurrency" value="9"' in refused.body, "what was typed is still there"
    assert world.run(world.service.platform.views.route_view("spare")).settings.max_concurrency == 8
    now = version.search(refused.body)
    assert now is not None and now[1] != seen
    assert mine.post("/ui/routes/spare/edit", {**fields, "version": now[1]}).status == 303
    assert world.run(world.service.platform.views.route_view("spare")).settings.max_concurrency == 9
    # Without a version, as a script might post it, the last one wins.
    assert mine.post("/ui/routes/spare/edit", fields).status == 303


@pytest.mark.usefixtures("scene")
def test_a_route_that_is_gone_can_be_read(world: PagesWorld) -> None:
    one = visitor(world, "ana")
    assert 'href="/ui/routes/decommissioned"' in one.get("/ui/routes").body
    page = one.get("/ui/routes/decommissioned")
    assert page.status == 200 and "Nothing runs on this route" in text(page) and "3 at once" in text(page)
    assert "/edit" not in page.body and 'id="live"' not in page.body
    for answer in (
        one.get("/ui/routes/decommissioned/edit"),
        one.post("/ui/routes/decommissioned/edit", {"cap": "fixed", "max_concurrency": "2", "do": "save"}),
        one.post("/ui/routes/decommissioned/preview", {"cap": "fixed", "max_concurrency": "2"}),
    ):
        assert answer.status == 409 and "not configured any more" in answer.body
    assert one.get("/ui/routes/never").status == 404


# When batches would end


def outlook(p50_s: int | None, p90_s: int | None = None, *, at_risk: bool = False, lines: int = 99) -> Outlook:
    now_s = NOW_US // 1_000_000
    ends = (None if end is None else now_s + end for end in (p50_s, p90_s))
    return Outlook(next(ends), next(ends), 0, at_risk, None, lines)


@pytest.mark.parametrize(
    ("now", "then", "words", "verdict"),
    [
        (outlook(12_000, 14_400), outlook(6_000, 7_200), "in 1 h 40 min (9 of 10: 2 h)", ("1 h 40 min sooner", "good")),
        (outlook(600, 700), outlook(4200, None), "in 1 h 10 min (9 of 10: not foreseeable)", ("1 h later", "wait")),
        (outlook(6_000, 7_200), outlook(6_100, 7_200), "in 1 h 41 min (9 of 10: 2 h)", ("unchanged", "calm")),
        (outlook(6_000, 7_200), outlook(None), "not foreseeable", ("later", "fault")),
        (outlook(None), outlook(60, 120), "in 1 min (9 of 10: 2 min)", ("sooner", "good")),
        (outlook(None), outlook(None), "not foreseeable", ("unchanged", "calm")),
        (outlook(None, lines=0), outlook(None, lines=0), "not known yet", ("", "calm")),
    ],
)  # fmt: skip
def test_what_would_change_for_a_batch_has_words(
    now: Outlook, then: Outlook, words: str, verdict: tuple[str, str]
) -> None:
    told = effect_text(BatchEffect("b", "team", "m", now, then), NOW_US)
    assert (told.then, (told.verdict, told.tone)) == (words, verdict)


def test_the_preview_says_when_waiting_batches_would_end(world: PagesWorld, scene: Scene) -> None:
    one = visitor(world, "ana")
    world.publish()
    fields: dict[str, str | list[str]] = {"cap": "fixed", "max_concurrency": "8", "yield_live_threshold": "2"}

    def shown() -> str:
        world.publish()
        return one.post(
            "/ui/routes/gpu-a/preview", {**fields, "metrics_url": f"{BASE}/metrics", "max_waiting": "0"}
        ).body

    found = next((body for body in (shown() for _ in range(20)) if "data-again" not in body), "")
    assert scene["waiting"].id in found and "llama-70b · research" in found
    assert re.search(r"<dt>Now</dt><dd>in \d", found) and re.search(r"<dt>Then</dt><dd>in \d", found)
    assert "No batch waits for this route." in next(
        body for body in (one.post("/ui/routes/cloud/preview", {**fields}).body for _ in range(20))
        if "data-again" not in body
    )  # fmt: skip
