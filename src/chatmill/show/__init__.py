"""Show datasets: in the terminal, as a report, and in a browser. All views are computed from the stored spans.

    text, dataset, mixed    the text of tokens; a dataset or a folder of datasets, with the tokenizer
    row_view, explain       the turns, spans and origins of a row; why a token is in the loss mask or is context
    terminal                rows in the terminal: by span, by turn, by token
    stats, charts, report   statistics of a split, and an HTML page about a dataset
    index, index_build      the viewer's index for filters, sorting and search
    losses                  the losses that a run logged, by episode
    compare, compare_report the differences between the loss masks of chatmill and another library
    source_record           the record that a segment was rendered from
    near                    near-duplicates of an episode
    order_view              the position of an episode in an epoch; the rows of a training step
    viewer, server, page/   the viewer's JSON API, its HTTP server, and the page

Public names are imported lazily, on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING as _TYPE_CHECKING

from chatmill._exports import lazy_exports as _lazy_exports

if _TYPE_CHECKING:
    from chatmill.show.dataset import DatasetView as DatasetView
    from chatmill.show.dataset import open_view as open_view
    from chatmill.show.explain import Explanation as Explanation
    from chatmill.show.explain import explain_token as explain_token
    from chatmill.show.report import report_html as report_html
    from chatmill.show.stats import SplitStats as SplitStats
    from chatmill.show.stats import split_stats as split_stats
    from chatmill.show.terminal import conversation_lines as conversation_lines
    from chatmill.show.terminal import span_lines as span_lines
    from chatmill.show.terminal import token_lines as token_lines
    from chatmill.show.text import TokenText as TokenText
    from chatmill.show.text import visible as visible
    from chatmill.show.viewer import Viewer as Viewer

__all__, __getattr__, __dir__ = _lazy_exports(__name__)
