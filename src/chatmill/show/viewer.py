"""What the viewer's page may ask, answered as plain data: a page of episodes at a time, never all of them.

Every text in an answer was made harmless here, so that the page shows what it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from chatmill.errors import DataError, UsageError
from chatmill.load.config import LoadConfig
from chatmill.rows import NO_MESSAGE, OWN_ID, Index, Part, Role, Rows, Rule
from chatmill.show.dataset import DatasetView
from chatmill.show.explain import explain, origin_of
from chatmill.show.index import MOST_SOURCES, Filter, SearchHits, SplitIndex, sources_of
from chatmill.show.index_build import IndexBuilder
from chatmill.show.schedule import OrderView, rows_at, timeline
from chatmill.show.search import locate, needle_of
from chatmill.show.source_record import raw_record
from chatmill.show.text import visible
from chatmill.show.turns import first_words, is_padding, turns

PAGE = 50
"""Episodes of a page of the list, unless asked otherwise."""
MOST = 200
TOKENS = 2000
"""Tokens of an episode that are sent at a time."""
MAP = 96
"""Pieces that an episode is drawn in, in a line."""
KNOWN_ROLES = [role.name.lower() for role in Role if role != Role.NONE]


class Viewer:
    """A dataset behind the page. It reads and answers; nothing that it is asked changes anything."""

    def __init__(
        self,
        shown: DatasetView,
        *,
        cache: Path,
        config: LoadConfig | None = None,
        logs: Sequence[Path] = (),
        record_folders: Sequence[Path] = (),
    ) -> None:
        self._shown = shown
        self._schedule = OrderView(shown.path, config or LoadConfig())
        self._logs = list(logs)
        self._folders = list(record_folders)
        self.builder = IndexBuilder(shown, cache)
        self._mask = lru_cache(maxsize=8)(lambda index, wanted, filtered: index.mask(wanted))

    def about(self) -> dict[str, Any]:
        """The dataset, its splits and what can be asked of it."""
        dataset, config = self._shown.dataset, self._schedule.config
        return {
            "name": visible(self._shown.path.resolve().name, limit=100),
            "path": visible(str(self._shown.path), limit=300),
            "sha256": dataset.sha256,
            "tokenizer": None if self._shown.tokenizer is None else visible(self._shown.tokenizer.name, limit=100),
            "without_text": self._shown.without_text,
            "splits": {
                name: {
                    "episodes": len(dataset[name]),
                    "tokens": dataset[name].num_tokens,
                    "sources": self.sources(name),
                }
                for name in dataset.splits
            },
            "roles": KNOWN_ROLES,
            "rules": [rule.name.lower() for rule in Rule],
            "order": {"mode": config.batch_sampling_mode, "seed": config.epoch_seed, "packing": config.packing},
            "logs": [visible(log.name, limit=100) for log in self._logs],
            "index": self.progress(),
        }

    def sources(self, split: str) -> list[str]:
        """The names of the sources that a filter may choose, as they are shown."""
        names = [visible(source, limit=80) for source in sources_of(self._shown.dataset[split])]
        return names if len(names) <= MOST_SOURCES else [*names[: MOST_SOURCES - 1], "(any other)"]

    def progress(self) -> dict[str, Any]:
        """How far the index of each split is."""
        return {
            name: {
                "episodes": index.count,
                "filtered": index.filtered,
                "searched": index.searched,
                "error": None if index.error is None else visible(index.error, limit=300),
                **{name: _names(index, name, kind) for name, kind in (("roles", Role), ("rules", Rule))},
            }
            for name, index in self.builder.indexes.items()
        }

    # The list.

    def episodes(self, split: str, wanted: Filter, query: str, start: int, limit: int = PAGE) -> dict[str, Any]:
        """Some episodes from `start` on that the filter wants and that hold the query.

        `next` is where to go on, None at the end; `waiting` says that the index is not as far yet.
        """
        count, index = len(self._shown.dataset[split]), self.builder.indexes[split]
        start, limit = max(0, start), min(max(1, limit), MOST)
        found, known, matching = self._matching(split, index, wanted, query, start, limit)
        more = not found.ended or known < count
        return {
            "episodes": [self._line(split, number, query) for number in found.episodes],
            "next": found.after if more and found.after < count else None,
            "waiting": found.ended and known < count,
            "looked": found.after if not found.ended else known,
            "of": count,
            "matching": matching,
        }

    def _matching(
        self, split: str, index: SplitIndex, wanted: Filter, query: str, start: int, limit: int
    ) -> tuple[SearchHits, int, int | None]:
        """What was found, how many episodes are known well enough, and how many match, if that is known."""
        count = index.count
        if not query and wanted.is_open:
            stop = min(count, start + limit)
            return SearchHits(list(range(min(start, stop), stop)), stop, ended=stop == count), count, count
        if index.error is not None:
            raise DataError(f"the index could not be made: {index.error}")
        if query and self._shown.without_text is not None:
            raise DataError(f"there is no text to search: {self._shown.without_text}")
        kept = None if wanted.is_open else self._mask(index, wanted, index.filtered)
        if query:
            return index.search(needle_of(query), start, limit, kept=kept), index.searched, None
        assert kept is not None
        here = np.flatnonzero(kept[start:])[: limit + 1] + start
        after = int(here[limit]) if len(here) > limit else len(kept)
        total = int(np.count_nonzero(kept)) if len(kept) == count else None
        return SearchHits(here[:limit].tolist(), after, ended=len(here) <= limit), len(kept), total

    def _line(self, split: str, number: int, query: str) -> dict[str, Any]:
        """An episode in the list."""
        row = self._shown.row(split, number)
        trained = int(row.spans["length"][row.spans["weight"] > 0].sum())
        file, line, _ = origin_of(row, 0) if len(row.origins) else (None, None, None)
        place = None if file is None else f"{visible(Path(file).name, limit=80)}:{line}"
        said: dict[str, Any] = {
            "episode": number,
            "tokens": len(row.ids),
            "trained": trained,
            "segments": len(row.origins),
            "place": place,
            "map": drawn(row),
        }
        if query and (found := locate(row.ids.tolist(), self._shown.text, query)) is not None:
            return {**said, "before": found.before, "found": found.found, "after": found.after}
        return {**said, "words": first_words(row, self._shown.text, 120)}

    # One episode.

    def episode(self, split: str, number: int, start: int, query: str) -> dict[str, Any]:
        """An episode: its segments and turns, and its tokens from `start` on, some at a time."""
        row = self._shown.row(split, number)
        start = min(max(0, start), len(row.ids))
        stop = min(len(row.ids), start + TOKENS)
        ids = row.ids[start:stop].tolist()
        found = locate(row.ids.tolist(), self._shown.text, query) if query and start == 0 else None
        return {
            "split": split,
            "episode": number,
            "tokens": len(row.ids),
            "trained": int(row.spans["length"][row.spans["weight"] > 0].sum()),
            "segments": [self._segment(row, segment) for segment in range(len(row.origins))],
            "turns": [
                {**asdict(turn), "role": turn.name, "part": None}
                for segment in range(len(row.origins))
                for turn in turns(row, segment)
                if turn.stop > start and turn.start < stop
            ],
            "spans": self._spans(row, start, stop),
            "start": start,
            "stop": stop,
            "ids": ids,
            "texts": self._shown.text.tokens(ids),
            "map": drawn(row),
            "found": None if found is None else [found.start, found.stop],
        }

    def _segment(self, row: Rows, segment: int) -> dict[str, Any]:
        file, line, source = origin_of(row, segment)
        return {
            "file": None if file is None else visible(file, limit=300),
            "line": line,
            "source": None if source is None else visible(source, limit=80),
            "start": int(row.segment_start[segment]),
            "stop": int(row.segment_start[segment + 1]),
            "padding": is_padding(row, segment),
        }

    def _spans(self, row: Rows, start: int, stop: int) -> list[dict[str, Any]]:
        """The spans that have tokens from `start` to `stop`."""
        first = int(np.searchsorted(row.span_start, start, side="right")) - 1
        last = int(np.searchsorted(row.span_start, stop, side="left"))
        found = []
        for at in range(max(0, first), last):
            span = row.spans[at]
            target = None if span["target"] == OWN_ID else int(span["target"])
            found.append(
                {
                    "start": int(row.span_start[at]),
                    "stop": int(row.span_start[at + 1]),
                    "role": Role(span["role"]).name.lower(),
                    "part": Part(span["part"]).name.lower(),
                    "rule": Rule(span["rule"]).name.lower(),
                    "weight": float(span["weight"]),
                    "message": None if span["message"] == NO_MESSAGE else int(span["message"]),
                    "target": target,
                    "target_text": None if target is None else self._shown.text.token(target),
                }
            )
        return found

    def explain(self, split: str, number: int, token: int) -> dict[str, Any]:
        found = asdict(explain(self._shown, split, number, token))
        for name in ("file", "source"):
            found[name] = None if found[name] is None else visible(found[name], limit=300)
        return found

    def record(self, split: str, number: int, segment: int) -> dict[str, Any]:
        """The record that a segment was made of, as it stands in its file now."""
        row = self._shown.row(split, number)
        if not 0 <= segment < len(row.origins):
            raise UsageError(f"episode {number} has no segment {segment}; it has {len(row.origins)}")
        file, line, _ = origin_of(row, segment)
        if file is None or line is None:
            raise UsageError("the dataset does not say where this came from")
        key = row.origins[segment]["key"].tolist()
        found = raw_record(file, line, shape=self._shown.shape_of(file), key=key, folders=self._folders)
        return {"place": f"{visible(file, limit=300)}:{line}", **asdict(found)}

    # When episodes come.

    def order(self, split: str, seed: int, epoch: int, start: int) -> dict[str, Any]:
        """Some positions of an epoch, and what each of their episodes is about."""
        page = self._schedule.page(split, seed=seed, epoch=epoch, start=start, limit=PAGE)
        return {**asdict(page), "episodes": [self._line(split, number, "") for number in page.episodes]}

    def whereabouts(self, split: str, number: int, seed: int, epoch: int) -> dict[str, Any]:
        self._shown.row(split, number)
        return asdict(self._schedule.find(split, number, seed=seed, epoch=epoch))

    def audit(self, log: int, start: int) -> dict[str, Any]:
        """Some lines of an audit log."""
        lines = timeline(self._log(log))
        steps = [int(line.fields["stop_step"]) for line in lines if line.fields.get("stop_step", "").isdigit()]
        shown = lines[max(0, start) : max(0, start) + MOST]
        return {"lines": [asdict(line) for line in shown], "of": len(lines), "steps": max(steps, default=0)}

    def step(self, log: int, step: int) -> dict[str, Any]:
        """Which rows a run was handed out at a step."""
        found = rows_at(self._log(log), step, self._shown.path)
        rows = [[self._line(found.split, episode, "") for episode in row] for row in found.rows[:MOST]]
        return {**asdict(found), "rows": rows, "of": len(found.rows)}

    def _log(self, number: int) -> Path:
        if not 0 <= number < len(self._logs):
            raise UsageError(f"there is no audit log {number}; {len(self._logs)} were named")
        return self._logs[number]


def _names(index: SplitIndex, column: str, kind: type[Role] | type[Rule]) -> list[str] | None:
    """The roles or rules that occur in a split; None as long as not all of it is known."""
    if index.filtered < index.count:
        return None
    bits = int(np.bitwise_or.reduce(index.columns[column])) if index.count else 0
    return [each.name.lower() for each in kind if each < 32 and bits >> each & 1]


def drawn(row: Rows) -> list[list[Any]]:
    """A row as a strip: runs of (role, trained, tokens); of one with very many only so many places are looked at."""
    spans = row.spans
    if not len(spans):
        return []
    code = spans["role"].astype(np.int64) * 2 + (spans["weight"] > 0)
    sizes: Index = spans["length"].astype(np.int64)
    if len(spans) > MAP:
        places = (np.arange(MAP) * 2 + 1) * len(row.ids) // (2 * MAP)
        code = code[np.searchsorted(row.span_start, places, side="right") - 1]
        sizes = np.diff(np.arange(MAP + 1, dtype=np.int64) * len(row.ids) // MAP)
    edges = [0, *(np.flatnonzero(np.diff(code)) + 1).tolist(), len(code)]
    return [
        [Role(int(code[start]) // 2).name.lower(), bool(code[start] % 2), int(sizes[start:stop].sum())]
        for start, stop in pairwise(edges)
    ]


def filter_from(
    *,
    roles: Sequence[str] = (),
    rules: Sequence[str] = (),
    source: str = "",
    sources: Sequence[str] = (),
    **bounds: Any,
) -> Filter:
    """A filter of names; `UsageError` for one that there is not."""
    try:
        role_bits = sum({1 << Role[role.upper()] for role in roles if role != "none"})
        rule_bits = sum({1 << Rule[rule.upper()] for rule in rules})
        number = sources.index(source) if source else None
    except (KeyError, ValueError) as error:
        raise UsageError(f"no such role, rule or source: {visible(str(error), limit=80)}") from None
    return Filter(roles=role_bits, rules=rule_bits, source=number, **bounds)
