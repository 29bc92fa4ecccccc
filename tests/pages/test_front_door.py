"""The bare address of the HTTP port."""

from __future__ import annotations

import pytest
from chromium import Chromium
from http_visitor import Visitor
from pages_world import PagesWorld, Scene

CHROME = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"


@pytest.mark.parametrize("accept", [CHROME, "text/html", "TEXT/HTML; q=0.5", "application/json, text/html"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_browser_is_led_to_the_pages(world: PagesWorld, accept: str, method: str) -> None:
    answer = Visitor(world.port).get("/", {"Accept": accept}, method)
    assert (answer.status, answer.location, answer.headers["Vary"]) == (303, "/ui", "Accept")


@pytest.mark.parametrize("accept", ["", "*/*", "application/json", "text/plain", "text/htmlx"])
def test_a_program_is_told_that_nothing_is_there(world: PagesWorld, accept: str) -> None:
    answer = Visitor(world.port).get("/", {"Accept": accept})
    assert (answer.status, answer.location, answer.body) == (404, "", '{"error":"Not Found"}')


@pytest.mark.parametrize(("method", "path"), [("POST", "/"), ("GET", "//v1/models"), ("GET", "//ui"), ("GET", "/x")])
def test_other_addresses_lead_nowhere(world: PagesWorld, method: str, path: str) -> None:
    answer = Visitor(world.port).send(method, path, None, {"Accept": CHROME})
    assert (answer.status, answer.location, answer.body) == (404, "", '{"error":"Not Found"}')


@pytest.mark.process
def test_a_browser_that_is_given_host_and_port_alone_can_sign_in(
    browser: Chromium, world: PagesWorld, scene: Scene
) -> None:
    browser.driver.delete_all_cookies()
    browser.open(f"http://127.0.0.1:{world.port}")
    assert browser.driver.current_url == f"{world.url}/sign-in"
    browser.sign_in(f"http://127.0.0.1:{world.port}/", world.keys["ana"].secret)
    assert browser.driver.current_url == f"{world.url}/routes"
