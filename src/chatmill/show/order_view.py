"""Show the position of an episode in an epoch, its packed row, and the rows of a training step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from chatmill.audit import LogLine, ReplayedStep, TornLine, read_log, replay_step
from chatmill.errors import DataError, UsageError, one_line
from chatmill.load.batch import segments_from_end
from chatmill.load.config import LoadConfig
from chatmill.load.plan import WINDOW, Cursor, LoadPlan, datasets_hash
from chatmill.load.source import DataSource, conversation, open_sources
from chatmill.plain_file import local_path
from chatmill.remote.urls import Place
from chatmill.rows import Index, offsets
from chatmill.show.dataset import dataset_text
from chatmill.show.mixed import tokenizer_metadata
from chatmill.show.row_view import preview
from chatmill.store.layout import Shard
from chatmill.tokenizer import Tokenizer, open_tokenizer

NEIGHBOURS = 3
PREVIEW = 60


class OrderView:
    """Computes the order of a dataset's episodes with a load config, for any seed and epoch."""

    def __init__(self, path: Place, config: LoadConfig, sources: Sequence[str] | None = None) -> None:
        """`sources` are the names of datasets in a folder. If the config has no mix, the sources have equal weights."""
        # Override padding and the loss mask: some datasets lack them, and the order does not depend on them. Keep an
        # incomplete last batch, so that every episode has a row.
        self.config = replace(config, pad_token_id=0, use_loss_mask=False, epoch_drop_last=False)
        if sources is None:
            self.config = replace(self.config, mix_sft=None, mix_epochs=None)
        elif config.mix is None:
            self.config = replace(self.config, mix_sft=dict.fromkeys(sources, 1.0))
        self._path = path
        self.plan = lru_cache(maxsize=4)(self._plan)

    def _plan(self, split: str, seed: int) -> LoadPlan:
        sources, config = open_sources(self._path, replace(self.config, epoch_seed=seed), stored_mix=False)
        return LoadPlan(sources, config, split)

    def page(self, split: str, *, seed: int, epoch: int, start: int, limit: int) -> dict[str, Any]:
        """Return `limit` episodes of an epoch from position `start`; `length` is None if the order is infinite."""
        plan = self.plan(split, seed)
        length = plan.order.length
        stop = start + limit if length is None else min(start + limit, length)
        episodes = plan.episodes(plan.order.block(epoch, start, max(start, stop))).tolist()
        return {**_order(plan, seed, epoch), "length": length, "start": start, "episodes": episodes}

    def find(self, split: str, episode: int, *, seed: int, epoch: int) -> dict[str, Any]:
        """Return the position, the neighbors, the window and the row of an episode in an epoch."""
        plan = self.plan(split, seed)
        position = plan.order.find(epoch, plan.ordinal(episode))
        window, row, row_episodes = position // WINDOW, position % WINDOW, [episode]
        if self.config.packing != "none":
            row, row_episodes = _packed_row(plan, episode, epoch, window)
        first, length = max(0, position - NEIGHBOURS), plan.order.length or 0
        around = plan.episodes(plan.order.block(epoch, first, min(length, position + NEIGHBOURS + 1))).tolist()
        return {
            **_order(plan, seed, epoch),
            "position": position,
            "before": around[: position - first],
            "after": around[position - first + 1 :],
            "window": window,
            "row": row,
            "shares_row_with": [each for each in row_episodes if each != episode],
        }


def _order(plan: LoadPlan, seed: int, epoch: int) -> dict[str, Any]:
    return {"order": plan.order.name, "seed": seed, "epoch": epoch}


def _packed_row(plan: LoadPlan, episode: int, epoch: int, window: int) -> tuple[int, list[int]]:
    """Return the index, within a window, of the packed row that contains an episode, and all episodes of this row."""
    for step in plan.steps(Cursor(epoch=epoch, window=window)):
        places = np.flatnonzero(step.episodes == episode)
        if len(places):
            row = int(np.searchsorted(step.first, places[0], side="right")) - 1
            return step.at.row + row, step.episodes[step.first[row] : step.first[row + 1]].tolist()
    raise AssertionError("the number of steps is unlimited")


# Audit logs.


def audit_logs(places: Sequence[Path]) -> list[Path]:
    """Return the paths of the given log files, and of the log files in the given folders."""
    logs: list[Path] = []
    for place in places:
        here = sorted(place.glob("*.log")) if local_path(place).is_dir() else [place]
        if not here or not all(log.is_file() for log in here):
            raise UsageError(f"{place}: is not an audit log or a folder with audit logs")
        logs += here
    return logs


def timeline(log: Path) -> list[dict[str, Any]]:
    """Return all lines of an audit log; `abandoned` is true for lines between a checkpoint and the `resume` line of a
    run that continued from the checkpoint.
    """
    lines: list[dict[str, Any]] = []
    numbers: dict[str, int] = {}
    for number, line in enumerate(read_log(log), 1):
        if isinstance(line, TornLine):
            time, action, fields = "", "torn", {"why": line.why}
        else:
            assert isinstance(line, LogLine)
            time, action, fields = line.time, one_line(line.action, 40), dict(line.fields)
            if line.action == "resume" and (head := numbers.get(line.fields.get("head", ""))) is not None:
                for abandoned in lines[head:]:
                    abandoned["abandoned"] = True
            numbers[line.sha256] = number
        fields = {name: one_line(value, 300) for name, value in fields.items()}
        lines.append({"number": number, "time": time, "action": action, "fields": fields, "abandoned": False})
    return lines


def rows_at(log: Path, step: int, dataset: Place, sources: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the episodes in each row of a step; `line` is the number of the log line with their digest.

    Episode numbers refer to the whole dataset, even if the run mixed only some of its sources. If `dataset` is a folder
    of datasets, `sources` are their names, and their episodes are numbered consecutively.
    """
    replayed = replay_step(log, step, dataset)
    mixed = tuple(source.name for source in replayed.plan.sources)
    if sources is not None and mixed != tuple(sources):
        raise DataError(
            f"{log}: the run mixed the datasets {', '.join(map(one_line, mixed))}; "
            "pass the folder that contains them, and pass the config of the run as --config"
        )
    episodes = in_whole(replayed.plan.sources, replayed.plan.split, replayed.step.episodes)
    rows = [episodes[start:stop].tolist() for start, stop in pairwise(replayed.step.first.tolist())]
    epoch, split = replayed.step.at.epoch, replayed.plan.split
    return {"step": step, "epoch": epoch, "split": split, "line": replayed.line, "rows": rows}


def in_whole(sources: Sequence[DataSource], split: str, episodes: Index) -> Index:
    """Convert episode indices within some sources of a dataset to indices in the whole dataset.

    If the sources are whole datasets, the indices are returned unchanged.
    """
    whole = sources[0].dataset.whole
    if whole is None:
        return episodes
    shards = whole[split].shards
    first = dict(zip((shard.folder for shard in shards), _starts(shards), strict=False))
    mine = [shard for source in sources for shard in source.episodes(split).shards]
    start = _starts(mine)
    at = np.searchsorted(start, episodes, side="right") - 1
    return episodes - start[at] + np.array([first[shard.folder] for shard in mine], dtype=np.int64)[at]


def _starts(shards: Sequence[Shard]) -> Index:
    """Return the index of each shard's first episode, followed by the total number of episodes."""
    return offsets(np.array([shard.num_episodes for shard in shards], dtype=np.int64))


# The rows of a training step.


class ReplayedRow(NamedTuple):
    """A row without padding; `mask` is 1 for trained tokens."""

    episodes: list[int]
    origins: list[str]
    ids: list[int]
    mask: list[int]
    segments: list[int]
    text: str | None


def replayed_rows(replayed: ReplayedStep, tokenizer: Tokenizer | None) -> Iterator[ReplayedRow]:
    """Yield the rows of a step, with their text if the tokenizer is known."""
    batch = replayed.batch
    from_end = segments_from_end(batch.episode_ids)
    for number in range(replayed.step.num_rows):
        episodes = [episode for episode in batch.episode_ids[number].tolist() if episode >= 0]
        real = batch.segments[number] < len(episodes)
        ids, segments = batch.x[number][real].tolist(), batch.segments[number][real].tolist()
        mask = [0, *batch.loss_mask[number][real].astype(int).tolist()]
        # A full row has one more token than x; the id of this last token is known only if the token is predicted.
        if real.all() and mask[-1]:
            ids.append(int(batch.y[number][-1]))
            segments.append(segments[-1])
        text = None if tokenizer is None else tokenizer.decode(ids)
        origins = [_origin(replayed.plan, *each) for each in zip(episodes, from_end[number].tolist(), strict=False)]
        yield ReplayedRow(episodes, origins, ids, mask[: len(ids)], segments, text)


def _origin(plan: LoadPlan, episode: int, segment: int) -> str:
    origin = conversation(plan.sources, plan.split, episode, segment)
    assert origin is not None
    name = f"{one_line(origin.source.name)} " if origin.source.name else ""
    return name + one_line(origin.place or f"{plan.split} {origin.episode}")


def replay_tokenizer(plan: LoadPlan, spec: str | None) -> Tokenizer | None:
    """Open the tokenizer `spec`. If `spec` is None, open the tokenizer `bytes` if the dataset was built with it;
    otherwise, return None.
    """
    source = plan.sources[0]
    built_with, control, besides, name = tokenizer_metadata(source.dataset)
    if built_with is None:
        # The dataset does not record a tokenizer, so `spec` cannot be checked.
        return None if spec is None else open_tokenizer(spec)
    if spec is None and name not in (None, "bytes"):
        return None
    opened = open_tokenizer(spec or "bytes", control=control, besides=besides, add_tokens=True)
    if opened.sha256 == built_with:
        return opened
    if spec is not None:
        raise UsageError(
            f"{source.path}: was not built with the tokenizer {one_line(spec)}; "
            "pass the tokenizer that it was built with"
        )
    return None


def step_previews(
    dataset: Place,
    places: Iterable[tuple[int, int]],
    *,
    sha256: str,
    mix_sft: Mapping[str, float] | None,
    token_dtype: str | None = None,
) -> list[tuple[str | None, str]]:
    """Return the origin (file:line, or None if unknown) and the first words of each conversation in `places`.

    Each place is a pair (episode, segment); segment -1 is the last segment of the episode.
    """
    sources, _ = open_sources(dataset, LoadConfig(pad_token_id=0, mix_sft=mix_sft, token_dtype=token_dtype))
    if (own := datasets_hash(sources)) != sha256:
        raise DataError(
            f"{dataset}: has the hash {own[:12]}…, but the run's data has the hash {sha256[:12]}…; "
            "pass the right dataset with --dataset"
        )
    texts = {source.path: dataset_text(source.path) for source in sources}
    previews = []
    for episode, segment in places:
        origin = conversation(sources, "train", episode, segment)
        if origin is None:
            raise DataError(f"{dataset}: has no episode {episode}; the run's log lines are damaged")
        previews.append((origin.place, preview(origin.row, texts[origin.source.path], PREVIEW)))
    return previews
