"""The page of a job's life, opened in a real browser from a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from browser import Browser, running_browser
from lives import BEGIN, HOSTILE, UID, recovery, save, saves_of_training, suspended, training
from stepfast.histories import SaveRow
from stepfast_operator.life import Happening, life_of
from stepfast_operator.lifepage.html import Told, life_page
from stepfast_operator.record import Cause, Status
from stepfast_operator.report import facts_of

NOW = BEGIN + 1000
PHASES = {"detect": 2, "flush": 3, "schedule": 45, "restore": 6, "resume": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a page is made of."""

    status: Status
    saves: tuple[SaveRow, ...] = ()
    happenings: tuple[Happening, ...] = ()
    title: str = "team/gpt"
    notes: tuple[str, ...] = ()

    def page(self) -> str:
        life = life_of(self.status, uid=UID, now=NOW, saves=self.saves, happenings=self.happenings)
        facts = facts_of(self.status, NOW)
        told = Told(title=self.title, where="In context kind", facts=facts, notes=self.notes, seen_time=NOW)
        return life_page(life, self.status, told)


def lived() -> Case:
    return Case(
        status=training(),
        saves=tuple(saves_of_training()),
        happenings=(
            Happening(time=BEGIN + 302, type="Warning", reason="Restarting", message="attempt 1 failed: NodeLost"),
            Happening(time=BEGIN + 360, type="Normal", reason="Recovered", message="training goes on", count=2),
        ),
    )


def hostile() -> Case:
    failure = training().last_failure
    assert failure is not None
    status = replace(training(), last_failure=replace(failure, message=HOSTILE, pod=HOSTILE, node=HOSTILE))
    saves = (save(1, 10, 20, outcome=HOSTILE),)
    happening = Happening(time=BEGIN + 1, type=HOSTILE, reason=HOSTILE, message=HOSTILE)
    return Case(status=status, saves=saves, happenings=(happening,), title=HOSTILE, notes=(HOSTILE,))


def in_place() -> Case:
    restarted = recovery(3, 850, in_place_restart=1, cause=Cause.RANK_FAILED, steps_lost=0, restored_time=None)
    return replace(lived(), status=replace(training(), recoveries=(*training().recoveries, restarted)))


def many_saves() -> Case:
    rows = (save(3, 190 + number, 760 + number * 0.024, duration_seconds=number % 7 / 10) for number in range(10_000))
    return replace(lived(), saves=tuple(rows))


def one_moment() -> Case:
    return Case(status=Status(attempt=1), saves=(save(1, 1, 1000, duration_seconds=None, outcome="Dropped"),))


CASES: dict[str, Callable[[], Case]] = {
    "lived": lived,
    "in place": in_place,
    "hostile": hostile,
    "ten thousand saves": many_saves,
    "nothing": lambda: Case(status=Status()),
    "suspended": lambda: Case(status=suspended()),
    "one moment": one_moment,
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Debian's Chromium; without one the test is skipped, and fails in CI."""
    with running_browser(tmp_path_factory.mktemp("pages"), Browser) as started:
        yield started


def show(browser: Browser, case: Case, **screen: Any) -> None:
    browser.show(case.page(), ["timeline"], **screen)


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("name", CASES)
def test_page_logs_nothing_asks_for_nothing_and_fits_its_window(
    browser: Browser, name: str, width: int, is_dark: bool
) -> None:
    show(browser, CASES[name](), width=width, is_dark=is_dark)
    assert browser.errors() == []
    assert browser.requests() == [browser.address]
    assert browser.ask("return document.documentElement.scrollWidth") == width


def test_attempts_and_recoveries_stand_where_their_time_is(browser: Browser) -> None:
    show(browser, lived())
    bands = [(box, name) for box, name in zip(browser.boxes(".band"), names(browser, ".band"), strict=True)]
    left = min(box["x"] for box, _ in bands)
    right = max(box["x"] + box["width"] for box, _ in bands)
    per_second = (right - left) / 1000
    for failed in (300, 700):
        at = left + failed * per_second
        for name, seconds in PHASES.items():
            (box,) = [box for box, kind in bands if kind == name and abs(box["x"] - at) < 1.5]
            assert box["width"] == pytest.approx(seconds * per_second, abs=1), name
            at += seconds * per_second
    assert len(browser.all("#timeline .failed")) == 2


def names(browser: Browser, selector: str) -> list[str]:
    found: list[str] = browser.ask(
        "return [...document.querySelectorAll(arguments[0])].map((each) => each.dataset.name)", selector
    )
    return found


def test_steps_rise_to_the_newest_one_and_every_attempt_has_its_line(browser: Browser) -> None:
    show(browser, lived())
    lines = browser.boxes("#timeline .steps")
    assert len(lines) == 3
    ticks = [box for box in browser.boxes("#timeline .y-tick") if box["text"].isdigit()]
    low, high = ticks[0], next(box for box in ticks if box["text"] == "200")
    per_step = (low["y"] - high["y"]) / 200
    zero = low["y"] + low["height"] / 2
    assert (zero - min(line["y"] for line in lines)) / per_step == pytest.approx(260, abs=3)
    assert (zero - (lines[0]["y"])) / per_step == pytest.approx(100, abs=3)


def test_every_save_has_a_dot_and_those_not_committed_another_colour(browser: Browser) -> None:
    dropped = save(3, 260, 990, outcome="Dropped", duration_seconds=None)
    show(browser, replace(lived(), saves=(*saves_of_training(), dropped)))
    counts = browser.ask("return [...document.querySelectorAll('.dots')].map((e) => [e.dataset.name, e.dataset.count])")
    assert counts == [["save", "26"], ["dropped", "1"], ["save", "26"]]


def test_choosing_a_recovery_shows_it_alone_and_whole_life_leads_back(browser: Browser) -> None:
    show(browser, lived())
    buttons = browser.all(".zoom button")
    assert [each.text for each in buttons] == ["whole life", "1 → 2", "2 → 3"]
    whole = browser.boxes('.band[data-name="schedule"]')
    buttons[2].click()
    (schedule,) = browser.boxes('.band[data-name="schedule"]')
    assert schedule["width"] > 5 * whole[0]["width"]
    assert len(browser.all("#timeline .failed")) == 1
    assert browser.ask("return document.activeElement.textContent") == "2 → 3"
    browser.one(".zoom button").click()
    assert browser.boxes('.band[data-name="schedule"]') == whole


def test_dragging_over_the_timeline_shows_what_was_dragged_over(browser: Browser) -> None:
    show(browser, lived())
    before = browser.boxes('.band[data-name="schedule"]')[0]["width"]
    plot = browser.one(".plot svg")
    ActionChains(browser.driver).move_to_element_with_offset(plot, -250, 0).click_and_hold().move_by_offset(
        500, 0
    ).release().perform()
    browser.until("return !document.querySelector('.zoom button[aria-pressed=true]')")
    assert len(browser.all(".failed")) == 2
    assert 1.5 * before < browser.boxes('.band[data-name="schedule"]')[0]["width"]


def test_pointer_names_attempt_and_save_of_that_moment(browser: Browser) -> None:
    show(browser, lived())
    plot = browser.one(".plot svg")
    (box,) = browser.boxes(".plot svg")
    # The axis begins 64 pixels from the left and ends 10 from the right; a save stands 665 s after the begin.
    at = 64 + 0.665 * (box["width"] - 74)
    text = browser.hover(plot, int(at - box["width"] / 2))
    lines = [line for line in text.splitlines() if line]
    told = dict(zip(lines[1::2], lines[2::2], strict=True))
    assert told["attempt"] == "2"
    assert told["step"] == "190"
    assert told["size"] == "1.0 GiB"
    assert told["stall"] == "4.0 ms"
    assert told["until committed"] == "2.0 s"


def test_keys_walk_through_the_life_and_a_reader_hears_it(browser: Browser) -> None:
    show(browser, lived())
    plot = browser.one(".plot")
    browser.ask("arguments[0].focus()", plot)
    heard = []
    for key in (Keys.HOME, Keys.ARROW_RIGHT, Keys.END):
        browser.press(key)
        heard.append(plot.get_attribute("aria-valuetext") or "")
    assert heard[0] == "2027-01-15 08:00:00 UTC, after 0.0 s, attempt 1"
    assert "attempt 1, step 10, stall 4.0 ms" in heard[1]
    assert "attempt 3" in heard[2]


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_text_stands_out_from_the_page_as_wcag_asks(browser: Browser, is_dark: bool) -> None:
    show(browser, lived(), is_dark=is_dark)
    assert (browser.background() < 0.1) is is_dark
    for selector in ("h1", ".quiet", ".verdict", "td", "th", "#timeline text", "tr.warning th", ".zoom button"):
        assert browser.contrast(selector) >= 4.5, selector


def test_no_text_of_the_jobs_is_taken_as_html(browser: Browser) -> None:
    show(browser, hostile())
    assert browser.ask("return window.hacked") is None
    assert browser.all("img") == []
    assert len(browser.all("script")) == 2
    assert browser.one("h1").get_attribute("textContent") == HOSTILE
    assert browser.one(".notes").get_attribute("textContent") == HOSTILE
    browser.hover(browser.one(".plot svg"))
    assert browser.ask("return window.hacked") is None


def test_printed_page_is_light_and_without_what_only_a_screen_needs(browser: Browser) -> None:
    show(browser, lived(), is_dark=True)
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        assert browser.background() > 0.9
        assert browser.ask("return getComputedStyle(document.querySelector('.zoom')).display") == "none"
        assert browser.all(".band")
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_tables_say_what_the_picture_shows(browser: Browser) -> None:
    show(browser, lived())
    for label, rows in (("Attempts", 3), ("Recoveries", 2), ("The newest saves", 26), ("Events", 2)):
        assert len(browser.all(f'[role=region][aria-label="{label}"] tbody tr')) == rows, label
    first = browser.one('[aria-label="Attempts"] tbody tr').get_attribute("textContent") or ""
    assert "2027-01-15 08:00:00 UTC" in first
    assert "5.0 min" in first
    assert browser.all(".bar rect.c-schedule")


def test_times_that_are_not_known_exactly_are_marked(browser: Browser) -> None:
    show(browser, replace(lived(), status=replace(training(), start_time=BEGIN + 600, earlier_seconds=400.0)))
    first = browser.one('[aria-label="Attempts"] tbody tr').get_attribute("textContent") or ""
    assert "by 2027-01-15 08:00:48 UTC" in first
    assert "at least 4.2 min" in first
    assert len(browser.all(".band.unsure")) == 1
