"""Report pages about the data, which trackers log as artifacts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from chatmill.errors import one_line
from chatmill.load.source import DataSource
from chatmill.remote.urls import Place

ReportPage = Callable[[Place], str]
"""A function that returns a dataset's report as an HTML page, like `chatmill report`."""
MOST_TOKENS = 10**9
"""Maximum number of tokens in a dataset for which a page is written. With more tokens, all ranks would wait for the
page for more than a minute.
"""


def report_pages(
    sources: Sequence[DataSource],
    report_page: ReportPage | None,
    *,
    write: Callable[[str, str], None],
    note: Callable[[str], None],
) -> None:
    """Write a report page for each dataset. `write` is called with the file name and the HTML of each page, and `note`
    with the reason if a page is not written.

    Pages are written after training, and an error while writing a page does not make the run fail.
    """
    if report_page is None:
        note("the dataset report is not sent to the trackers; use `chatmill train` to send it")
        return
    for number, source in enumerate(sources, 1):
        tokens = sum(source.dataset[split].num_tokens for split in source.dataset.splits)
        if tokens > MOST_TOKENS:
            note(
                f"{source.path}: the report is not sent to the trackers, because the dataset has {tokens:,} tokens "
                f"(limit: {MOST_TOKENS:,}); run `chatmill report` to write the report"
            )
            continue
        try:
            write("report.html" if len(sources) == 1 else f"report-{number}.html", report_page(source.path))
        except Exception as error:
            note(f"{source.path}: the report is not sent to the trackers ({one_line(str(error), 200)})")
