"""Live parts in a real browser: an update leaves what is open, and the keyboard, where they were."""

from __future__ import annotations

import pytest
from chromium import Chromium
from pages_world import PagesWorld, Scene
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import ActionChains
from selenium.webdriver.common.keys import Keys

from frontend.batches.store.rows import BatchRow

pytestmark = pytest.mark.process
HOLDER = "return document.activeElement.closest('[id]')?.id"
FOCUS = "document.querySelector(arguments[0]).focus()"


def come(admin: Chromium, world: PagesWorld) -> BatchRow:
    """Have a batch appear at the top of the list that is open."""
    batch = world.batch("ana", 12, public_model="minilm")
    admin.until(menu(batch))
    return batch


def leave(admin: Chromium, world: PagesWorld, batch: BatchRow) -> None:
    """Have a batch end, and so disappear from the list that is open."""
    world.begin(batch)
    world.end(batch)
    admin.wait(lambda: not admin.has(menu(batch)))


def menu(batch: BatchRow) -> str:
    return f"#menu-{batch.id}"


@pytest.mark.parametrize("item", ["summary", "a.danger"])
def test_what_is_open_and_where_the_keyboard_is_survive_an_update(
    admin: Chromium, world: PagesWorld, scene: Scene, item: str
) -> None:
    one = scene["running"]
    admin.open(f"{world.url}/batches")
    admin.click(f"{menu(one)} summary")
    admin.script(FOCUS, f"{menu(one)} {item}")
    name = admin.focused("textContent")
    newer = come(admin, world)
    assert (admin.focused("textContent"), f"#{admin.script(HOLDER)}") == (name, menu(one))
    leave(admin, world, newer)
    assert (admin.focused("textContent"), f"#{admin.script(HOLDER)}") == (name, menu(one))
    assert admin.has(f"{menu(one)}[open]")
    admin.press(Keys.ESCAPE)
    assert not admin.has("details.menu[open]")


def test_the_keyboard_stays_on_a_link_whose_row_moves(admin: Chromium, world: PagesWorld, scene: Scene) -> None:
    admin.open(f"{world.url}/batches")
    link = f"/batches/{scene['running'].id}"
    admin.script(FOCUS, f".row-link[href$='{link}']")
    newer = come(admin, world)
    assert (admin.focused("href"), admin.focused("className")) == (world.url + link, "row-link mono")
    leave(admin, world, newer)
    assert (admin.focused("href"), admin.focused("className")) == (world.url + link, "row-link mono")


def test_the_keyboard_is_in_no_other_batch_when_one_leaves(admin: Chromium, world: PagesWorld, scene: Scene) -> None:
    admin.open(f"{world.url}/batches")
    leaving = come(admin, world)
    admin.script(FOCUS, f"{menu(leaving)} summary")
    leave(admin, world, leaving)
    assert admin.focused("id") == "live"
    # Nor at the top of the page: the next tabulator leads into the list.
    admin.press(Keys.TAB)
    admin.wait(lambda: admin.script("return document.activeElement === document.querySelector('#live a')"))


def test_the_keyboard_stays_on_a_link_of_a_preview_that_grows(admin: Chromium, world: PagesWorld, scene: Scene) -> None:
    admin.open(f"{world.url}/routes/gpu-b/edit")
    link = admin.until("#preview .effects a").get_attribute("href")
    admin.script(
        "const longer = '<p>More.</p><ol class=more></ol>' + document.getElementById('preview').innerHTML;"
        "window.fetch = async () => new Response(longer);"
    )
    admin.script(FOCUS, "#preview .effects a")
    admin.script("document.getElementById('settings-form').dispatchEvent(new Event('input'))")
    admin.until("#preview .more")
    assert admin.focused("href") == link


def test_a_press_is_no_less_a_click_for_an_update_before_its_end(
    admin: Chromium, world: PagesWorld, scene: Scene
) -> None:
    one = scene["running"]
    admin.open(f"{world.url}/batches")
    come(admin, world)
    pressed = f"{menu(one)} summary"
    admin.script("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", pressed)
    # The page may update until the button is down: then it is pressed again.
    admin.wait(lambda: hold(admin, pressed))
    admin.script(
        "window.asked = 0; const ask = window.fetch;"
        "window.fetch = async (...all) => { const got = await ask(...all); window.asked += 1; return got; };"
    )
    newer = world.batch("ana", 12, public_model="minilm")
    admin.wait(lambda: admin.script("return window.asked") > 1)
    assert not admin.has(menu(newer))
    ActionChains(admin.driver).release().perform()
    admin.until(menu(newer))
    assert admin.has(f"{menu(one)}[open]")


def hold(admin: Chromium, selector: str) -> bool:
    """Press the button of the mouse on an element; return whether it is pressed."""
    try:
        ActionChains(admin.driver).click_and_hold(admin.one(selector)).perform()
    except StaleElementReferenceException:
        return False
    if admin.has(f"{selector}:active"):
        return True
    ActionChains(admin.driver).release().perform()
    return False
