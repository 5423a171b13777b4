from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from chatmill.fit import pack as pack_rows
from chatmill.format import TurnRenderer, load_format
from chatmill.ledger import Ledger
from chatmill.records import Message, Record
from chatmill.rows import Rows, TrainOn
from chatmill.store.metadata import Metadata, write_metadata
from chatmill.store.publish import publish, staging_for
from chatmill.store.write import SplitWriter
from chatmill.tokenizer import open_tokenizer


def chat(*texts: str, line: int = 1, file: str = "chat.jsonl", system: str | None = None) -> Record:
    messages = [Message("system", system)] if system else []
    messages += [Message(("user", "assistant")[at % 2], text) for at, text in enumerate(texts)]
    return Record(messages, file=file, line=line, source="chat")


def chats(seed: int, count: int) -> list[Record]:
    rng = np.random.default_rng(seed)
    words = ["mill", "stone", "grain", "water", "wheel", "flour", "sack", "miller"]

    def say() -> str:
        return " ".join(rng.choice(words, rng.integers(1, 6)))

    return [chat(*(say() for _ in range(2 * rng.integers(1, 4))), line=line + 1) for line in range(count)]


def key(record: Record) -> np.ndarray:
    said = repr(record.messages).encode()
    return np.frombuffer(hashlib.blake2b(said, digest_size=16).digest(), dtype="<u8")


def rows_of(
    records: Sequence[Record], *, format: str = "chatml", train_on: TrainOn = "assistant", pack: int | None = None
) -> Rows:
    chosen = load_format(format)
    rows = TurnRenderer(chosen, open_tokenizer("bytes", control=chosen.tokens)).render(records, train_on=train_on)
    for origin, record in zip(rows.origins, records, strict=True):
        origin["key"] = key(record)
    return rows if pack is None else pack_rows(rows, pack)


def write_rows(
    target: Path,
    splits: Mapping[str, Rows],
    *,
    format: str = "chatml",
    config: Mapping[str, Any] | None = None,
    tokenizer: str = "bytes",
    shard_tokens: int = 500,
    overwrite: bool = False,
) -> Metadata:
    chosen = load_format(format)
    opened = open_tokenizer("bytes", control=chosen.tokens)
    staging, ledger, infos = staging_for(target), Ledger(), {}
    for name, rows in splits.items():
        with SplitWriter(staging / name, vocab_size=opened.vocab_size, shard_tokens=shard_tokens) as writer:
            writer.append(rows)
            infos[name] = writer.close()
        counts = {"rows": len(rows.origins), "tokens": len(rows.ids)}
        ledger.add("read", rows=counts["rows"])
        ledger.add("rendered", **counts)
        ledger.add("stored", **counts, trained=infos[name].num_trained_tokens)
    metadata = write_metadata(
        staging,
        Metadata(
            vocab_size=opened.vocab_size,
            format={"name": chosen.name, "tokens": dict(chosen.tokens)},
            tokenizer={"name": tokenizer, "sha256": hashlib.sha256(tokenizer.encode()).hexdigest()},
            special_token_ids=opened.special_token_ids(),
            pad_token_id=0,
            splits=infos,
            ledger=ledger,
            config={"train_on": "assistant", "max_tokens": None, **(config or {})},
        ),
        tokenizer_state={"name": tokenizer},
    )
    publish(staging, target, overwrite=overwrite)
    return metadata


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
