"""Print what a run trains on in its first batch: the percentage of trained tokens, and a few answers as text."""

from __future__ import annotations

import json
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import numpy as np

from chatmill.load.batch import Batch, segments_from_end
from chatmill.load.loader import EpisodeLoader
from chatmill.load.plan import Cursor
from chatmill.load.source import DataSource
from chatmill.store import files
from chatmill.store.primer_cache import PrimerCache
from chatmill.train.distributed import World
from chatmill.train.evaluate import TokenText
from chatmill.train.run_dir import FIRST_BATCH, RunDir
from chatmill.train.score import end_ids
from chatmill.train.setup import TrainState
from chatmill.train.spikes import conversation_name
from chatmill.train.step import StepCounts
from chatmill.train.untrained import LIMIT, untrained_reason

SHOWN = 3
"""Number of answers to show."""
ANSWER, PROMPT = 160, 60
"""Maximum number of characters to show from an answer, and from the end of its prompt."""
TOKENS_PER_CHARACTER = 4
"""Upper bound on the number of tokens that encode one character."""
ENDING = 3
"""An answer is complete if one of its last `ENDING` tokens is an end token. Some formats add a line break after the end
token.
"""
SMALL_SHARE = 0.01
"""A run prints a warning if the share of trained tokens in the first batch is below this threshold."""


class TrainedSpan(NamedTuple):
    """Consecutive trained positions in one conversation: an answer or, without a loss mask, the whole conversation."""

    row: int
    start: int
    stop: int


def trained_spans(batch: Batch) -> list[TrainedSpan]:
    """Return the trained spans of a batch, ordered by row and position.

    y         - - a b - c d        spans  2-4  5-6  6-7
    segments  0 0 0 0 0 0 1
    """
    trained, segments = (np.asarray(part) for part in (batch.loss_mask, batch.segments))
    rows, length = trained.shape
    # Set the segment id to -1 at untrained positions and around each row, so that each trained span is a run of equal
    # ids.
    number = np.full((rows, length + 2), -1, dtype=np.int64)
    number[:, 1:-1] = np.where(trained, segments, -1)
    changes = number[:, 1:] != number[:, :-1]
    begins, ends = changes & (number[:, 1:] >= 0), changes & (number[:, :-1] >= 0)
    starts, stops = np.argwhere(begins).tolist(), np.argwhere(ends)[:, 1].tolist()
    return [TrainedSpan(row, start, stop) for (row, start), stop in zip(starts, stops, strict=True)]


@dataclass
class FirstBatch:
    """A description of the first batch: token counts over all ranks, trained answers from rank 0, and warnings."""

    step: int
    rows: int
    tokens: int
    trained: int
    untrained_rows: int
    answers: list[dict[str, str]] = field(default_factory=list)
    """Each answer has the keys `from` (its file and line), `prompt` (the end of the prompt) and `answer` (the trained
    text).
    """
    as_text: bool = False
    warnings: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        share = f"{self.trained / self.tokens:.1%}" if self.tokens else "0.0%"
        untrained = f", {self.untrained_rows:,} rows without trained tokens" if self.untrained_rows else ""
        lines = [
            f"first batch: {self.rows:,} rows, {self.tokens:,} tokens, {self.trained:,} trained ({share}){untrained}"
        ]
        if self.answers and not self.as_text:
            lines.append("  shown as token ids; chatmill train shows text if the dataset folder contains the tokenizer")
        for each in self.answers:
            lines += [f"  from    {each['from']}", f"  after   {each['prompt']}", f"  trains  {each['answer']}"]
        return [*lines, *(f"warning: {warning}" for warning in self.warnings)]

    def to_bytes(self) -> bytes:
        return (json.dumps(asdict(self), indent=1) + "\n").encode()


def show_first_batch(
    batch: Batch,
    counts: StepCounts,
    cursor: Cursor,
    state: TrainState,
    run_dir: RunDir,
    text: Callable[[], TokenText | None],
) -> float:
    """Print and save the token counts and some trained answers of the first batch; return the elapsed seconds. All
    ranks must call this function.

    `batch` contains the rows of this rank; `counts` contains totals over all ranks. Rank 0 calls `text` to open the
    tokenizer. A resumed run does not print answers.
    """
    began, is_new = time.perf_counter(), state.step == state.stage.start
    first = describe(batch, counts, state.loader, state.world, step=state.step + 1, text=text if is_new else None)
    if not first.trained and not state.config.post_training:
        reason = untrained_reason(state.loader, cursor)
        first.warnings.append(
            f"the first batch has no trained tokens: {reason}; the run stops after {LIMIT} steps without trained tokens"
        )
    run_dir.print("\n".join(first.lines()))
    if is_new and state.world.is_first:
        files.write_file(run_dir.folder / FIRST_BATCH, first.to_bytes(), overwrite=True)
    return time.perf_counter() - began


def describe(
    batch: Batch,
    counts: StepCounts,
    loader: EpisodeLoader,
    world: World,
    *,
    step: int,
    text: Callable[[], TokenText | None] | None,
) -> FirstBatch:
    """Return token counts and warnings for a batch, and some answers if `text` is given. All ranks must call this
    function.
    """
    spans = trained_spans(batch)
    rows = int((np.asarray(batch.episode_ids)[:, 0] >= 0).sum())
    sums = [int(total) for total in world.sums([rows, *_endings(spans, batch, closing_ids(loader.sources))])]
    first = FirstBatch(step, sums[0], int(counts.tokens), int(counts.trained), int(counts.untrained_rows))
    if world.is_first:
        decode: TokenText = _ids_text
        if text is not None:
            opened = text()
            first.as_text, decode = opened is not None, opened or decode
            chosen = [spans[(2 * part + 1) * len(spans) // (2 * SHOWN)] for part in range(min(SHOWN, len(spans)))]
            first.answers = [_shown(batch, span, loader, decode) for span in chosen]
        first.warnings = list(_warnings(first, Endings(*sums[1:]), loader, decode))
    return first


class Endings(NamedTuple):
    """Counts of trained spans: all spans, spans that end with an end token, and truncated spans."""

    spans: int
    ended: int
    """Number of spans that end with an end token; all spans if the data defines no end tokens."""
    cut: int
    """Number of spans that are truncated at the end of their row, without an end token."""


def _endings(spans: Sequence[TrainedSpan], batch: Batch, ends: set[int]) -> Endings:
    y = np.asarray(batch.y)
    last = (y[span.row, max(span.start, span.stop - ENDING) : span.stop].tolist() for span in spans)
    ended = [not ends or not ends.isdisjoint(ids) for ids in last]
    cut = sum(span.stop == y.shape[1] and not has_end for span, has_end in zip(spans, ended, strict=True))
    return Endings(len(spans), sum(ended), cut)


def closing_ids(sources: Sequence[DataSource]) -> set[int]:
    """Return the ids of all tokens that can end an answer: the end tokens and the special tokens of all sources."""
    ids = set(end_ids(sources))
    for source in sources:
        meta = source.dataset.meta if isinstance(source.dataset, PrimerCache) else source.dataset.metadata
        ids |= set() if meta is None else set(meta.special_token_ids.values())
    return ids


def _warnings(first: FirstBatch, endings: Endings, loader: EpisodeLoader, text: TokenText) -> Iterator[str]:
    if 0 < first.trained < SMALL_SHARE * first.tokens:
        yield (
            f"the loss mask includes only {first.trained / first.tokens:.2%} of the tokens in the first batch; "
            f"chatmill stats {loader.dataset_dir} shows the share of trained tokens in the dataset"
        )
    if endings.spans > endings.cut and not endings.ended:
        names = ", ".join(text([id]) for id in end_ids(loader.sources))
        yield f"no answer in the first batch ends with an end token ({names}): the model will not learn to stop"
    elif endings.cut and loader.config.use_loss_mask:
        yield (
            f"{endings.cut:,} of {endings.spans:,} answers in the first batch are truncated at the end of their row "
            f"and have no end token; prepare the data with a larger --max-tokens, or with --require-terminators"
        )


def _shown(batch: Batch, span: TrainedSpan, loader: EpisodeLoader, text: TokenText) -> dict[str, str]:
    row, start, stop = span
    segments, episodes = np.asarray(batch.segments)[row], np.asarray(batch.episode_ids)[row : row + 1]
    segment = int(segments[start])
    # Include x[start] in the prompt: it is the token before the first trained token.
    prompt = np.asarray(batch.x)[row, : start + 1][segments[: start + 1] == segment].tolist()
    answer = np.asarray(batch.y)[row, start:stop].tolist()
    trained = f"{len(answer):,} trained tokens"
    numbers = int(episodes[0, segment]), int(segments_from_end(episodes)[0, segment])
    return {
        "from": conversation_name(loader, *numbers, trained),
        "prompt": _shortened(prompt, text, start=0, end=PROMPT),
        "answer": _shortened(answer, text, start=ANSWER // 2, end=ANSWER // 2),
    }


def _shortened(ids: list[int], text: TokenText, *, start: int, end: int) -> str:
    """Decode tokens. If the text is long, return only its first tokens (up to `start` characters) and its last tokens
    (up to `end` characters).
    """
    if len(ids) <= TOKENS_PER_CHARACTER * (start + end) and len(text(ids)) <= start + end:
        return text(ids)
    return text(_fitting(ids, text, start)) + "…" + text(_fitting(ids[::-1], text, end)[::-1])


def _fitting(ids: list[int], text: TokenText, limit: int) -> list[int]:
    """Return the longest prefix of the token ids that decodes to at most `limit` characters."""
    counts = range(1, min(len(ids), TOKENS_PER_CHARACTER * limit) + 1)
    return ids[: bisect_right(counts, limit, key=lambda count: len(text(ids[:count])))]


def _ids_text(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))
