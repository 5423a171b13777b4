"""The conversations of a training step: where each came from, and how it begins."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from chatmill.errors import ChatmillError, DataError
from chatmill.load.config import LoadConfig
from chatmill.load.plan import datasets_hash
from chatmill.load.source import conversation, open_sources
from chatmill.show.dataset import open_view
from chatmill.show.row_view import preview
from chatmill.show.text import TokenText

PREVIEW = 60


class ConversationPreview(NamedTuple):
    """Where a conversation came from and how it begins."""

    place: str | None
    """file:line, if it is known."""
    text: str


class StepEpisodes:
    """The episodes that a step was trained on, by the numbers that the run gave them."""

    def __init__(self, dataset: Path, *, sha256: str, mix_sft: Mapping[str, float] | None) -> None:
        sources, _ = open_sources(dataset, LoadConfig(pad_token_id=0, mix_sft=mix_sft))
        if (own := datasets_hash(sources)) != sha256:
            raise DataError(
                f"{dataset}: is {own[:12]}…, the step was trained on {sha256[:12]}…; name that data with --dataset"
            )
        self._dataset, self._sources = dataset, sources
        self._texts = {source.path: _text(source.path) for source in sources}

    def preview(self, episode: int, segment: int) -> ConversationPreview:
        """The conversation of a segment, counted from the end of its episode."""
        origin = conversation(self._sources, "train", episode, segment)
        if origin is None:
            raise DataError(f"{self._dataset}: has no episode {episode}; the lines of the run are damaged")
        return ConversationPreview(origin.place, preview(origin.row, self._texts[origin.source.path], PREVIEW))


def _text(dataset: Path) -> TokenText:
    """The text of a dataset's tokens; their ids if its tokenizer is not there."""
    try:
        return open_view(dataset).text
    except ChatmillError:
        return TokenText(None)
