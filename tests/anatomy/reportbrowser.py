"""A real browser that opens pages of reports."""

from __future__ import annotations

from browser import Browser
from stepfast.torch.anatomy import Report, html_report


class ReportBrowser(Browser):
    """One tab, with a report's page in it."""

    def open(self, report: Report, *, width: int = 1280, is_dark: bool = False) -> None:
        """Opens the report's page from a file and waits until its charts are drawn."""
        self.show(html_report(report), ("curve", "treemap", "roofline"), width=width, is_dark=is_dark)
