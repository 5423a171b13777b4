"""Create the dataset report for the training commands."""

from __future__ import annotations

from chatmill.remote.urls import Place


def report_page(dataset: Place) -> str:
    """Return the page that `chatmill report` writes; raise `ModuleNotFoundError` if a required package is missing."""
    from chatmill import __version__
    from chatmill.show.report import dataset_page

    return dataset_page(dataset, version=__version__)
