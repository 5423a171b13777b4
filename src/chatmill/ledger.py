"""The ledger: every row and token in exactly one bucket, each with its reason.

    records:  read = rejected + rendered
    tokens:   rendered + repeated + injected + padding = stored + truncated + dropped
    rows:     rendered + repeated = stored + dropped        (a row here is a conversation, packed or not)

It is kept by whoever moves rows along, merged over processes, and written beside the data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

from chatmill.errors import ChatmillError

Bucket = Literal[
    "read", "rejected", "rendered", "repeated", "injected", "padding", "stored", "truncated", "dropped", "noted"
]
BUCKETS: tuple[Bucket, ...] = get_args(Bucket)
# "noted" counts what was kept but deserves a look (an answer that was cut); it takes no part in the balance.
RECORDS: tuple[tuple[Bucket, ...], tuple[Bucket, ...]] = (("read",), ("rejected", "rendered"))
TOKENS: tuple[tuple[Bucket, ...], tuple[Bucket, ...]] = (
    ("rendered", "repeated", "injected", "padding"),
    ("stored", "truncated", "dropped"),
)
ROWS: tuple[tuple[Bucket, ...], tuple[Bucket, ...]] = (("rendered", "repeated"), ("stored", "dropped"))


@dataclass
class LedgerEntry:
    rows: int = 0
    tokens: int = 0
    trained: int = 0


@dataclass
class Ledger:
    entries: dict[tuple[Bucket, str], LedgerEntry] = field(default_factory=dict)

    def add(self, bucket: Bucket, reason: str = "", *, rows: int = 0, tokens: int = 0, trained: int = 0) -> None:
        """Count rows and tokens in a bucket; `trained` is how many of the tokens have a weight over 0."""
        if min(rows, tokens, trained) < 0 or trained > tokens:
            raise ValueError(f"{bucket}: rows {rows}, tokens {tokens}, trained {trained} cannot be counted")
        entry = self.entries.setdefault((bucket, reason), LedgerEntry())
        entry.rows += rows
        entry.tokens += tokens
        entry.trained += trained

    def merge(self, other: Ledger) -> None:
        for (bucket, reason), entry in other.entries.items():
            self.add(bucket, reason, rows=entry.rows, tokens=entry.tokens, trained=entry.trained)

    def total(self, *buckets: Bucket) -> LedgerEntry:
        """The sum over these buckets, whatever the reason."""
        chosen = [entry for (bucket, _), entry in self.entries.items() if bucket in buckets]
        return LedgerEntry(
            sum(entry.rows for entry in chosen),
            sum(entry.tokens for entry in chosen),
            sum(entry.trained for entry in chosen),
        )

    def __iter__(self) -> Iterator[tuple[Bucket, str, LedgerEntry]]:
        """Entries in the order of the way, then by reason, so that two equal ledgers read the same."""
        for bucket, reason in sorted(self.entries, key=lambda key: (BUCKETS.index(key[0]), key[1])):
            yield bucket, reason, self.entries[bucket, reason]

    def check(self) -> None:
        """Raise unless everything that came in is accounted for."""
        for what, (came, went), column in (
            ("records", RECORDS, "rows"),
            ("rows", ROWS, "rows"),
            ("tokens", TOKENS, "tokens"),
        ):
            left, right = getattr(self.total(*came), column), getattr(self.total(*went), column)
            if left != right:
                raise ChatmillError(
                    f"the ledger does not balance: {' + '.join(came)} is {left} {what}, {' + '.join(went)} is {right}; "
                    "this is a fault of chatmill, please report it"
                )

    def to_json(self) -> dict[str, dict[str, dict[str, int]]]:
        out: dict[str, dict[str, dict[str, int]]] = {}
        for bucket, reason, entry in self:
            counts = {"rows": entry.rows, "tokens": entry.tokens, "trained": entry.trained}
            out.setdefault(bucket, {})[reason] = counts
        return out

    @classmethod
    def from_json(cls, data: dict[str, dict[str, dict[str, int]]]) -> Ledger:
        ledger = cls()
        for bucket, reasons in data.items():
            if bucket not in BUCKETS:
                raise ChatmillError(f'a ledger has no bucket "{bucket}"; it has {", ".join(BUCKETS)}')
            for reason, counts in reasons.items():
                ledger.add(bucket, reason, **counts)
        return ledger
