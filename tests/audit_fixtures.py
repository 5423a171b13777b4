from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from chatmill.audit import Audit, LogLine, read_log
from chatmill.format import TurnRenderer, load_format
from chatmill.ledger import Ledger
from chatmill.load.loader import EpisodeLoader
from chatmill.records import Message, Record
from chatmill.store.metadata import Metadata, write_metadata
from chatmill.store.publish import publish, staging_for
from chatmill.store.write import SplitWriter
from chatmill.tokenizer import open_tokenizer

WORDS = ["mill", "stone", "grain", "water", "wheel", "flour", "sack", "miller"]
SMALL: dict[str, Any] = {"batch_size": 4, "block_size": 48, "epoch_seed": 42, "use_loss_mask": True}


def make_dataset(target: Path, *, train: int = 50, val: int = 5, seed: int = 1) -> Path:
    format = load_format("chatml")
    tokenizer = open_tokenizer("bytes", control=format.tokens)
    rng = np.random.default_rng(seed)
    staging, ledger, infos = staging_for(target), Ledger(), {}
    for name, count in {"train": train, "val": val}.items():
        records = [
            Record(
                [
                    Message("user", f"{number} {' '.join(rng.choice(WORDS, rng.integers(0, 4)))}"),
                    Message("assistant", f"{seed}.{number} {' '.join(rng.choice(WORDS, rng.integers(0, 5)))}"),
                ],
                file="chat.jsonl",
                line=number + 1,
                source="chat",
            )
            for number in range(count)
        ]
        rows = TurnRenderer(format, tokenizer).render(records)
        with SplitWriter(staging / name, vocab_size=tokenizer.vocab_size, shard_tokens=1500) as writer:
            writer.append(rows)
            infos[name] = writer.close()
        ledger.add("read", rows=count)
        ledger.add("rendered", rows=count, tokens=len(rows.ids))
        ledger.add("stored", rows=count, tokens=len(rows.ids), trained=infos[name].num_trained_tokens)
    write_metadata(
        staging,
        Metadata(
            vocab_size=tokenizer.vocab_size,
            format={"name": format.name, "tokens": dict(format.tokens)},
            tokenizer={"name": tokenizer.name, "sha256": tokenizer.sha256},
            special_token_ids=tokenizer.special_token_ids(),
            pad_token_id=0,
            splits=infos,
            ledger=ledger,
            config={"train_on": "assistant", "max_tokens": None},
        ),
        tokenizer_state={
            "name": tokenizer.name,
            "sha256": tokenizer.sha256,
            "control": dict(format.tokens),
            "added_tokens": False,
        },
    )
    publish(staging, target, overwrite=False)
    return target


def run(
    dataset: Path,
    folder: Path,
    steps: int,
    *,
    checkpoints: tuple[int, ...] = (),
    config: dict[str, Any] | None = None,
    every: int = 5,
    saved: dict[str, Any] | None = None,
    close: bool = True,
    **options: Any,
) -> tuple[Audit, dict[int, dict[str, Any]]]:
    """Read batches up to step `steps` with an audit log; return the log, and the saved state at each step in
    `checkpoints`.
    """
    audit = Audit(folder, every=every, state=None if saved is None else saved["audit"])
    loader = EpisodeLoader(dataset, {**SMALL, **(config or {})}, listener=audit, **options)
    if saved is not None:
        loader.load_state_dict(saved["loader"])
    states = {}
    while loader.cursor().step < steps:
        loader.get_batch()
        if loader.cursor().step in checkpoints:
            state = {"audit": audit.checkpoint(), "loader": loader.state_dict()}
            states[loader.cursor().step] = json.loads(json.dumps(state))
    loader.close()
    if close:
        audit.close()
    return audit, states


def rechained(lines: list[bytes], start: int) -> list[bytes]:
    """Recompute the hash chain from line `start`, as an attacker would to hide a change."""
    fixed = list(lines)
    for number in range(start, len(fixed)):
        previous = hashlib.sha256(fixed[number - 1]).hexdigest() if number else "0" * 64
        fixed[number] = fixed[number].rpartition(b" | previous=")[0] + b" | previous=" + previous.encode()
    return fixed


def head_of(state: dict[str, Any]) -> dict[str, str]:
    return {"the checkpoint": state["audit"]["head"]}


def actions(log: Path) -> list[str]:
    return [line.action for line in read_log(log) if isinstance(line, LogLine)]


def counted(root: Path, config: dict[str, Any], steps: int) -> dict[str, int]:
    """Count the rows, tokens or trained tokens (see `mix_by`) of each source in the first `steps` batches."""
    loader = EpisodeLoader(root, {**SMALL, **config}, tensors=False)
    stored = {
        source.name: [source.episodes("train").rows([n]) for n in range(len(source.episodes("train")))]
        for source in loader.sources
    }
    episodes = [(name, rows) for name, found in stored.items() for rows in found]
    total = dict.fromkeys(stored, 0)
    for _ in range(steps):
        batch = loader.get_batch()
        for number in batch.episode_ids[batch.episode_ids >= 0].tolist():
            name, rows = episodes[number]
            kept = min(len(rows.ids), config["block_size"] + 1)
            trained = rows.mask()[len(rows.ids) - kept :][1:].sum()
            total[name] += {"rows": 1, "tokens": kept, "trained_tokens": int(trained)}[config["mix_by"]]
    return total
