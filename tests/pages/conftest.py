"""``world``: a gateway with a scene of routes and batches, one per test file; ``browser``: one Chromium for all."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from chromium import Chromium, chromium, missing
from pages_world import PagesWorld, Scene, furnish, pages_world

from frontend.gateway_settings import AlertSettings


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PagesWorld]:
    # Without alert rules: they would end the incidents of the scene, of which nothing is true.
    with pages_world(tmp_path_factory.mktemp("pages"), alerts=AlertSettings(rules=())) as running:
        yield running


@pytest.fixture(scope="module")
def scene(world: PagesWorld) -> Scene:
    return furnish(world)


@pytest.fixture(scope="session")
def one_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    if absent := missing():
        if os.environ.get("CI"):
            pytest.fail(f"CI must test the pages, and {absent} is not installed (scripts/test installs it)")
        pytest.skip(f"{absent} is not installed (Debian: apt-get install chromium chromium-driver)")
    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(one_browser: Chromium) -> Iterator[Chromium]:
    """A browser that nobody is signed in with; a test that made it complain fails."""
    one_browser.begin_anew()
    one_browser.scripts(on=True)
    one_browser.zone("")
    one_browser.look()
    one_browser.complaints()
    yield one_browser
    one_browser.scripts(on=True)
    assert one_browser.complaints() == []


@pytest.fixture
def admin(browser: Chromium, world: PagesWorld, scene: Scene) -> Chromium:
    """A browser in which a platform admin is signed in; batches wait as the scene says."""
    world.publish()
    browser.sign_in(world.url, world.keys["ana"].secret)
    return browser
