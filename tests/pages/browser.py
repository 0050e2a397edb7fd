"""A real browser without a window: it opens pages from files, and tells what they logged and asked for."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

DEADLINE_SECONDS = 20


class Browser:
    """One tab of it. `errors` and `requests` are of the page that is open."""

    def __init__(self, driver: webdriver.Chrome, folder: Path) -> None:
        self.driver = driver
        self._folder = folder
        self._opened = 0

    def show(self, page: str, charts: Sequence[str], *, width: int = 1280, is_dark: bool = False) -> None:
        """Opens that page from a file and waits until its charts (ids) are drawn."""
        self._opened += 1
        file = self._folder / f"page{self._opened}.html"
        file.write_text(page, encoding="utf-8")
        self.resize(width)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self._forget()
        self.address = file.as_uri()
        self.driver.get(self.address)
        self.until("return arguments[0].every((id) => document.getElementById(id).children.length)", list(charts))

    def resize(self, width: int, height: int = 900) -> None:
        """The window's inner size; a real one is never as narrow as a telephone."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def until(self, script: str, *arguments: Any) -> Any:
        """What the script returns, as soon as that is true."""
        return WebDriverWait(self.driver, DEADLINE_SECONDS, poll_frequency=0.02).until(
            lambda driver: driver.execute_script(script, *arguments), f"never true: {script}"
        )

    def ask(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def all(self, selector: str) -> list[WebElement]:
        return list(self.driver.find_elements(By.CSS_SELECTOR, selector))

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def boxes(self, selector: str) -> list[dict[str, Any]]:
        """Place and size of each element on the screen, with its label and text."""
        found: list[dict[str, Any]] = self.ask(
            """return [...document.querySelectorAll(arguments[0])].map((each) => {
                 const {x, y, width, height} = each.getBoundingClientRect();
                 return {x, y, width, height, label: each.getAttribute("aria-label") ?? "", text: each.textContent};
               })""",
            selector,
        )
        return found

    def hover(self, element: WebElement, x: int = 0, y: int = 0) -> str:
        """Moves the pointer there, from the element's middle, and returns what the tooltip says then."""
        # The page is told of it in a frame to come, and takes tooltips away then.
        self.driver.execute_async_script(
            """arguments[0].scrollIntoView({block: 'center'});
               requestAnimationFrame(() => requestAnimationFrame(arguments[1]));""",
            element,
        )
        ActionChains(self.driver).move_to_element_with_offset(element, x, y).perform()
        return self.tooltip()

    def tooltip(self) -> str:
        text: str = self.until("const tip = document.getElementById('tooltip'); return !tip.hidden && tip.innerText")
        return text

    def background(self) -> float:
        """The page's luminance: 0 is black, 1 is white."""
        return luminance(self.ask("return getComputedStyle(document.body).backgroundColor"))

    def contrast(self, selector: str) -> float:
        """How much that text stands out from the page: WCAG 2.2 asks for 4.5."""
        kind = "fill" if "text" in selector else "color"  # a text of a chart
        colour = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
        text, page = luminance(self.ask(colour, selector, kind)), self.background()
        return (max(text, page) + 0.05) / (min(text, page) + 0.05)

    def press(self, *keys: str) -> None:
        ActionChains(self.driver).send_keys(*keys).perform()

    def errors(self) -> list[str]:
        """What was logged, warnings included: a request that the page's policy refuses is one of them."""
        return [entry["message"] for entry in self.driver.get_log("browser")]  # type: ignore[no-untyped-call]

    def requests(self) -> list[str]:
        """The addresses that were asked for since the page was opened."""
        entries = self.driver.get_log("performance")  # type: ignore[no-untyped-call]
        messages = [json.loads(entry["message"])["message"] for entry in entries]
        return [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]

    def _forget(self) -> None:
        self.errors()
        self.requests()


def luminance(colour: str) -> float:
    """WCAG 2.2, relative luminance, of `rgb(r, g, b)`."""
    red, green, blue = (
        each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4
        for each in (int(number) / 255 for number in re.findall(r"\d+", colour)[:3])
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


AnyBrowser = TypeVar("AnyBrowser", bound=Browser)


@contextmanager
def running_browser(folder: Path, kind: type[AnyBrowser]) -> Iterator[AnyBrowser]:
    """Chromium by its driver; both end with the block. Skips where there is none, fails in CI."""
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        reason = "NOT TESTED HERE: pages in a real browser; no chromium and chromedriver. "
        if os.environ.get("CI"):
            pytest.fail(f"{reason}CI runs everything: install Debian's chromium and chromium-driver")
        pytest.skip(f"{reason}Debian's packages chromium and chromium-driver have them")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--disable-dev-shm-usage", "--hide-scrollbars", "--force-device-scale-factor=1"):
        options.add_argument(argument)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # it refuses to run as root with one
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(chromedriver))
    try:
        yield kind(driver, folder)
    finally:
        driver.quit()
