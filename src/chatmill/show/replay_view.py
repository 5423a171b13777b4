"""The rows of a replayed training step: their episodes, ids, mask and text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from chatmill.audit import ReplayedStep
from chatmill.errors import UsageError, one_line
from chatmill.load.batch import segments_from_end
from chatmill.load.plan import LoadPlan
from chatmill.load.source import conversation
from chatmill.show.dataset import tokenizer_metadata
from chatmill.tokenizer import Tokenizer, open_tokenizer


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
