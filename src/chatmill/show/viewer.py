"""The viewer's JSON API. Long lists are returned one page at a time.

All text is escaped on the server, so that the page can display it unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import DataError, UsageError, one_line
from chatmill.load.config import LoadConfig
from chatmill.rows import Index, Role, Rows, Rule
from chatmill.show.dataset import DatasetView, RecordPreview
from chatmill.show.explain import explain_token
from chatmill.show.index import MAX_SOURCES, SORTS, Filter, SearchHits, SplitIndex, source_bit, sources_of
from chatmill.show.index_build import IndexBuilder
from chatmill.show.near import MIN_SIMILARITY, NearDuplicateFinder
from chatmill.show.order_view import OrderView, rows_at, timeline
from chatmill.show.row_view import (
    is_padding,
    origin_of,
    part_name,
    preview,
    segment_json,
    span_views,
    trained_tokens,
    turn_name,
    turns,
)
from chatmill.show.source_record import SourceRecord, source_record
from chatmill.show.text import folded_query, locate

PAGE = 50
"""Default number of episodes per page of the list."""
MAX_PAGE = 200
"""Maximum number of episodes, rows or lines per page."""
TOKENS = 2000
"""Maximum number of tokens of an episode per response."""
STRIP = 96
"""Maximum number of samples in the colored strip that summarizes an episode."""


class Viewer:
    """The dataset that the viewer shows; its methods implement a read-only JSON API."""

    def __init__(
        self,
        view: DatasetView,
        *,
        cache: Path,
        config: LoadConfig | None = None,
        logs: Sequence[Path] = (),
        record_folders: Sequence[Path] = (),
        losses: NDArray[np.float32] | None = None,
    ) -> None:
        """`losses` contains the loss of each episode in the train split, as returned by `run_losses`."""
        self._view = view
        self._order = OrderView(
            view.path, replace(config or LoadConfig(), token_dtype=view.dataset.token_dtype), view.sources
        )
        self._logs = list(logs)
        self._folders = list(record_folders)
        self.builder = IndexBuilder(view, cache)
        self._near = NearDuplicateFinder(view)
        if losses is not None:
            self.builder.indexes["train"].losses = losses
        self._sorted = lru_cache(maxsize=2)(SplitIndex.order)
        self._mask = lru_cache(maxsize=8)(lambda index, wanted, filtered: index.mask(wanted))

    def about(self) -> dict[str, Any]:
        """Return information about the dataset and its splits, and the values that filters accept."""
        view, dataset, config = self._view, self._view.dataset, self._order.config
        splits = {
            name: {
                "episodes": len(dataset[name]),
                "tokens": dataset[name].num_tokens,
                "sources": self.sources(name),
                "sorts": self._sorts(name),
            }
            for name in dataset.splits
        }
        return {
            "name": one_line((view.title.resolve() if isinstance(view.title, Path) else view.title).name, 100),
            "path": one_line(str(view.title), 300),
            "preview": None if view.preview is None else _preview(view.preview),
            "sha256": dataset.sha256,
            "tokenizer": None if view.tokenizer is None else one_line(view.tokenizer.name, 100),
            "without_text": view.without_text,
            "splits": splits,
            "roles": [role.name.lower() for role in Role if role != Role.NONE],
            "rules": [rule.name.lower() for rule in Rule],
            "order": {"mode": config.batch_sampling_mode, "seed": config.epoch_seed, "packing": config.packing},
            "logs": [one_line(log.name, 100) for log in self._logs],
            "index": self.progress(),
        }

    def sources(self, split: str) -> list[str]:
        """Return the source names that the source filter accepts."""
        names = [one_line(source, 80) for source in sources_of(self._view.dataset[split])]
        return names if len(names) <= MAX_SOURCES else [*names[: MAX_SOURCES - 1], "(any other)"]

    def _sorts(self, split: str) -> list[str]:
        has_losses = self.builder.indexes[split].losses is not None
        return [name for name, sort in SORTS.items() if has_losses or sort.column != "loss"]

    def progress(self) -> dict[str, Any]:
        """Return the progress of indexing for each split."""
        return {
            split: {
                "episodes": index.count,
                "filtered": index.filtered,
                "searched": index.searched,
                "error": None if index.error is None else one_line(index.error, 300),
                "roles": _names(index, "roles", Role),
                "rules": _names(index, "rules", Rule),
            }
            for split, index in self.builder.indexes.items()
        }

    # The list.

    def episodes(
        self,
        split: str,
        *,
        role: Sequence[str] = (),
        rule: Sequence[str] = (),
        source: str = "",
        q: str = "",
        sort: str = "",
        start: int = 0,
        limit: int = PAGE,
        **bounds: Any,
    ) -> dict[str, Any]:
        """List the episodes that contain the text `q` and pass the filter; `bounds` are fields of `Filter`.

        The list is in dataset order or sorted by one of `SORTS`, and starts at position `start`. In the result, `next`
        is the position of the next page, or None at the end. `waiting` is true if episodes that are not indexed yet may
        be added to the list.
        """
        count, index = len(self._view.dataset[split]), self.builder.indexes[split]
        try:
            wanted = Filter(
                roles=sum({1 << Role[name.upper()] for name in role if name != "none"}),
                rules=sum({1 << Rule[name.upper()] for name in rule}),
                sources=source_bit(self.sources(split).index(source)) if source else 0,
                **bounds,
            )
        except (KeyError, ValueError) as error:
            raise UsageError(f"unknown role, rule or source: {one_line(str(error), 80)}") from None
        if sort and sort not in self._sorts(split):
            raise UsageError(f"unknown sort order {one_line(sort, 80)}; expected {', '.join(self._sorts(split))}")
        start, limit = min(max(0, start), count), min(max(1, limit), MAX_PAGE)
        hits, known, matching = self._matching(index, wanted, q, sort, start, limit)
        more = not hits.ended or known < count
        return {
            "episodes": [self._summary(split, number, q) for number in hits.episodes],
            "next": hits.after if more and hits.after < count else None,
            "waiting": hits.ended and known < count,
            "looked": hits.after if not hits.ended else known,
            "of": count,
            "matching": matching,
        }

    def _matching(
        self, index: SplitIndex, wanted: Filter, q: str, sort: str, start: int, limit: int
    ) -> tuple[SearchHits, int, int | None]:
        """Return a page of matching episodes, the number of indexed episodes, and the total number of matches, if
        known.
        """
        count, is_open = index.count, wanted == Filter()
        if not q and not sort and is_open:
            stop = min(count, start + limit)
            return SearchHits(list(range(start, stop)), stop, ended=stop == count), count, count
        if index.error is not None:
            raise DataError(f"the index could not be built: {index.error}")
        if q and self._view.without_text is not None:
            raise DataError(f"no text to search: {self._view.without_text}")
        # The cache key includes the number of indexed episodes, because the filter mask gets longer as the index grows.
        kept = None if is_open else self._mask(index, wanted, index.filtered)
        if sort:
            # The list is empty until all episodes are indexed, because sorting requires all of them.
            known = index.searched if q else index.filtered
            if known < count:
                return SearchHits([], start, ended=True), known, None
            order = self._sorted(index, sort)
            if q:
                return index.search_in_order(folded_query(q), order, start, limit, kept=kept), known, None
            positions = np.arange(count) if kept is None else np.flatnonzero(kept[order])
            first = int(np.searchsorted(positions, start))
            after = int(positions[first + limit]) if first + limit < len(positions) else count
            page = order[positions[first : first + limit]].tolist()
            return SearchHits(page, after, ended=after == count), known, len(positions)
        if q:
            # Read the count first, because the search may miss episodes that are indexed while it runs.
            known = index.searched
            return index.search(folded_query(q), start, limit, kept=kept), known, None
        assert kept is not None
        numbers = np.flatnonzero(kept[start:])[: limit + 1] + start
        after = int(numbers[limit]) if len(numbers) > limit else len(kept)
        total = int(np.count_nonzero(kept)) if len(kept) == count else None
        return SearchHits(numbers[:limit].tolist(), after, ended=len(numbers) <= limit), len(kept), total

    def _summary(self, split: str, number: int, q: str = "") -> dict[str, Any]:
        """Return the entry of an episode in the list, with the text around the search match or with a preview."""
        row = self._view.row(split, number)
        file, line, _ = origin_of(row, 0) if len(row.origins) else (None, None, None)
        text = {"words": preview(row, self._view.text, 120)}
        if q and (match := locate(row.ids.tolist(), self._view.text, q)) is not None:
            text = {"before": match.before, "found": match.match, "after": match.after}
        return {
            "episode": number,
            "tokens": len(row.ids),
            "trained": trained_tokens(row),
            "segments": len(row.origins),
            "loss": self._loss(split, number),
            "place": None if file is None else f"{one_line(Path(file).name, 80)}:{line}",
            "map": strip(row),
            **text,
        }

    def _loss(self, split: str, number: int) -> float | None:
        """Return the loss of an episode in the run given by `--run`, or None."""
        losses = self.builder.indexes[split].losses
        return None if losses is None or not np.isfinite(losses[number]) else float(losses[number])

    # One episode.

    def episode(self, split: str, number: int, start: int, q: str) -> dict[str, Any]:
        """Return the segments and turns of an episode, and up to TOKENS of its tokens, starting at `start`."""
        row, text = self._view.row(split, number), self._view.text
        start = min(max(0, start), len(row.ids))
        stop = min(len(row.ids), start + TOKENS)
        ids = row.ids[start:stop].tolist()
        match = locate(row.ids.tolist(), text, q) if q and start == 0 else None
        first = int(np.searchsorted(row.span_start, start, side="right")) - 1
        last = int(np.searchsorted(row.span_start, stop, side="left"))
        spans = [
            {
                **span.to_json(),
                "name": part_name(row, span, text),
                "target_text": None if span.target is None else text.token(span.target),
            }
            for span in span_views(row, max(0, first), last)
        ]
        return {
            "split": split,
            "episode": number,
            "tokens": len(row.ids),
            "trained": trained_tokens(row),
            "loss": self._loss(split, number),
            "segments": [
                {
                    **_escaped(segment_json(row, segment), file=300, source=80),
                    "padding": is_padding(row, segment),
                    "entry": _exclude_entry(row, segment),
                }
                for segment in range(len(row.origins))
            ],
            "turns": [
                {**asdict(turn), "role": turn.role.name.lower(), "name": turn_name(row, turn, text)}
                for segment in range(len(row.origins))
                for turn in turns(row, segment)
                if turn.stop > start and turn.start < stop
            ],
            "spans": spans,
            "start": start,
            "stop": stop,
            "ids": ids,
            "texts": text.tokens(ids),
            "map": strip(row),
            "found": None if match is None else [match.start, match.stop],
        }

    def explain(self, split: str, number: int, token: int) -> dict[str, Any]:
        return _escaped(asdict(explain_token(self._view, split, number, token)), file=300, source=300)

    def record(self, split: str, number: int, segment: int) -> dict[str, Any]:
        """Read the record of a segment again from its input file."""
        row = self._view.row(split, number)
        if not 0 <= segment < len(row.origins):
            raise UsageError(f"episode {number} has no segment {segment}; expected a segment below {len(row.origins)}")
        record = self._source_record(row, segment)
        return {"place": f"{one_line(record.name, 300)}:{record.line}", **record.for_display()}

    def lines(self, split: str, number: int) -> dict[str, Any]:
        """Return the records of an episode as JSON lines for export; the lines are not escaped."""
        row = self._view.row(split, number)
        segments = [segment for segment in range(len(row.origins)) if not is_padding(row, segment)]
        return {"lines": [self._source_record(row, segment).for_export() for segment in segments]}

    def _source_record(self, row: Rows, segment: int) -> SourceRecord:
        file, line, source = origin_of(row, segment)
        if file is None or line is None:
            raise UsageError("the dataset does not record where this conversation came from")
        shape, options = self._view.shape_of(file, source)
        key = row.origins[segment]["key"].tolist()
        return source_record(file, line, shape=shape, options=options, key=key, folders=self._folders)

    def near(self, split: str, number: int) -> dict[str, Any]:
        """Return the near-duplicates of an episode among the first `compared` episodes of its split."""
        result = self._near.find(split, number)
        episodes = [{**self._summary(split, number), "similarity": value} for number, value in result.episodes]
        count = len(self._view.dataset[split])
        return {"compared": result.compared, "of": count, "least": MIN_SIMILARITY, "episodes": episodes}

    # Methods for the order of episodes and for audit logs.

    def order(self, split: str, seed: int, epoch: int, start: int) -> dict[str, Any]:
        """Return one page of the episodes of an epoch, in the order in which the epoch visits them."""
        page = self._order.page(split, seed=seed, epoch=epoch, start=start, limit=PAGE)
        return {**page, "episodes": [self._summary(split, number) for number in page["episodes"]]}

    def whereabouts(self, split: str, number: int, seed: int, epoch: int) -> dict[str, Any]:
        """Return the position of an episode in an epoch, and the episodes before and after it."""
        self._view.row(split, number)
        return self._order.find(split, number, seed=seed, epoch=epoch)

    def audit(self, log: int, start: int) -> dict[str, Any]:
        """Return a page of lines of an audit log."""
        lines = timeline(self._log(log))
        steps = [int(stop) for line in lines if (stop := line["fields"].get("stop_step", "")).isdigit()]
        page = lines[max(0, start) :][:MAX_PAGE]
        return {"lines": page, "of": len(lines), "steps": max(steps, default=0)}

    def step(self, log: int, step: int) -> dict[str, Any]:
        """Return the rows that a run loaded at a step."""
        logged = rows_at(self._log(log), step, self._view.path, self._view.sources)
        rows = [[self._summary(logged["split"], number) for number in row] for row in logged["rows"][:MAX_PAGE]]
        return {**logged, "rows": rows, "of": len(logged["rows"])}

    def _log(self, number: int) -> Path:
        if not 0 <= number < len(self._logs):
            raise UsageError(f"no audit log {number}; number of logs passed with --audit: {len(self._logs)}")
        return self._logs[number]


def _exclude_entry(row: Rows, segment: int) -> str | None:
    """Return a line for `chatmill prepare --exclude` that identifies the record of a segment."""
    file, line, _ = origin_of(row, segment)
    return None if file is None else json.dumps({"file": file, "line": line})


def _preview(preview: RecordPreview) -> dict[str, Any]:
    return {"note": one_line(preview.note, 500), "faults": [one_line(fault, 300) for fault in preview.faults]}


def _escaped(fields: dict[str, Any], **limits: int) -> dict[str, Any]:
    """Escape the fields named in `limits`, and truncate each of them to its limit in characters."""
    escaped = {name: one_line(fields[name], limit) for name, limit in limits.items() if fields[name] is not None}
    return {**fields, **escaped}


def _names(index: SplitIndex, column: str, codes: type[Role] | type[Rule]) -> list[str] | None:
    """Return the names of the roles or rules that occur in a split, or None until the whole split is indexed."""
    if index.filtered < index.count:
        return None
    bits = int(np.bitwise_or.reduce(index.columns[column])) if index.count else 0
    return [code.name.lower() for code in codes if code < 32 and bits >> code & 1]


def strip(row: Rows) -> list[list[Any]]:
    """Summarize a row as runs [role, whether trained, number of tokens]; sample a row with many spans at STRIP
    positions.
    """
    spans = row.spans
    if not len(spans):
        return []
    code = spans["role"].astype(np.int64) * 2 + (spans["weight"] > 0)
    sizes: Index = spans["length"].astype(np.int64)
    if len(spans) > STRIP:
        positions = (np.arange(STRIP) * 2 + 1) * len(row.ids) // (2 * STRIP)
        code = code[np.searchsorted(row.span_start, positions, side="right") - 1]
        sizes = np.diff(np.arange(STRIP + 1, dtype=np.int64) * len(row.ids) // STRIP)
    edges = [0, *(np.flatnonzero(np.diff(code)) + 1).tolist(), len(code)]
    return [
        [Role(int(code[start]) // 2).name.lower(), bool(code[start] % 2), int(sizes[start:stop].sum())]
        for start, stop in pairwise(edges)
    ]
