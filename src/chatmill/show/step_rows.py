"""The rows of a training step: replayed from an audit log, or previewed by the numbers that a run logged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from chatmill.audit import ReplayedStep
from chatmill.errors import DataError, UsageError, one_line
from chatmill.load.batch import segments_from_end
from chatmill.load.config import LoadConfig
from chatmill.load.plan import LoadPlan, datasets_hash
from chatmill.load.source import conversation, open_sources
from chatmill.show.dataset import dataset_text, tokenizer_metadata
from chatmill.show.row_view import preview
from chatmill.tokenizer import Tokenizer, open_tokenizer

PREVIEW = 60


class ReplayedRow(NamedTuple):
    """A row without its padding; `mask` says which of its tokens are predicted."""

    episodes: list[int]
    origins: list[str]
    ids: list[int]
    mask: list[int]
    segments: list[int]
    text: str | None


def replayed_rows(replayed: ReplayedStep, tokenizer: Tokenizer | None) -> Iterator[ReplayedRow]:
    """The rows of a step, with their text if the tokenizer is known."""
    batch = replayed.batch
    from_end = segments_from_end(batch.episode_ids)
    for number in range(replayed.step.num_rows):
        episodes = [episode for episode in batch.episode_ids[number].tolist() if episode >= 0]
        real = batch.segments[number] < len(episodes)
        ids, segments = batch.x[number][real].tolist(), batch.segments[number][real].tolist()
        mask = [0, *batch.loss_mask[number][real].astype(int).tolist()]
        # A row that is full has one token more than x, which is known if it is predicted.
        if real.all() and mask[-1]:
            ids.append(int(batch.y[number][-1]))
            segments.append(segments[-1])
        text = None if tokenizer is None else tokenizer.decode(ids)
        origins = [_origin(replayed.plan, *each) for each in zip(episodes, from_end[number].tolist(), strict=False)]
        yield ReplayedRow(episodes, origins, ids, mask[: len(ids)], segments, text)


def _origin(plan: LoadPlan, episode: int, segment: int) -> str:
    """The source and line that a segment of an episode was rendered from."""
    origin = conversation(plan.sources, plan.split, episode, segment)
    assert origin is not None
    name = f"{one_line(origin.source.name)} " if origin.source.name else ""
    return name + one_line(origin.place or f"{plan.split} {origin.episode}")


def replay_tokenizer(plan: LoadPlan, spec: str | None) -> Tokenizer | None:
    """The tokenizer that the rows were made with: the one that is named, or `bytes`; None if it is not known."""
    source = plan.sources[0]
    built_with, control, besides, name = tokenizer_metadata(source.dataset)
    if built_with is None:
        # Another program wrote the dataset, so that no tokenizer can be checked.
        return None if spec is None else open_tokenizer(spec)
    if spec is None and name not in (None, "bytes"):
        return None
    opened = open_tokenizer(spec or "bytes", control=control, besides=besides, add_tokens=True)
    if opened.sha256 == built_with:
        return opened
    if spec is not None:
        raise UsageError(f"{source.path}: was made with another tokenizer than {one_line(spec)}; name that one")
    return None


# Previews.


class ConversationPreview(NamedTuple):
    """Where a conversation came from and how it begins."""

    place: str | None
    """file:line, if it is known."""
    text: str


def step_previews(
    dataset: Path, places: Iterable[tuple[int, int]], *, sha256: str, mix_sft: Mapping[str, float] | None
) -> list[ConversationPreview]:
    """The conversations of a step: of each the episode, by its number in the run, and the segment from its end."""
    sources, _ = open_sources(dataset, LoadConfig(pad_token_id=0, mix_sft=mix_sft))
    if (own := datasets_hash(sources)) != sha256:
        raise DataError(
            f"{dataset}: is {own[:12]}…, the step was trained on {sha256[:12]}…; name that data with --dataset"
        )
    texts = {source.path: dataset_text(source.path) for source in sources}
    previews = []
    for episode, segment in places:
        origin = conversation(sources, "train", episode, segment)
        if origin is None:
            raise DataError(f"{dataset}: has no episode {episode}; the lines of the run are damaged")
        previews.append(ConversationPreview(origin.place, preview(origin.row, texts[origin.source.path], PREVIEW)))
    return previews
