"""The pages in a real browser: what people do on them, by mouse, keyboard and without scripts, and how they look."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from chromium import DESKTOP, PHONE, Chromium
from pages_world import EXAMPLE, MODELS, PagesWorld, Scene
from selenium.webdriver.common.keys import Keys

from frontend.batches.store.rows import SchedulingRow

pytestmark = pytest.mark.process
CHECKS = (Path(__file__).parent / "accessibility.js").read_text()


def settings(world: PagesWorld, route: str) -> SchedulingRow:
    return world.run(world.service.platform.views.route_view(route)).settings


def forget(browser: Chromium) -> None:
    """Take note of complaints that a test has provoked: an answer that is no success is one."""
    assert all("Failed to load resource" in complaint for complaint in browser.complaints())


# Signing in


def test_a_key_signs_in_and_the_address_asked_for_is_there(browser: Chromium, world: PagesWorld, scene: Scene) -> None:
    browser.driver.delete_all_cookies()
    browser.open(f"{world.url}/routes/gpu-a")
    assert browser.focused("id") == "key"
    browser.press(world.keys["audit"].secret, Keys.ENTER)
    browser.until("dl.tiles")
    assert browser.driver.current_url == f"{world.url}/routes/gpu-a"
    assert browser.text("h1") == "gpu-a"
    cookie = browser.driver.get_cookie("ringserve_session")
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Lax")
    assert browser.script("return document.cookie") == ""
    browser.click("header button")
    browser.until("#key")
    browser.open(f"{world.url}/routes")
    assert browser.has("#key")


def test_a_wrong_key_is_said_beside_the_field(browser: Chromium, world: PagesWorld) -> None:
    browser.driver.delete_all_cookies()
    browser.open(world.url)
    browser.press("sk-ring-nonsense", Keys.ENTER)
    assert browser.until("#key-error").text.endswith("This key is not known here, or was revoked.")
    assert "key-error" in (browser.one("#key").get_attribute("aria-describedby") or "")
    assert not browser.has("header.bar")
    forget(browser)


# Editing


def test_an_admin_edits_and_sees_what_was_saved(admin: Chromium, world: PagesWorld) -> None:
    admin.open(f"{world.url}/routes/own")
    assert "nobody has changed them" in admin.text()
    admin.click("a[href$='/edit']")
    field = admin.until("#max_concurrency")
    field.clear()
    field.send_keys("7")
    admin.one("#yield_live_threshold").send_keys("3")
    admin.click("button.primary")
    admin.until("p.note.good")
    assert "Pause while live requests ≥ 3" in admin.text(".facts")
    assert settings(world, "own").max_concurrency == 7


def test_a_mistake_is_said_beside_its_field_with_the_text_still_there(admin: Chromium, world: PagesWorld) -> None:
    admin.open(f"{world.url}/routes/gpu-a/edit")
    field = admin.one("#max_concurrency")
    field.clear()
    field.send_keys("1000", Keys.ENTER)
    assert "Must be from 1 to 256" in admin.until("#max_concurrency-error").text
    field = admin.one("#max_concurrency")
    assert (field.get_attribute("value"), field.get_attribute("aria-invalid")) == ("1000", "true")
    # The problem has the focus, so that it is read out, and leads to its field.
    assert admin.focused("id") == "problem"
    admin.press(Keys.TAB, Keys.ENTER)
    admin.wait(lambda: admin.focused("id") == "max_concurrency")
    assert settings(world, "gpu-a") == replace(settings(world, "gpu-a"), max_concurrency=EXAMPLE.max_concurrency)
    admin.shot("edit_refused")
    forget(admin)


def test_rule_84_fields_appear_with_what_they_belong_to(admin: Chromium, world: PagesWorld) -> None:
    admin.open(f"{world.url}/routes/cloud/edit")
    assert not admin.one("#max_waiting").is_displayed()
    assert not admin.one("#timezone").is_displayed()
    assert not admin.one("#cap_min").is_displayed()
    assert not admin.has("#priority")
    admin.one("#metrics_url").send_keys("http://10.0.0.5:8000/metrics")
    admin.click("input[value=sat]")
    admin.click("#cap-adaptive")
    assert admin.one("#max_waiting").is_displayed()
    assert admin.one("#timezone").is_displayed()
    assert admin.one("#cap_min").is_displayed()
    assert not admin.one("#max_concurrency").is_displayed()
    admin.one("#metrics_url").clear()
    admin.click("input[value=sat]")
    assert not admin.one("#max_waiting").is_displayed()
    assert not admin.one("#timezone").is_displayed()


def test_rule_84_the_zone_is_the_browsers_unless_one_was_chosen(admin: Chromium, world: PagesWorld) -> None:
    admin.zone("Asia/Tokyo")
    admin.open(f"{world.url}/routes/cloud/edit")
    assert admin.one("#timezone").get_attribute("value") == "Asia/Tokyo"
    admin.open(f"{world.url}/routes/gpu-a/edit")
    assert admin.one("#timezone").get_attribute("value") == "America/New_York"


def test_the_preview_follows_the_form_and_saves_nothing(admin: Chromium, world: PagesWorld) -> None:
    admin.open(f"{world.url}/routes/cloud/edit")
    assert "At any time." in admin.text("#preview")
    admin.click("input[value=sun]")
    admin.wait(lambda: "Next 14 openings" in admin.text("#preview"))
    assert len(admin.all("#preview .openings li")) == 14
    assert "Sun" in admin.text("#preview .openings")
    zone = admin.one("#timezone")
    zone.clear()
    zone.send_keys("Mars/Olympus")
    admin.wait(lambda: "No preview yet: No IANA time zone" in admin.text("#preview"))
    assert settings(world, "cloud").window_days is None


# Live parts


def test_values_update_by_themselves_and_what_changed_is_read_out(admin: Chromium, world: PagesWorld) -> None:
    world.signal("cloud", None, 1)
    admin.open(f"{world.url}/routes/cloud")
    assert "Idle" in admin.text("#live")
    admin.script("window.same = true")
    world.signal("cloud", "server_busy", 5)
    admin.wait(lambda: "Server busy" in admin.text("#live"))
    assert "5 live in flight" in admin.text("#live")
    assert admin.script("return window.same")  # it is still the same page
    assert "Server busy" in admin.script("return document.getElementById('announcer').textContent")


def test_a_hidden_page_asks_for_nothing_and_asks_at_once_when_seen(admin: Chromium, world: PagesWorld) -> None:
    admin.open(f"{world.url}/routes/cloud")
    admin.script(
        "const ask = window.fetch; window.asked = 0;"
        "window.fetch = (...all) => { window.asked += 1; return ask(...all); };"
        "window.face = 'hidden';"
        "Object.defineProperty(document, 'visibilityState', {get: () => window.face, configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange'));"
        # Longer than the pause between two: a page that went on would have asked.
        "setTimeout(() => { window.quiet = window.asked; }, 3000);"
    )
    assert admin.wait(lambda: admin.script("return window.quiet !== undefined"))
    assert admin.script("return window.quiet") == 0
    admin.script("window.face = 'visible'; document.dispatchEvent(new Event('visibilitychange'));")
    admin.wait(lambda: admin.script("return window.asked") > 0)


def test_text_that_somebody_marks_is_not_replaced(admin: Chromium, world: PagesWorld) -> None:
    world.signal("cloud", None, 1)
    admin.open(f"{world.url}/routes/cloud")
    admin.script("getSelection().selectAllChildren(document.querySelector('#live .value')); window.asked = 0;")
    admin.script(
        "const ask = window.fetch;"
        "window.fetch = async (...all) => { const got = await ask(...all); window.asked += 1; return got; };"
    )
    world.signal("cloud", "server_busy", 5)
    admin.wait(lambda: admin.script("return window.asked") > 1)
    assert "Server busy" not in admin.text("#live")
    admin.script("getSelection().removeAllRanges()")
    admin.wait(lambda: "Server busy" in admin.text("#live"))


def test_whoever_is_signed_out_elsewhere_is_told(admin: Chromium, world: PagesWorld) -> None:
    admin.open(f"{world.url}/routes")
    admin.driver.delete_all_cookies()
    assert "You have been signed out" in admin.until("#trouble").text
    assert admin.one("#trouble a").get_attribute("href") == f"{world.url}/routes"
    forget(admin)


# Other ways to use it


def test_everything_can_be_done_with_the_keyboard(admin: Chromium, world: PagesWorld) -> None:
    admin.open(f"{world.url}/routes/gpu-b")
    admin.press(Keys.TAB)
    assert admin.focused("textContent") == "Skip to the content"
    admin.press(Keys.ENTER)
    admin.wait(lambda: admin.focused("id") == "main")
    reach(admin, lambda: admin.focused("innerText") == "Edit")
    admin.press(Keys.ENTER)
    admin.until("#settings-form")
    reach(admin, lambda: admin.focused("name") == "yield_live_threshold")
    admin.press("9")
    reach(admin, lambda: admin.focused("value") == "sat")
    around = "return getComputedStyle(document.activeElement.nextElementSibling).outlineStyle"
    assert admin.script(around) == "solid"
    admin.press(Keys.SPACE)
    assert admin.one("#timezone").is_displayed()
    reach(admin, lambda: admin.focused("innerText") == "Save")
    admin.press(Keys.ENTER)
    admin.until("p.note.good")
    row = settings(world, "gpu-b")
    assert (row.yield_live_threshold, row.window_days) == (9, 1 << 5)


def reach(browser: Chromium, condition: object, most: int = 60) -> None:
    """Go on with the tabulator until something has the focus."""
    for _ in range(most):
        browser.press(Keys.TAB)
        if condition():  # type: ignore[operator]
            return
    raise AssertionError(f"not reached with {most} tabulators; at {browser.focused('outerHTML')[:200]}")


def test_pages_work_without_scripts(admin: Chromium, world: PagesWorld) -> None:
    admin.scripts(on=False)
    admin.open(f"{world.url}/routes/spare/edit")
    assert not admin.one("#timezone").is_displayed()
    admin.click("input[value=mon]")
    assert admin.one("#timezone").is_displayed()
    admin.click("button[value=preview]")
    admin.wait(lambda: "Next 14 openings" in admin.text("#preview"))
    admin.click("button[value=save]")
    admin.until("p.note.good")
    assert "Mon 19:00–07:00 (UTC)" in admin.text(".facts")
    assert "reload it for new ones" in admin.text("body")
    assert settings(world, "spare").window_days == 1


def test_a_batch_is_cancelled_after_being_asked(admin: Chromium, world: PagesWorld) -> None:
    batch = world.batch("ana", 12, public_model="minilm")
    admin.open(f"{world.url}/batches/{batch.id}")
    admin.click("#cancel")
    admin.wait(lambda: "Running lines finish" in admin.text("#confirm"))
    admin.click("#confirm a")
    admin.until("#cancel")
    assert world.data.get(batch).cancel_requested_at is None
    admin.click("#cancel")
    admin.click("#confirm button")
    admin.wait(lambda: "Cancelling" in admin.text())
    assert world.data.get(batch).cancel_requested_at is not None
    assert not admin.has("#cancel")


def test_the_chart_answers_why_nothing_ran(admin: Chromium, world: PagesWorld) -> None:
    admin.open(f"{world.url}/routes/gpu-a")
    titles = admin.texts(".plot g > title")
    assert any("9 h: Outside its time window" in title for title in titles)
    admin.click("#chart-table summary")
    rows = admin.texts("#chart-table tbody tr")
    assert len(rows) == len(titles)
    assert any("Outside its time window" in row and "9 h" in row for row in rows)
    # A bar may be too narrow to point at, and a phone shows no titles: a tap anywhere in the chart reads the moment.
    admin.script(
        "const bar = document.querySelector('.plot .gate.outside_window').getBoundingClientRect();"
        "document.querySelector('.plot').dispatchEvent(new MouseEvent('click', {bubbles: true,"
        " clientX: bar.left + bar.width / 2, clientY: bar.top + 120}));"
    )
    assert "9 h: Outside its time window" in admin.text(".chart-said")
    admin.click("nav.switch a")
    admin.wait(lambda: "Last 6 h" in admin.text("figcaption"))


def test_a_form_that_others_have_overtaken_says_so_first(admin: Chromium, world: PagesWorld) -> None:
    admin.open(f"{world.url}/routes/cloud/edit")
    world.put_settings(SchedulingRow("cloud", 11))
    field = admin.until("#max_concurrency")
    field.clear()
    field.send_keys("12")
    admin.click("button.primary")
    assert "Nothing was saved: key ana changed these settings" in admin.until("#problem").text
    assert admin.focused("id") == "problem"
    assert "in force now: 11 at once" in admin.text("#problem") and "in this form: 12 at once" in admin.text("#problem")
    assert settings(world, "cloud").max_concurrency == 11
    admin.shot("edit_overtaken")
    admin.click("button.primary")
    admin.until("p.note.good")
    assert settings(world, "cloud").max_concurrency == 12
    forget(admin)


def test_a_weight_is_changed_where_it_stands(admin: Chromium, world: PagesWorld) -> None:
    admin.open(f"{world.url}/workspaces")
    field = admin.one("input[aria-label='Weight of sales, 1 to 100']")
    field.clear()
    field.send_keys("500", Keys.ENTER)
    assert "Expected a whole number from 1 to 100" in admin.until("#problem").text
    assert admin.focused("value") == "500"
    admin.press(Keys.END, Keys.BACKSPACE, Keys.BACKSPACE, Keys.ENTER)
    assert "sales has weight 5" in admin.until("p.note.good").text
    admin.open(f"{world.url}/changes?what=batch_weight.updated")
    assert admin.texts(".entry ins") == ["5"]
    forget(admin)


# How it looks, and who can read it


def places(scene: Scene) -> dict[str, str]:
    return {
        "routes": "/routes",
        "route": "/routes/gpu-a",
        "route_fault": "/routes/gpu-b",
        "edit": "/routes/gpu-a/edit",
        "batches": "/batches?status=all",
        "batches_of_all": "/batches?scope=all",
        "batch_waiting": f"/batches/{scene['waiting'].id}",
        "batch_of_two_models": f"/batches/{scene['mixed'].id}",
        "batch_done": f"/batches/{scene['done'].id}",
        "cancel": f"/batches/{scene['running'].id}/cancel",
        "route_gone": "/routes/decommissioned",
        "incidents": "/incidents",
        "incidents_past": "/incidents?status=past",
        "changes": "/changes",
        "workspaces": "/workspaces",
    }


@pytest.mark.parametrize(
    ("scheme", "screen"),
    [
        ("light", "desktop"),
        ("dark", "phone"),
        pytest.param("dark", "desktop", marks=pytest.mark.slow),
        pytest.param("light", "phone", marks=pytest.mark.slow),
    ],
)
def test_pages_can_be_read_by_everybody(
    admin: Chromium,
    world: PagesWorld,
    scene: Scene,
    scheme: Literal["light", "dark"],
    screen: Literal["desktop", "phone"],
) -> None:
    size = PHONE if screen == "phone" else DESKTOP
    problems = []
    for name, path in places(scene).items():
        world.publish()
        admin.look(scheme, size)
        admin.open(world.url + path)
        problems += [f"{name}: {problem}" for problem in admin.script(CHECKS, screen == "phone")]
        admin.shot(f"{name}_{scheme}_{screen}")
    assert problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_sign_in_can_be_read_by_everybody(
    browser: Chromium, world: PagesWorld, scheme: Literal["light", "dark"]
) -> None:
    browser.driver.delete_all_cookies()
    for screen, size in (("desktop", DESKTOP), ("phone", PHONE)):
        browser.look(scheme, size)
        browser.open(world.url)
        assert browser.script(CHECKS, screen == "phone") == []
        browser.shot(f"sign_in_{scheme}_{screen}")


def test_every_route_has_a_page(admin: Chromium, world: PagesWorld) -> None:
    admin.open(f"{world.url}/routes")
    names = admin.texts("th[scope=row] a")
    assert {route.id for model in MODELS for route in model.routes} <= set(names)
