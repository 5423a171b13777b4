"""The report page about a dataset, for the training commands."""

from __future__ import annotations

from chatmill.remote.urls import Place


def report_page(dataset: Place) -> str:
    """The page that `chatmill report` writes; `ModuleNotFoundError` if its packages are not installed."""
    from chatmill import __version__
    from chatmill.show.report import dataset_page

    return dataset_page(dataset, version=__version__)
