"""Two commands write one page, and neither takes the other's part from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaospage import HEAD, Part, new_page, with_part, write_part

PUBLISHED = Path(__file__).parents[2] / "docs" / "chaos.md"


def test_each_command_writes_its_part_and_leaves_the_other_in_any_order(tmp_path: Path) -> None:
    pages = [tmp_path / "one.md", tmp_path / "other.md"]
    for page, order in zip(pages, ([*Part], [*Part][::-1]), strict=True):
        for part in (*order, *order):
            write_part(page, part, f"## By {part}\n\nfound\n")
    assert pages[0].read_text() == pages[1].read_text()
    assert pages[0].read_text().startswith(HEAD)
    assert [pages[0].read_text().count(f"## By {part}\n\nfound\n{part.end}") for part in Part] == [1, 1]


def test_a_part_that_was_not_run_yet_says_so() -> None:
    page = with_part(new_page(), Part.MACHINE, "found")
    assert page.partition(Part.CLUSTER.begin)[2].lstrip().startswith("It was not run yet.")


def test_a_page_without_marks_is_not_overwritten(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Something else\n")
    with pytest.raises(ValueError, match="lacks the marks"):
        write_part(page, Part.CLUSTER, "found")
    assert page.read_text() == "# Something else\n"


@pytest.mark.parametrize("part", Part)
def test_the_published_page_takes_both_parts(part: Part) -> None:
    assert f"{part.begin}\nfound\n{part.end}" in with_part(PUBLISHED.read_text(), part, "found")
