"""The page of a report, opened in a real browser from a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from anatomyreports import (
    HOSTILE,
    hostile,
    of_many_modules,
    of_nothing,
    of_one_component,
    of_zero_bytes,
    too_large,
    without_limit,
)
from browser import running_browser
from reportbrowser import ReportBrowser
from stepfast.sizes import size_text
from stepfast.torch.anatomy import Report

UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
RATES = {"FLOP/s": 1, "kFLOP/s": 1e3, "MFLOP/s": 1e6, "GFLOP/s": 1e9, "TFLOP/s": 1e12}

EDGES: dict[str, Callable[[Report], Report]] = {
    "as predicted": lambda report: report,
    "no limit, no roof": without_limit,
    "too large": too_large,
    "one component": of_one_component,
    "nothing": of_nothing,
    "zero bytes": of_zero_bytes,
    "thousands of modules": of_many_modules,
    "hostile": hostile,
}


def amount(text: str, units: dict[str, float] | dict[str, int]) -> float:
    """The number that a text like `1.5 MiB` means."""
    number, unit = text.split(" ")
    return float(number) * units[unit]


def held(report: Report, path: str) -> int:
    """Bytes of a module, its submodules included."""
    inside = [each for each in report.memory.modules if each.name == path or each.name.startswith(f"{path}.")]
    return sum(each.total_bytes for each in inside)


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("edge", EDGES)
def test_page_logs_nothing_asks_for_nothing_and_fits_its_window(
    browser: ReportBrowser, predicted: Report, edge: str, width: int, is_dark: bool
) -> None:
    browser.open(EDGES[edge](predicted), width=width, is_dark=is_dark)
    assert browser.errors() == []
    assert browser.requests() == [browser.address]
    assert browser.ask("return document.documentElement.scrollWidth") == width
    assert browser.ask("return document.documentElement.clientWidth") == width


def test_page_of_a_cpu_draws_its_charts_without_limit_and_reserved_memory(
    browser: ReportBrowser, predicted_on_cpu: Report
) -> None:
    browser.open(predicted_on_cpu)
    assert browser.errors() == []
    assert len(browser.all("#curve .area")) == len(predicted_on_cpu.memory.curve_components)
    assert browser.all("#curve .reserved, #curve .limit-line") == []
    assert browser.all("#treemap .group")
    assert browser.all("#roofline .mark")


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_text_stands_out_from_the_page_as_wcag_asks(browser: ReportBrowser, predicted: Report, is_dark: bool) -> None:
    browser.open(predicted, is_dark=is_dark)
    assert (browser.background() < 0.1) is is_dark
    for selector in ("h1", ".quiet", ".verdict", "td", "th", "#curve text", "summary", ".limit-text"):
        assert browser.contrast(selector) >= 4.5, selector


def test_bar_of_the_headline_shows_the_shares_of_the_devices_memory(browser: ReportBrowser, predicted: Report) -> None:
    browser.open(predicted)
    memory = predicted.memory
    assert memory.limit_bytes is not None
    assert browser.one(".verdict").text.startswith("It fits: ")
    (bar,) = browser.boxes(".fit-bar")
    parts = {
        each["text"].rpartition(" ")[0].rpartition(" ")[0]: each["width"]
        for each in browser.boxes(".fit-bar g, .fit-bar rect")
        if each["text"]
    }
    expected = {name: size for name, size in memory.peak_components.items() if size}
    expected |= {"context": memory.context_bytes, "reserved, not in use": memory.reserved_bytes - memory.peak_bytes}
    assert parts.keys() == expected.keys()
    for name, size in expected.items():
        assert parts[name] / bar["width"] == pytest.approx(size / memory.limit_bytes, abs=0.001), name


def test_what_does_not_fit_is_said_and_the_bar_marks_the_limit(browser: ReportBrowser, predicted: Report) -> None:
    browser.open(too_large(predicted))
    assert browser.one(".verdict").text.startswith("It does not fit: ")
    (bar,), (limit,) = browser.boxes(".fit-bar"), browser.boxes(".fit-bar .limit")
    assert (limit["x"] + limit["width"] / 2 - bar["x"]) / bar["width"] == pytest.approx(0.75, abs=0.01)


def test_curve_has_an_area_for_each_component_and_marks_the_peak_at_its_height(
    browser: ReportBrowser, predicted: Report
) -> None:
    browser.open(predicted)
    memory = predicted.memory
    names = [each.get_attribute("data-name") for each in browser.all("#curve .area")]
    assert names == ["context", *memory.curve_components]
    low, *_, high = browser.boxes("#curve .y-tick")
    bytes_a_pixel = (amount(high["text"], UNITS) - amount(low["text"], UNITS)) / (low["y"] - high["y"])
    (marker,) = browser.boxes("#curve .peak")
    grid = browser.boxes("#curve .grid")
    bottom = max(line["y"] for line in grid if line["width"] > line["height"])  # the line of 0 bytes
    at_peak = (bottom - marker["y"] - marker["height"] / 2) * bytes_a_pixel
    assert at_peak == pytest.approx(memory.context_bytes + memory.peak_bytes, rel=0.01)
    top = min(each["y"] for each in browser.boxes("#curve .area"))
    assert (bottom - top) * bytes_a_pixel == pytest.approx(memory.context_bytes + memory.peak_bytes, rel=0.01)
    (reserved,) = browser.boxes("#curve .reserved")
    assert (bottom - reserved["y"]) * bytes_a_pixel == pytest.approx(memory.occupied_bytes, rel=0.015)


def test_charts_round_sizes_as_the_tables_do(browser: ReportBrowser, predicted: Report) -> None:
    browser.open(predicted)
    for size in (0, 1, 1023, 1024, *(1024 * quarters // 4 for quarters in range(4, 80)), 7 * 1024**3 + 3):
        assert browser.ask("return sizeText(arguments[0])", size) == size_text(size)


def test_curve_marks_the_phases_of_each_step_on_its_axis(browser: ReportBrowser, predicted: Report) -> None:
    browser.open(predicted)
    titles = [each["text"] for each in browser.boxes("#curve .phase")]
    phases = ("forward", "backward", "optimizer")
    expected = [f"step {step}, {phase}" for step in (1, 2) for phase in phases]
    assert [title for title in titles if "setup" not in title] == expected


def test_pointer_on_the_curve_names_the_values_of_that_moment(browser: ReportBrowser, predicted: Report) -> None:
    browser.open(predicted)
    slider = browser.one("#curve .plot")
    text = browser.hover(slider)
    index = int(slider.get_attribute("aria-valuenow") or "")
    point = predicted.memory.curve[index]
    lines = [line for line in text.splitlines() if line]
    assert lines[0].startswith(f"step {point.step}, {point.phase}, ")
    values = dict(zip(lines[1::2], lines[2::2], strict=True))
    for name, size in zip(predicted.memory.curve_components, point.components, strict=True):
        number, unit = values[name].split(" ")
        assert float(number) * UNITS[unit] == pytest.approx(size, rel=0.05, abs=0.05), name
    assert amount(values["allocated"], UNITS) == pytest.approx(sum(point.components), rel=0.05)


def test_keys_move_along_the_curve_and_a_reader_hears_the_values(browser: ReportBrowser, predicted: Report) -> None:
    browser.open(predicted)
    slider = browser.one("#curve .plot")
    browser.ask("arguments[0].focus()", slider)
    assert "peak" in (slider.get_attribute("aria-valuetext") or "")
    browser.press(Keys.HOME)
    assert slider.get_attribute("aria-valuenow") == "0"
    browser.press(Keys.ARROW_RIGHT)
    assert slider.get_attribute("aria-valuenow") == "1"
    point = predicted.memory.curve[1]
    assert (slider.get_attribute("aria-valuetext") or "").startswith(f"step {point.step}, {point.phase}")
    assert browser.tooltip().startswith(f"step {point.step}, {point.phase}")


def groups(browser: ReportBrowser) -> dict[str, dict[str, Any]]:
    """The treemap's boxes by the module that they stand for."""
    return {box["label"].partition(": ")[0]: box for box in browser.boxes("#treemap .group")}


def sizes(browser: ReportBrowser) -> dict[str, tuple[float, float]]:
    """The treemap's boxes wherever the page is scrolled to."""
    return {path: (box["width"], box["height"]) for path, box in groups(browser).items()}


@pytest.mark.parametrize("width", [1280, 400])
def test_areas_of_the_treemap_are_proportional_to_bytes(browser: ReportBrowser, predicted: Report, width: int) -> None:
    browser.open(predicted, width=width)
    (whole,) = browser.boxes("#treemap .map")
    area = whole["width"] * whole["height"]
    found = groups(browser)
    assert "bert.encoder.layer.0" in found
    total = sum(each.total_bytes for each in predicted.memory.modules)
    for path, box in found.items():
        size = held(predicted, path)
        if "(" not in path and size > total / 200:
            assert box["width"] * box["height"] / area == pytest.approx(size / total, rel=0.02), path
    assert sum(box["width"] * box["height"] for box in found.values()) == pytest.approx(area, rel=0.005)
    cells = browser.boxes("#treemap .cell")
    assert len(cells) > len(found)
    assert sum(box["width"] * box["height"] for box in cells) == pytest.approx(area, rel=0.005)


def test_colours_of_the_treemap_are_those_of_components_or_by_choice_of_modules(
    browser: ReportBrowser, predicted: Report
) -> None:
    browser.open(predicted)
    backgrounds = "return [...document.querySelectorAll('.cell')].map((each) => getComputedStyle(each).backgroundImage)"
    assert all(each.startswith("linear-gradient") for each in browser.ask(backgrounds))
    browser.one("input[value=module]").click()
    assert set(browser.ask(backgrounds)) == {"none"}


def test_choosing_a_module_zooms_into_it_and_the_breadcrumb_leads_back(
    browser: ReportBrowser, predicted: Report
) -> None:
    browser.open(predicted)
    outside = sizes(browser)
    browser.one('[aria-label^="bert.encoder.layer.0: "]').click()
    inside = groups(browser)
    assert all(path.startswith("bert.encoder.layer.0.") for path in inside)
    (whole,) = browser.boxes("#treemap .map")
    assert sum(box["width"] * box["height"] for box in inside.values()) == pytest.approx(
        whole["width"] * whole["height"], rel=0.005
    )
    crumbs = browser.all(".crumbs button")
    assert [each.text.partition(" ·")[0] for each in crumbs] == ["Small BERT", "bert", "encoder", "layer", "0"]
    crumbs[0].click()
    assert sizes(browser) == outside


def test_treemap_is_used_by_keys_alone(browser: ReportBrowser, predicted: Report) -> None:
    browser.open(predicted)
    outside = sizes(browser)
    browser.ask("document.querySelector('.group').focus()")
    browser.press(Keys.ARROW_RIGHT)
    focused = "return document.activeElement.getAttribute('aria-label').split(': ')[0]"
    assert browser.ask(focused) == list(outside)[1]
    assert browser.tooltip().startswith(list(outside)[1])
    while browser.ask("return document.activeElement.hasAttribute('aria-disabled')"):
        browser.press(Keys.ARROW_RIGHT)
    chosen = browser.ask(focused)
    browser.press(Keys.ENTER)
    assert all(path.startswith(chosen) for path in sizes(browser))
    assert browser.ask(focused) == next(iter(sizes(browser)))
    while len(browser.all(".crumbs button")) > 1:
        browser.press(Keys.ESCAPE)
    assert sizes(browser) == outside


def test_pointer_on_the_treemap_names_module_and_bytes(browser: ReportBrowser, predicted: Report) -> None:
    browser.open(predicted)
    text = browser.hover(browser.one('[aria-label^="bert.encoder.layer.1: "]')).splitlines()
    assert text[0].startswith("bert.encoder.layer.1")
    size = held(predicted, text[0]) if "(" not in text[0] else None
    together = text[text.index("together") + 1].partition(",")[0]
    assert size is None or amount(together, UNITS) == pytest.approx(size, rel=0.05)


def test_small_modules_of_thousands_share_a_box_that_can_be_looked_into(
    browser: ReportBrowser, predicted: Report
) -> None:
    report = of_many_modules(predicted)
    browser.open(report)
    found = groups(browser)
    assert len(found) == 80
    assert "2921 others" in found
    browser.one('[aria-label^="2921 others"]').click()
    assert len(groups(browser)) == 80
    assert "2842 others" in groups(browser)


def test_roofline_marks_each_class_at_its_intensity_and_rate(browser: ReportBrowser, predicted: Report) -> None:
    browser.open(predicted)
    marks = {box["label"].partition(":")[0]: box for box in browser.boxes("#roofline .mark")}
    classes = [each for each in predicted.time.classes if each.flops]
    assert marks.keys() == {f"{each.kind}, {each.phase}" for each in classes}
    x_low, *_, x_high = browser.boxes("#roofline .x-tick")
    y_low, *_, y_high = browser.boxes("#roofline .y-tick")
    for each in classes:
        box = marks[f"{each.kind}, {each.phase}"]
        across = share(each.flops / each.moved_bytes, float(x_low["text"]), float(x_high["text"]))
        up = share(each.flops / each.seconds, amount(y_low["text"], RATES), amount(y_high["text"], RATES))
        left, right = x_low["x"] + x_low["width"] / 2, x_high["x"] + x_high["width"] / 2
        assert box["x"] + box["width"] / 2 == pytest.approx(left + across * (right - left), abs=2)
        # A text's middle is not its line: both ends are off by the same.
        line = next(box for box in browser.boxes("#roofline .grid") if box["width"] > box["height"])["y"]
        middle = line + up * (y_high["y"] - y_low["y"])
        assert box["y"] + box["height"] / 2 == pytest.approx(middle, abs=3)
    assert len(browser.all("#roofline .roof")) == 1  # in fp32 contractions have no roof of their own
    assert browser.hover(browser.one("#roofline .mark")).splitlines()[0] in marks


def share(value: float, low: float, high: float) -> float:
    """Where a value stands on a logarithmic axis."""
    return log(value / low) / log(high / low)


def test_contractions_with_a_roof_of_their_own_are_shown_with_both(browser: ReportBrowser, predicted: Report) -> None:
    roof = predicted.time.roof
    assert roof is not None
    higher = replace(roof, contraction_flops=8 * roof.other_flops)
    browser.open(replace(predicted, time=replace(predicted.time, roof=higher)))
    assert len(browser.all("#roofline .roof")) == 2


def test_charts_follow_the_windows_width(browser: ReportBrowser, predicted: Report) -> None:
    browser.open(predicted)
    browser.resize(400)
    browser.until("return document.querySelector('#curve svg').viewBox.baseVal.width < 400")
    browser.until("return document.querySelector('#roofline svg').viewBox.baseVal.width < 400")
    assert browser.ask("return document.documentElement.scrollWidth") == 400
    assert browser.errors() == []


def test_texts_of_a_report_are_shown_as_they_are_and_never_run(browser: ReportBrowser, predicted: Report) -> None:
    browser.open(hostile(predicted))
    assert browser.ask("return window.hacked") is None
    assert browser.all("img") == []
    assert len(browser.all("script")) == 2
    assert browser.one("h1").get_attribute("textContent") == HOSTILE
    assert HOSTILE in (browser.one(".notes").get_attribute("textContent") or "")
    browser.hover(browser.one("#treemap .cell"))
    assert browser.ask("return window.hacked") is None


def test_tables_say_what_the_charts_show(browser: ReportBrowser, predicted: Report) -> None:
    browser.open(predicted)
    for label in ("Memory by component", "Most memory in each phase", "The largest modules at the peak"):
        assert browser.all(f'[role=region][aria-label="{label}"] tbody tr'), label
    rows = browser.all('[aria-label="Operation classes of one step"] tbody tr')
    assert len(rows) == len(predicted.time.classes)


@pytest.mark.parametrize(("ci", "ends"), [("", pytest.skip.Exception), ("true", pytest.fail.Exception)])
def test_machine_without_a_browser_skips_loudly_and_fails_in_ci(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ci: str, ends: type[Exception]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CI", ci)
    with pytest.raises(ends, match="NOT TESTED HERE"), running_browser(tmp_path, ReportBrowser):
        pass
