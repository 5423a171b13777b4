"""The ledger records what happened to every row and token, and why.

    records:  read = rejected + filtered + rendered
    tokens:   rendered + repeated + injected + padding = stored + truncated + dropped
    rows:     rendered + repeated = stored + dropped        (a row here is a conversation, packed or not)

Functions that render, truncate, drop or store rows add to the ledger. The ledger is merged across processes and written
next to the data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Literal, get_args

from chatmill.errors import ChatmillError

Bucket = Literal[
    "read",
    "rejected",
    "filtered",
    "rendered",
    "repeated",
    "injected",
    "padding",
    "stored",
    "truncated",
    "dropped",
    "noted",
]
BUCKETS: tuple[Bucket, ...] = get_args(Bucket)
MAX_REASONS = 1000
"""Maximum number of reasons per bucket; further reasons are counted as `OTHER`."""
OTHER = "other"
MAX_NAMES = 200
"""Maximum number of reasons that differ only in a name taken from the data, such as `unread_key NAME`. Further names
are counted under one reason, so that they do not use up `MAX_REASONS`.
"""
OTHER_NAMES = "(other keys)"
UNREAD_KEY = "unread_key "
"""Prefix of the reason for a record key that is not read; the name of the key follows."""
# "noted" counts rows that were kept but deserve attention, such as rows with a truncated answer. The balances do
# not include "noted".
BALANCES: tuple[tuple[str, str, tuple[Bucket, ...], tuple[Bucket, ...]], ...] = (
    ("records", "rows", ("read",), ("rejected", "filtered", "rendered")),
    ("rows", "rows", ("rendered", "repeated"), ("stored", "dropped")),
    ("tokens", "tokens", ("rendered", "repeated", "injected", "padding"), ("stored", "truncated", "dropped")),
)
"""For each balance: its name, its column, and the two groups of buckets whose sums must be equal."""


@dataclass
class LedgerEntry:
    rows: int = 0
    tokens: int = 0
    trained: int = 0

    def plus(self, rows: int, tokens: int, trained: int) -> None:
        self.rows, self.tokens, self.trained = self.rows + rows, self.tokens + tokens, self.trained + trained


@dataclass
class Ledger:
    entries: dict[tuple[Bucket, str], LedgerEntry] = field(default_factory=dict)

    def add(self, bucket: Bucket, reason: str = "", *, rows: int = 0, tokens: int = 0, trained: int = 0) -> None:
        """Add rows and tokens to a bucket; `trained` is the number of these tokens with a weight above 0."""
        if min(rows, tokens, trained) < 0 or trained > tokens:
            raise ValueError(f"{bucket}: rows {rows}, tokens {tokens}, trained {trained} are not valid counts")
        if (bucket, reason) not in self.entries:
            kind, separator, _ = reason.partition(" ")
            known = [key[1] for key in self.entries if key[0] == bucket]
            others = f"{kind} {OTHER_NAMES}"
            names = sum(name.startswith(kind + separator) for name in known) - (others in known) if separator else 0
            if names >= MAX_NAMES:
                reason = others
            elif len(known) >= MAX_REASONS:
                reason = OTHER
        self.entries.setdefault((bucket, reason), LedgerEntry()).plus(rows, tokens, trained)

    def merge(self, other: Ledger) -> None:
        for (bucket, reason), entry in other.entries.items():
            self.add(bucket, reason, **vars(entry))

    def total(self, *buckets: Bucket) -> LedgerEntry:
        """Return the total number of rows and tokens in the given buckets."""
        total = LedgerEntry()
        for (bucket, _), entry in self.entries.items():
            if bucket in buckets:
                total.plus(entry.rows, entry.tokens, entry.trained)
        return total

    def __iter__(self) -> Iterator[tuple[Bucket, str, LedgerEntry]]:
        """Yield entries in the order of `BUCKETS`, then by reason, so that equal ledgers print identically."""
        for bucket, reason in sorted(self.entries, key=lambda key: (BUCKETS.index(key[0]), key[1])):
            yield bucket, reason, self.entries[bucket, reason]

    def check(self) -> None:
        """Raise `ChatmillError` unless all rows and tokens are accounted for."""
        for what, column, sources, uses in BALANCES:
            left, right = getattr(self.total(*sources), column), getattr(self.total(*uses), column)
            if left != right:
                raise ChatmillError(
                    f"the ledger does not balance: {' + '.join(sources)} is {left} {what}, but "
                    f"{' + '.join(uses)} is {right}; this is a bug in chatmill, please report it"
                )

    def to_json(self) -> dict[str, dict[str, dict[str, int]]]:
        out: dict[str, dict[str, dict[str, int]]] = {}
        for bucket, reason, entry in self:
            out.setdefault(bucket, {})[reason] = asdict(entry)
        return out

    @classmethod
    def from_json(cls, data: dict[str, dict[str, dict[str, int]]]) -> Ledger:
        ledger = cls()
        for bucket, reasons in data.items():
            if bucket not in BUCKETS:
                raise ChatmillError(f'unknown ledger bucket "{bucket}"; expected {", ".join(BUCKETS)}')
            for reason, counts in reasons.items():
                ledger.add(bucket, reason, **counts)
        return ledger
