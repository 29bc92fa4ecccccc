"""The pages over plain HTTP: who may see and change what, which requests are believed, what every answer forbids."""

from __future__ import annotations

import re
import secrets

import pytest
from http_visitor import Visitor
from pages_world import BULK, HOME, PagesWorld, Scene

from frontend.batches.store.rows import Demand
from frontend.platform.pages import sessions

pytestmark = pytest.mark.usefixtures("scene")
SETTINGS = {"cap": "fixed", "max_concurrency": "6", "do": "save"}
PLATFORM, WORKSPACE = ("ana", "audit"), ("lead", "notebook", "crm")
EVERYBODY = (*PLATFORM, *WORKSPACE)


def visitor(world: PagesWorld, name: str) -> Visitor:
    found = Visitor(world.port).sign_in(world.keys[name].secret)
    found.get("/ui/batches")  # for the form token
    return found


# Signing in


def test_strangers_are_led_to_the_sign_in_and_back(world: PagesWorld) -> None:
    stranger = Visitor(world.port)
    answer = stranger.get("/ui/routes/gpu-a?hours=6")
    assert (answer.status, answer.location) == (303, "/ui/sign-in?next=%2Fui%2Froutes%2Fgpu-a%3Fhours%3D6")
    assert stranger.get("/ui").location == "/ui/sign-in"
    page = stranger.get(answer.location)
    assert 'name="next" value="/ui/routes/gpu-a?hours=6"' in page.body
    done = stranger.post("/ui/sign-in", {"key": world.keys["ana"].secret, "next": "/ui/routes/gpu-a?hours=6"})
    assert (done.status, done.location) == (303, "/ui/routes/gpu-a?hours=6")


def test_the_cookie_can_be_read_by_no_script_and_is_sent_by_no_other_site(world: PagesWorld) -> None:
    plain = Visitor(world.port).post("/ui/sign-in", {"key": world.keys["ana"].secret}).headers["Set-Cookie"]
    assert re.fullmatch(r"ringserve_session=\S+; Path=/; Max-Age=7200; HttpOnly; SameSite=Lax", plain)
    behind_tls = Visitor(world.port, host="pages.example")
    answer = behind_tls.post(
        "/ui/sign-in", {"key": world.keys["ana"].secret}, {"Origin": "https://pages.example"}
    )  # fmt: skip
    assert re.fullmatch(
        r"__Host-ringserve_session=\S+; Path=/; Max-Age=7200; HttpOnly; SameSite=Lax; Secure",
        answer.headers["Set-Cookie"],
    )
    assert behind_tls.get("/ui/batches").status == 200
    assert world.keys["ana"].secret not in plain


@pytest.mark.parametrize("key", ["", "nonsense", "sk-ring-" + "a" * 43, "\x00", "ключ"])
def test_a_wrong_key_signs_nobody_in(world: PagesWorld, key: str) -> None:
    answer = Visitor(world.port).post("/ui/sign-in", {"key": key})
    assert answer.status == 401
    assert 'aria-invalid="true"' in answer.body
    assert "Set-Cookie" not in answer.headers
    assert not key or key not in answer.body


def test_two_cookies_are_nobodys(world: PagesWorld) -> None:
    one = visitor(world, "ana")
    one.cookie += "; ringserve_session=planted"
    assert one.get("/ui/routes").status == 303


def test_signing_out_ends_a_copied_cookie_too(world: PagesWorld) -> None:
    one = visitor(world, "ana")
    copied = one.cookie
    assert one.get("/ui/sign-out").status == 405
    done = one.post("/ui/sign-out", {})
    assert (done.status, done.location) == (303, "/ui/sign-in?out=1")
    assert "Max-Age=0" in done.headers["Set-Cookie"]
    assert Visitor(world.port, copied).get("/ui/routes").status == 303
    assert "You are signed out" in one.get(done.location).body


def test_a_revoked_key_ends_its_sessions(world: PagesWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "REMEMBER_S", 0.0)
    holder = world.new_key("short", "auditor", "research")
    one = Visitor(world.port).sign_in(holder.secret)
    assert one.get("/ui/routes").status == 200
    world.run(world.service.door.store.keys.revoke_key(holder.id))
    assert one.get("/ui/routes").status == 303


def test_what_a_page_fetches_by_itself_is_told_that_it_is_over(world: PagesWorld) -> None:
    answer = Visitor(world.port).get("/ui/routes/gpu-a/live", {"X-Live": "1"})
    assert (answer.status, answer.body) == (401, "signed out")


# Requests that are not believed


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "null", "", "http://127.0.0.1:1", "http://u@{host}", "http://{host}/ui", "ftp://{host}"],
)
def test_forms_of_other_origins_change_nothing(world: PagesWorld, origin: str) -> None:
    one = visitor(world, "ana")
    before = world.run(world.service.platform.views.route_view("cloud"))
    answer = one.post("/ui/routes/cloud/edit", {**SETTINGS}, {"Origin": origin.format(host=one.host)})
    assert answer.status == 403
    assert "nothing was changed" in answer.body
    assert Visitor(world.port).post(
        "/ui/sign-in", {"key": world.keys["ana"].secret}, {"Origin": origin.format(host=one.host)}
    ).status == 403  # fmt: skip
    assert world.run(world.service.platform.views.route_view("cloud")).settings == before.settings


def test_forms_without_the_sessions_token_change_nothing(world: PagesWorld) -> None:
    one, other = visitor(world, "ana"), visitor(world, "ana")
    assert one.form_token != other.form_token
    for token in ("", "0" * 64, other.form_token):
        answer = one.post("/ui/routes/cloud/edit", {**SETTINGS, "form_token": token}, token=False)
        assert answer.status == 403
    assert one.post("/ui/routes/cloud/edit", {**SETTINGS}, token=False).status == 403
    assert one.post("/ui/sign-out", {}, token=False).status == 403
    assert one.get("/ui/routes").status == 200
    assert not world.run(world.service.platform.views.route_view("cloud")).stored


def test_a_get_changes_nothing(world: PagesWorld, scene: Scene) -> None:
    one = visitor(world, "ana")
    one.get(f"/ui/routes/cloud/edit?max_concurrency=9&do=save&form_token={one.form_token}")
    one.get(f"/ui/batches/{scene['running'].id}/cancel?form_token={one.form_token}")
    assert not world.run(world.service.platform.views.route_view("cloud")).stored
    assert world.data.get(scene["running"]).cancel_requested_at is None


@pytest.mark.parametrize(
    ("content_type", "body", "status"),
    [
        ("application/json", b"{}", 400),
        ("text/plain", b"a=b", 400),
        ("application/x-www-form-urlencoded", b"a=%ff", 400),
        ("application/x-www-form-urlencoded", b"&".join(b"a=1" for _ in range(200)), 400),
        ("application/x-www-form-urlencoded", b"a" * 70_000, 413),
    ],
)
def test_what_is_no_form_is_refused(world: PagesWorld, content_type: str, body: bytes, status: int) -> None:
    one = visitor(world, "ana")
    headers = {"Origin": one.origin, "Content-Type": content_type}
    assert one.send("POST", "/ui/routes/cloud/edit", body, headers).status == status


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS"])
def test_other_methods_are_refused(world: PagesWorld, method: str) -> None:
    answer = visitor(world, "ana").get("/ui/routes", method=method)
    assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD, POST")


# What every answer says


def test_every_answer_forbids_what_pages_do_not_need(world: PagesWorld, scene: Scene) -> None:
    one = visitor(world, "ana")
    asset = re.search(r'href="(/ui/assets/pages\.[0-9a-f]{12}\.css)"', one.get("/ui/routes").body)
    assert asset
    done = f"/ui/batches/{scene['done'].id}"
    for path in (
        "/ui", "/ui/routes", "/ui/routes/gpu-a", "/ui/routes/gpu-a/edit", "/ui/batches", done, f"{done}/output",
        "/ui/nothing", "/ui/routes/none", "/ui/assets/none.css", "/ui/sign-in", asset[1], "/ui/routes/gpu-a/live",
    ):  # fmt: skip
        answer = one.get(path)
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy, path
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Referrer-Policy"] == "same-origin"
        assert ("immutable" if path == asset[1] else "no-store") in answer.headers["Cache-Control"], path


def test_pages_hold_no_inline_script_or_style(world: PagesWorld, scene: Scene) -> None:
    one = visitor(world, "ana")
    for path in ("/ui/routes", "/ui/routes/gpu-a", "/ui/routes/gpu-a/edit", f"/ui/batches/{scene['mixed'].id}"):
        body = one.get(path).body
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:", body), path
        assert re.findall(r"<script[^>]*>", body) == re.findall(r'<script src="/ui/assets/[^"]+" defer>', body)


def test_assets_are_named_by_their_content(world: PagesWorld) -> None:
    stranger = Visitor(world.port)
    names = re.findall(r'"/ui/assets/([^"]+)"', stranger.get("/ui/sign-in").body)
    assert len(names) == 3
    for name in names:
        assert stranger.get(f"/ui/assets/{name}").status == 200
        wrong = re.sub(r"\.[0-9a-f]{12}\.", f".{secrets.token_hex(6)}.", name)
        assert stranger.get(f"/ui/assets/{wrong}").status == 404
    assert stranger.get("/ui/assets/../app.py").status == 404
    assert stranger.get("/ui/assets/%2e%2e%2fapp.py").status == 404


def test_what_people_named_is_shown_and_not_run(world: PagesWorld) -> None:
    holder = world.new_key("<img src=x onerror=alert(1)>", "member", "research")
    world.keys["odd"] = holder
    batch = world.batch("odd", 5, public_model="<b>model</b>")
    body = visitor(world, "ana").get(f"/ui/batches/{batch.id}").body
    assert "&lt;img src=x onerror=alert(1)&gt;" in body
    assert "&lt;b&gt;model&lt;/b&gt;" in body
    assert "<img" not in body


# Roles


@pytest.mark.parametrize("name", EVERYBODY)
def test_who_sees_routes(world: PagesWorld, name: str) -> None:
    one = visitor(world, name)
    expected = 200 if name in PLATFORM else 403
    for path in (
        "/ui/routes",
        "/ui/routes/gpu-a",
        "/ui/routes/gpu-a/live",
        "/ui/routes/gpu-a/chart",
        "/ui/routes/-live",
    ):
        assert one.get(path).status == expected, path
    assert ('href="/ui/routes"' in one.get("/ui/batches").body) == (name in PLATFORM)
    assert one.get("/ui").location == ("/ui/routes" if name in PLATFORM else "/ui/batches")


@pytest.mark.parametrize("name", EVERYBODY)
def test_rule_84_only_platform_admins_edit(world: PagesWorld, name: str) -> None:
    one = visitor(world, name)
    allowed = name == "ana"
    assert one.get("/ui/routes/own/edit").status == (200 if allowed else 403)
    assert one.post("/ui/routes/own/preview", {**SETTINGS}).status == (200 if allowed else 403)
    assert one.post("/ui/routes/own/edit", {**SETTINGS}).status == (303 if allowed else 403)
    if name in PLATFORM:
        assert ("/ui/routes/own/edit" in one.get("/ui/routes/own").body) == allowed
    stored = world.run(world.service.platform.views.route_view("own"))
    assert stored.stored == allowed or stored.settings.max_concurrency == 6


def test_rule_82_members_see_only_their_own(world: PagesWorld, scene: Scene) -> None:
    member = visitor(world, "notebook")
    listed = member.get("/ui/batches?status=all").body
    for name in ("waiting", "mixed", "failed"):
        assert scene[name].id in listed
        assert member.get(f"/ui/batches/{scene[name].id}").status == 200
    for name in ("running", "broken", "done", "sales"):
        assert scene[name].id not in listed
        for path in ("", "/live", "/cancel", "/output", "/errors"):
            assert member.get(f"/ui/batches/{scene[name].id}{path}").status == 404, (name, path)
        assert member.post(f"/ui/batches/{scene[name].id}/cancel", {}).status == 404
        assert world.data.get(scene[name]).cancel_requested_at is None
    assert member.get("/ui/batches?scope=all").status == 403


def test_rule_82_workspace_admins_see_their_workspace(world: PagesWorld, scene: Scene) -> None:
    listed = visitor(world, "lead").get("/ui/batches?status=all").body
    assert scene["running"].id in listed
    assert scene["waiting"].id in listed
    assert scene["sales"].id not in listed
    assert visitor(world, "lead").get(f"/ui/batches/{scene['sales'].id}").status == 404


def test_rule_82_platform_roles_see_every_team_and_totals_of_persons(world: PagesWorld, scene: Scene) -> None:
    own = world.batch("hobby", 7, HOME)
    for name in PLATFORM:
        body = visitor(world, name).get("/ui/batches?status=active&scope=all").body
        assert scene["sales"].id in body
        assert scene["running"].id in body
        assert own.id not in body
        assert re.search(r"Personal workspaces: \d+ unfinished batch.* completed in 2 workspaces", body)
        assert visitor(world, name).get(f"/ui/batches/{own.id}").status in (403, 404)
    assert visitor(world, "hobby").get(f"/ui/batches/{own.id}").status == 200


def test_auditors_cancel_nothing_and_read_no_files(world: PagesWorld, scene: Scene) -> None:
    auditor = visitor(world, "audit")
    running = f"/ui/batches/{scene['running'].id}"
    assert "Cancel…" not in auditor.get(running).body
    assert auditor.get(f"{running}/cancel").status == 403
    assert auditor.post(f"{running}/cancel", {}).status == 403
    assert world.data.get(scene["running"]).cancel_requested_at is None
    done = f"/ui/batches/{scene['done'].id}"
    assert "Download" not in auditor.get(done).body
    assert auditor.get(f"{done}/output").status == 403


def test_the_api_takes_a_session_only_with_its_token(world: PagesWorld) -> None:
    one = visitor(world, "ana")
    path = "/api/v1/platform/deployments/gpu-b/batch-scheduling"
    assert one.get(path).status == 200
    assert Visitor(world.port).get(path).status == 401
    body, kind = b'{"max_concurrency": 3}', {"Content-Type": "application/json"}
    assert one.send("PUT", path, body, {**kind, "Origin": one.origin}).status == 403
    assert one.send("PUT", path, body, {**kind, "X-CSRF-Token": one.form_token}).status == 403
    foreign = {**kind, "Origin": "https://evil.example", "X-CSRF-Token": one.form_token}
    assert one.send("PUT", path, body, foreign).status == 403
    assert one.get("/v1/models").status == 401  # the cookie is no key


# Batches and their files


def test_rule_85_the_batch_page_names_reasons_places_and_outcomes(world: PagesWorld, scene: Scene) -> None:
    world.publish()
    body = visitor(world, "notebook").get(f"/ui/batches/{scene['mixed'].id}").body
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body))
    assert "Queued — waiting for capacity" in text
    assert "Yielding to live traffic" in text
    assert "Other batches&#39; turn" in text
    assert re.search(r"#\d of 4 in queue", text)
    assert text.count("in queue") == 1  # alone on the other route: no place is shown
    assert "30 waiting · 0 running" in text
    assert re.search(r"Succeeded – 30", text)
    assert "/ui/routes/" not in body  # routes are for platform roles


def test_results_are_downloaded_with_the_session(world: PagesWorld, scene: Scene) -> None:
    one = visitor(world, "ana")
    output = one.get(f"/ui/batches/{scene['done'].id}/output")
    assert (output.status, output.body) == (200, '{"id": "batch_req_1"}\n')
    assert output.headers["Content-Disposition"].startswith("attachment")
    assert one.get(f"/ui/batches/{scene['done'].id}/errors").body == '{"id": "batch_req_2"}\n'
    assert one.get(f"/ui/batches/{scene['failed'].id}/output").status == 404
    assert one.get(f"/ui/batches/{scene['done'].id}/output", method="HEAD").body == ""


def test_a_cancel_asks_first_and_says_that_running_lines_finish(world: PagesWorld) -> None:
    batch = world.batch("notebook", 9)
    one = visitor(world, "notebook")
    page = one.get(f"/ui/batches/{batch.id}/cancel")
    assert "Running lines finish" in page.body
    assert world.data.get(batch).cancel_requested_at is None
    done = one.post(f"/ui/batches/{batch.id}/cancel", {})
    assert (done.status, done.location) == (303, f"/ui/batches/{batch.id}?cancelled=1")
    assert world.data.get(batch).cancel_requested_at is not None
    after = one.get(done.location).body
    assert "Cancelling" in after
    assert "Cancel…" not in after


def test_an_ended_batch_is_not_cancelled(world: PagesWorld, scene: Scene) -> None:
    one = visitor(world, "ana")
    assert one.post(f"/ui/batches/{scene['done'].id}/cancel", {}).status == 409
    assert one.get(f"/ui/batches/{scene['done'].id}/cancel").location == f"/ui/batches/{scene['done'].id}"


def test_lists_have_pages(world: PagesWorld) -> None:
    for _ in range(30):
        world.batch("bulk", 3, BULK)
    one = visitor(world, "bulk")
    first, second = one.get("/ui/batches").body, one.get("/ui/batches?page=2").body
    ids = [set(re.findall(r"batch_[0-9a-f]{32}", body)) for body in (first, second)]
    assert (len(ids[0]), len(ids[1]), len(ids[0] & ids[1])) == (25, 5, 0)
    assert "Older" in first
    assert "Older" not in second
    assert one.get("/ui/batches?page=-1&status=nonsense").status == 200
    assert "No batch is running" in one.get("/ui/batches?page=4000").body


@pytest.mark.parametrize(
    "path", ["/ui/routes/none", "/ui/batches/none", "/ui/batches/batch_" + "0" * 32, "/ui/x", "/ui/routes/gpu-a/x/y"]
)
def test_what_is_not_there_is_said_on_a_page(world: PagesWorld, path: str) -> None:
    answer = visitor(world, "ana").get(path)
    assert answer.status == 404
    assert "<h1>Nothing here</h1>" in answer.body


# The route page and its form


def test_rule_84_the_route_page_has_four_tiles_and_settings_in_words(world: PagesWorld) -> None:
    world.publish()
    body = visitor(world, "audit").get("/ui/routes/gpu-a").body
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body))
    for said in (
        "Queued lines 6,330 in 4 batches", "Running 3 / 4 2 live in flight", "Status Yielding to live traffic checked",
        "0 waiting · 6 running · KV cache 71.3%", "Pause while live requests ≥ 2",
        "Mon–Fri 19:00–07:00 (America/New_York)",
        "Pause if waiting &gt; 0 or KV cache &gt; 90%", "with key ana", "The same as a table",
    ):  # fmt: skip
        assert said in text, said
    broken = visitor(world, "audit").get("/ui/routes/gpu-b").body
    assert "Unavailable (http status) · treated as busy" in broken
    assert "This is a fault, not a pause" in broken


def test_saving_writes_the_whole_document_once(world: PagesWorld) -> None:
    one = visitor(world, "ana")
    fields: dict[str, str | list[str]] = {
        "cap": "fixed", "max_concurrency": "4", "yield_live_threshold": "2", "metrics_url": "", "max_waiting": "7",
        "days": ["sat", "sun"], "start": "22:00", "end": "06:00", "timezone": "Europe/London", "do": "save",
    }  # fmt: skip
    done = one.post("/ui/routes/spare/edit", fields)
    assert (done.status, done.location) == (303, "/ui/routes/spare?saved=1")
    row = world.run(world.service.platform.views.route_view("spare")).settings
    assert (row.max_concurrency, row.yield_live_threshold, row.window_days, row.window_start_minute) == (4, 2, 96, 1320)
    assert (row.metrics_url, row.metrics_max_waiting, row.updated_by) == (None, None, world.keys["ana"].id)
    audit = [entry for entry in world.run(world.service.platform.views.audit_log(50, None)) if entry.subject == "spare"]
    assert [entry.action for entry in audit] == ["batch_scheduling.updated"]
    assert "Saved." in one.get(done.location).body


@pytest.mark.parametrize(
    ("changed", "field", "said"),
    [
        ({"max_concurrency": "0"}, "max_concurrency", "Must be from 1 to 256"),
        ({"max_concurrency": "many"}, "max_concurrency", "Must be a whole number"),
        ({"cap": "adaptive", "cap_min": "9", "cap_max": "3"}, "cap_min", "Must not be above “At most”"),
        ({"yield_live_threshold": "0"}, "yield_live_threshold", "Must be from 1 to 100000"),
        ({"metrics_url": "http://10.0.0.5:8000/metrics"}, "max_waiting", "Needs at least one of waiting requests"),
        ({"metrics_url": "http://169.254.169.254/metrics", "max_waiting": "0"}, "metrics_url", "Must be the base URL"),
        ({"metrics_url": "http://10.0.0.5:8000/metrics", "max_kv_cache_percent": "0"}, "max_kv_cache_percent", "Mu"),
        ({"priority": "1000001"}, "priority", "Must be from 1 to 1000000"),
        ({"days": "mon", "timezone": "Mars/Olympus", "start": "1:00", "end": "2"}, "timezone", "No IANA time zone"),
        ({"days": "mon", "timezone": "UTC", "start": "24:00", "end": "02:00"}, "start", "Must be HH:MM"),
        ({"days": "mon", "timezone": "", "start": "01:00", "end": "02:00"}, "timezone", "Must have 1 to 64"),
    ],
)  # fmt: skip
def test_a_refusal_stands_beside_its_field_and_nothing_is_saved(
    world: PagesWorld, changed: dict[str, str | list[str]], field: str, said: str
) -> None:
    one = visitor(world, "ana")
    before = world.run(world.service.platform.views.route_view("gpu-a")).settings
    answer = one.post("/ui/routes/gpu-a/edit", {"cap": "fixed", "max_concurrency": "2", "do": "save", **changed})
    assert answer.status == 400
    assert f'id="{field}-error"' in answer.body
    assert said in answer.body
    assert f'<a href="#{field}">' in answer.body
    assert world.run(world.service.platform.views.route_view("gpu-a")).settings == before
    for value in changed.values():
        assert isinstance(value, list) or value in answer.body or value in ("adaptive", "mon")


def test_a_preview_saves_nothing_and_works_without_scripts(world: PagesWorld) -> None:
    one = visitor(world, "ana")
    fields: dict[str, str | list[str]] = {
        "cap": "fixed", "max_concurrency": "3", "days": ["sat"], "start": "22:00", "end": "06:00",
        "timezone": "Europe/London", "do": "preview",
    }  # fmt: skip
    page = one.post("/ui/routes/gpu-b/edit", fields)
    assert page.status == 200
    assert "Next 14 openings" in page.body
    assert len(re.findall(r"22:00–Sun 06:00", page.body)) == 14
    fragment = one.post("/ui/routes/gpu-b/preview", fields).body
    assert "<html" not in fragment
    assert "Next 14 openings" in fragment
    bad = one.post("/ui/routes/gpu-b/preview", {**fields, "timezone": "Nowhere"})
    assert bad.status == 200
    assert "No preview yet: No IANA time zone" in bad.body
    assert world.run(world.service.platform.views.route_view("gpu-b")).settings.window_days is None


def test_rule_84_priority_only_on_routes_that_take_it(world: PagesWorld) -> None:
    one = visitor(world, "ana")
    assert 'name="priority"' in one.get("/ui/routes/gpu-a/edit").body
    assert 'name="priority"' not in one.get("/ui/routes/own/edit").body


def test_a_wait_that_nobody_confirms_is_forgotten(world: PagesWorld) -> None:
    batch = world.batch("lead", 4)
    world.begin(batch)
    world.wait_for(batch, Demand("own", 4, "fair_share", True))
    page = f"/ui/batches/{batch.id}"
    assert "Queued — waiting for capacity" in visitor(world, "lead").get(page).body
    world.wait_for(batch)
    assert "Queued — waiting for capacity" not in visitor(world, "lead").get(page).body
