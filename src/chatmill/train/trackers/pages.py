"""Report pages about the data, which trackers log as artifacts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from chatmill.errors import one_line
from chatmill.load.source import DataSource
from chatmill.remote.urls import Place

ReportPage = Callable[[Place], str]
"""Returns the HTML page of a dataset that `chatmill report` writes."""
MOST_TOKENS = 10**9
"""Larger datasets get no page: it would take more than a minute, while all ranks wait."""


def report_pages(
    sources: Sequence[DataSource],
    report_page: ReportPage | None,
    *,
    write: Callable[[str, str], None],
    note: Callable[[str], None],
) -> None:
    """Write the page of each dataset: `write` gets its file name and text, and `note` prints why a page is missing.

    Pages are written after training, and an error in a page does not make the run fail.
    """
    if report_page is None:
        note("no report page about the data for the trackers; `chatmill train` writes one")
        return
    for number, source in enumerate(sources, 1):
        tokens = sum(source.dataset[split].num_tokens for split in source.dataset.splits)
        if tokens > MOST_TOKENS:
            note(f"{source.path}: no report page for the trackers ({tokens:,} tokens); `chatmill report` writes it")
            continue
        try:
            write("report.html" if len(sources) == 1 else f"report-{number}.html", report_page(source.path))
        except Exception as error:
            note(f"{source.path}: no report page for the trackers ({one_line(str(error), 200)})")
