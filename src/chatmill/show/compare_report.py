"""Summarize how the loss masks of chatmill and TRL differ over many records, with an example of each reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from rich.text import Text

from chatmill.errors import one_line
from chatmill.rows import Ids, Rows
from chatmill.show.compare import Clues, Counts, Mask, Outcome, PeerRow, TokenDifference, Why, compare_row
from chatmill.show.row_view import place_name
from chatmill.show.text import TokenText

BEFORE, INSIDE, AFTER = 8, 16, 4
"""Number of tokens that an example shows before, inside and after a difference."""
SEPARATOR = "│"
TRAINED, DIFFERENT = "bold green", "bold yellow"
MAX_REASONS = 20
"""Maximum number of separate reasons for rejecting records; further reasons are counted together."""
OTHER_REASONS = "other reasons"


@dataclass(frozen=True)
class TokenView:
    """A token in an example: its text, whether it is in the loss mask, and whether chatmill and TRL differ at this
    token.
    """

    text: str
    trained: bool
    differs: bool


@dataclass(frozen=True)
class Example:
    place: str
    chatmill: tuple[TokenView, ...]
    peer: tuple[TokenView, ...]


@dataclass
class Reason:
    """Number of records and tokens that differ for one reason, and an example."""

    records: int = 0
    counts: Counts = field(default_factory=Counts)
    example: Example | None = None


@dataclass
class Refusals:
    """Number of records that one library rejects for one kind of reason, with the first such record."""

    reason: str
    """The reason for rejecting the first of these records."""
    place: str
    records: int = 0


@dataclass
class Comparison:
    """The results of all records that were compared so far."""

    text: TokenText
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    """Number of rejected records by library: chatmill, TRL or both."""
    refusals: dict[tuple[str, str], Refusals] = field(default_factory=dict)
    """Refusals by library and kind of reason."""
    counts: Counts = field(default_factory=Counts)
    reasons: dict[Why, Reason] = field(default_factory=dict)
    weighted: int = 0
    default: Counts = field(default_factory=Counts)
    """Token counts of the comparison with TRL's default loss."""

    @property
    def records(self) -> int:
        return self.outcomes.total() + self.refused.total()

    @property
    def equal(self) -> bool:
        return self.records == self.outcomes[Outcome.EQUAL] + self.refused["both"]

    def refuse(self, place: str, *, chatmill: tuple[str, str] | None, peer: tuple[str, str] | None) -> None:
        """Add a record that one or both libraries reject; `chatmill` and `peer` are pairs (kind of reason, reason), or
        None if the library accepts the record.
        """
        self.refused["both" if chatmill and peer else "chatmill" if chatmill else "TRL"] += 1
        for name, refusal in (("chatmill", chatmill), ("TRL", peer)):
            if refusal is not None:
                kind, reason = refusal
                if (name, kind) not in self.refusals and len(self.refusals) >= MAX_REASONS:
                    kind = reason = OTHER_REASONS
                self.refusals.setdefault((name, kind), Refusals(reason, place)).records += 1

    def add(self, row: Rows, peer: PeerRow, default: PeerRow | None, clues: Clues) -> None:
        """Add a record that both libraries accept."""
        result = compare_row(row, peer, clues)
        self.outcomes[result.outcome] += 1
        self.counts += result.counts
        self.weighted += result.weighted
        for why in dict.fromkeys(each.why for each in result.differences):
            reason = self.reasons.setdefault(why, Reason())
            reason.records += 1
            of_reason = [each for each in result.differences if each.why == why]
            for each in of_reason:
                reason.counts += each.counts
            trained = [each for each in of_reason if each.counts.only_chatmill or each.counts.only_peer]
            if reason.example is None:
                reason.example = _example(row, peer, (trained or of_reason)[0], self.text)
        if default is not None:
            self.default += result.counts if default is peer else compare_row(row, default, clues).counts

    def sorted_reasons(self) -> list[tuple[Why, Reason]]:
        """Return the reasons in descending order of the number of tokens that are in only one of the two loss masks."""

        def key(item: tuple[Why, Reason]) -> tuple[int, int]:
            counts = item[1].counts
            return -(counts.only_chatmill + counts.only_peer), -counts.neither

        return sorted(self.reasons.items(), key=key)

    def to_json(self) -> dict[str, Any]:
        outcomes = {each.name.lower(): self.outcomes[each] for each in Outcome}
        return {
            "records": {"all": self.records, **outcomes, "refused": {name: self.refused[name] for name in REFUSED}},
            "tokens": {"all": self.counts.total, **asdict(self.counts), "other_weight": self.weighted},
            "reasons": [
                {
                    "name": why.name.lower(),
                    "text": why.value,
                    "records": reason.records,
                    **{name: count for name, count in asdict(reason.counts).items() if name != "both"},
                    "example": None if reason.example is None else asdict(reason.example),
                }
                for why, reason in self.sorted_reasons()
            ],
            "refusals": [
                {"by": by, "reason": each.reason, "records": each.records, "first": each.place}
                for (by, _), each in self.refusals.items()
            ],
            "peer_default": asdict(self.default),
        }


REFUSED = ("chatmill", "TRL", "both")


def _example(row: Rows, peer: PeerRow, difference: TokenDifference, text: TokenText) -> Example:
    return Example(
        place_name(row, 0),
        _view(row.ids, row.mask(), difference.start, difference.stop, text),
        _view(
            peer.ids[: peer.kept],
            peer.trained[: peer.kept],
            min(difference.peer_start, peer.kept),
            min(difference.peer_stop, peer.kept),
            text,
        ),
    )


def _view(ids: Ids, trained: Mask, start: int, stop: int, text: TokenText) -> tuple[TokenView, ...]:
    """Return the tokens [start, stop) with some context; the middle of a long range is omitted."""
    first, last = max(0, start - BEFORE), min(len(ids), stop + AFTER)
    places = np.arange(first, last)
    views = [TokenView("…", False, False)] if first else []
    for at in places.tolist():
        if stop - start > INSIDE and start + INSIDE // 2 <= at < stop - INSIDE // 2:
            if at == start + INSIDE // 2:
                views.append(TokenView("…", bool(trained[at]), True))
            continue
        views.append(TokenView(text.token(int(ids[at])), bool(trained[at]) and at > 0, start <= at < stop))
    return tuple([*views, TokenView("…", False, False)] if last < len(ids) else views)


# Text.


def example_lines(example: Example) -> Iterator[Text]:
    """Yield the location of an example and, for each library, a line of its tokens with trained tokens in brackets."""
    yield Text(f"    {example.place}", style="dim")
    for name, views in (("chatmill", example.chatmill), ("TRL", example.peer)):
        yield Text(f"      {name:<9}").append_text(_line(views))


def _line(views: tuple[TokenView, ...]) -> Text:
    line, trained = Text(), False
    for number, view in enumerate(views):
        if trained and not view.trained:
            line.append("]")
        line.append(SEPARATOR if number else "", style="dim")
        if view.trained and not trained:
            line.append("[")
        trained = view.trained
        escaped = view.text.replace("[", r"\[").replace("]", r"\]")
        line.append(escaped, style=DIFFERENT if view.differs else TRAINED if view.trained else "dim")
    return line.append("]" if trained else "")


def outcome_lines(comparison: Comparison) -> Iterator[str]:
    """Yield lines with the number of records for each outcome, and with the reasons for rejecting records."""
    yield f"{comparison.records:,} records: " + ", ".join(
        [f"{comparison.outcomes[each]:,} {each.value}" for each in Outcome if comparison.outcomes[each]]
        + [f"{comparison.refused[name]:,} refused by {name}" for name in REFUSED if comparison.refused[name]]
    )
    for (by, _), each in comparison.refusals.items():
        yield f"  {by} refuses {each.records:,} of the records, the first at {one_line(each.place, 200)}: {each.reason}"
