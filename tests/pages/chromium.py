"""A headless Chromium to look at pages with: what it shows, what it complains about, pictures of it."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

from selenium import webdriver
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

WAIT_S: Final = 30.0
DESKTOP: Final = (1280, 900)
PHONE: Final = (390, 844)
SHOTS: Final = Path(__file__).resolve().parents[2] / "build" / "screenshots"
"""Pictures of the pages, kept for people to look at; git ignores ``build``."""
_FLAGS: Final = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--disable-extensions", "--lang=en-GB",
)  # fmt: skip
_WATCH: Final = """
window.refusals = [];
document.addEventListener('securitypolicyviolation', event => {
  window.refusals.push(event.violatedDirective + ' ' + event.blockedURI);
});
"""


def missing() -> str:
    """Return which program is not installed; empty if all are."""
    return " and ".join(name for name in ("chromium", "chromedriver") if shutil.which(name) is None)


class Chromium:
    """One browser. ``driver`` for what has no short name here."""

    def __init__(self, profile: Path) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium") or ""
        for flag in (*_FLAGS, f"--user-data-dir={profile}", f"--window-size={DESKTOP[0]},{DESKTOP[1]}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        options.set_capability("timeouts", {"pageLoad": int(WAIT_S * 1000), "script": int(WAIT_S * 1000)})
        service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"), env=_environment(profile))
        self.driver = webdriver.Chrome(options=options, service=service)
        self._cdp("Page.addScriptToEvaluateOnNewDocument", source=_WATCH)

    def open(self, url: str) -> None:
        self.driver.get(url)

    def begin_anew(self) -> None:
        """Forget whoever was signed in, on every site."""
        # The page that is open refreshes itself, and would be refused once its cookie is gone.
        self.open("about:blank")
        self._cdp("Network.clearBrowserCookies")

    def sign_in(self, root: str, key: str) -> None:
        """Sign in as whoever holds a key, whoever was signed in before."""

        def signed_in() -> bool:
            self.driver.delete_all_cookies()
            self.open(root)
            self.one("#key").send_keys(key + Keys.ENTER)
            self.until("nav[aria-label=Main], .door .code")
            return self.has("nav[aria-label=Main]")

        # On a busy machine the store may not answer in time; a page says so, and people try again.
        self.wait(signed_in)

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def click(self, selector: str) -> None:
        """Click on the middle of an element, brought to the middle of the screen."""

        def clicked() -> bool:
            found = self.one(selector)
            self.script("arguments[0].scrollIntoView({block: 'center'})", found)
            found.click()
            return True

        # Live parts are replaced at any time: then it is done again with what has taken its place.
        changing = (NoSuchElementException, StaleElementReferenceException)
        WebDriverWait(self.driver, WAIT_S, 0.05, ignored_exceptions=changing).until(lambda _: clicked())

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def has(self, selector: str) -> bool:
        return bool(self.all(selector))

    def text(self, selector: str = "main") -> str:
        """Return what can be read there; at one moment, since live parts are replaced at any time."""
        return self.script("return document.querySelector(arguments[0])?.innerText ?? ''", selector)

    def texts(self, selector: str) -> list[str]:
        """Return the whole text of every element, in order."""
        return self.script(
            "return [...document.querySelectorAll(arguments[0])].map(one => one.textContent.trim())", selector
        )

    def until(self, selector: str) -> WebElement:
        """Wait for an element."""
        return self.wait(lambda: next(iter(self.all(selector)), None))

    def wait(self, condition: Any) -> Any:
        """Wait until something is true; return it."""
        return WebDriverWait(self.driver, WAIT_S, 0.05).until(lambda _: condition())

    def script(self, text: str, *arguments: Any) -> Any:
        return self.driver.execute_script(text, *arguments)

    def press(self, *keys: str) -> None:
        """Type on the keyboard, wherever it is."""
        webdriver.ActionChains(self.driver).send_keys(*keys).perform()

    def focused(self, what: str) -> Any:
        """Return a property of what has the focus; at one moment, since live parts are replaced at any time."""
        return self.script("return document.activeElement[arguments[0]] ?? null", what)

    def look(self, scheme: Literal["light", "dark"] = "light", size: tuple[int, int] = DESKTOP) -> None:
        """Pretend to be a screen of this size, of a person who likes this scheme."""
        self._cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        width, height = size
        self._cdp(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def scripts(self, *, on: bool) -> None:
        """Switch JavaScript of pages on or off."""
        self._cdp("Emulation.setScriptExecutionDisabled", value=not on)

    def zone(self, name: str) -> None:
        """Pretend to be in a time zone."""
        self._cdp("Emulation.setTimezoneOverride", timezoneId=name)

    def shot(self, name: str) -> Path:
        """Keep a picture of the whole page."""
        SHOTS.mkdir(parents=True, exist_ok=True)
        size = self._cdp("Page.getLayoutMetrics")["cssContentSize"]
        width, height = self.script("return [innerWidth, innerHeight]")
        self._cdp(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=min(int(size["height"]), 6000), deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        path = SHOTS / f"{name}.png"
        self.driver.save_screenshot(str(path))
        self._cdp("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        return path

    def complaints(self) -> list[str]:
        """Return what the browser has refused or failed at since the last call: policy, scripts, files not found."""
        log = [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]
        # That the store was not there in time is no mistake of the page, which asks again.
        return [text for text in log if "status of 503" not in text] + list(self.script("return window.refusals || []"))

    def close(self) -> None:
        self.driver.quit()

    def _cdp(self, command: str, **arguments: Any) -> Any:
        return self.driver.execute_cdp_cmd(command, arguments)


@contextmanager
def chromium(profile: Path) -> Iterator[Chromium]:
    browser = Chromium(profile)
    process = browser.driver.service.process
    try:
        yield browser
    finally:
        try:
            browser.close()
        finally:
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGKILL)


def _environment(profile: Path) -> dict[str, str]:
    """Return the environment without proxies: the pages are on this machine."""
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return {**kept, "HOME": str(profile), "TZ": "UTC", "LANGUAGE": "en_GB"}
