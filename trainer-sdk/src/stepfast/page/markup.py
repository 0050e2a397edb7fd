"""One HTML file that needs nothing else: no network, no server, no script but its own.

A page is a template with places for what is written here, a style and scripts (`base.css` and `base.js` before the
page's own), and the data that its scripts draw, as JSON. All text is escaped, and the page's policy lets nothing run or
load but itself.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files


def page(package: str, *, scripts: Sequence[str], data: object, parts: Mapping[str, str]) -> str:
    """The page whose template, style and scripts (`page.html`, `page.css`, those that are named) lie in `page/` of that
    package. `data` is what its scripts find; `parts` are HTML for the template's places. Raises ValueError when the
    data holds a number that is none.
    """
    script = _file("stepfast.page", "base.js") + "".join(_file(f"{package}.page", name) for name in scripts)
    styles = _file("stepfast.page", "base.css") + _file(f"{package}.page", "page.css")
    made = {
        "policy": f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(styles)}; base-uri 'none'; "
        "form-action 'none'",
        "style": styles,
        "script": script,
        "data": _embedded(data),
        **parts,
    }
    # In one pass: what a part holds is never taken for another part's place.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: made[place[1]], _file(f"{package}.page", "page.html"))


def sentence(text: str) -> str:
    """With a capital at its head and a full stop, escaped; nothing where there is nothing."""
    return escape(f"{text[0].upper()}{text[1:]}.") if text else ""


def table(label: str, head: str, rows: Sequence[str], foot: str = "") -> str:
    """A table that is scrolled sideways where the window is narrow, by keyboard, too."""
    foot = f"<tfoot>{foot}</tfoot>" if foot else ""
    return (
        f'<div class="scroll" role="region" aria-label="{escape(label)}" tabindex="0"><table><thead>{head}</thead>'
        f"<tbody>{''.join(rows)}</tbody>{foot}</table></div>"
    )


def number_head(name: str) -> str:
    """The head of a column of numbers."""
    return f'<th scope="col" class="number">{escape(name)}</th>'


def numbers(*cells: str) -> str:
    """Cells of numbers."""
    return "".join(f'<td class="number">{escape(cell)}</td>' for cell in cells)


def definitions(kind: str, entries: Iterable[tuple[str, str]]) -> str:
    """Names and values; `kind` is the list's class."""
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in entries)
    return f'<dl class="{kind}">{items}</dl>'


def notes(texts: Sequence[str]) -> str:
    """What is to be known beside the rest."""
    return f'<ul class="notes">{"".join(f"<li>{escape(text)}</li>" for text in texts)}</ul>' if texts else ""


def _file(package: str, name: str) -> str:
    """A file that travels with a package."""
    parent, _, folder = package.rpartition(".")
    return (files(parent) / folder / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _embedded(data: object) -> str:
    """As JSON that no parser of HTML finds an end in."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
