"""Metadata with a valid hash and wrong content."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chatmill.store.hashed import json_text, self_hash


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the metadata and give it a valid hash, as only an attacker would."""
    path = folder / "dataset_metadata.json"
    data = json.loads(path.read_bytes())
    data.pop("sha256")
    change(data)
    data["sha256"] = self_hash(data)
    path.write_bytes(json_text(data))


def shard_of(data: dict[str, Any]) -> Any:
    return data["splits"]["train"]["shards"][0]


FORGED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a path for a name": (
        lambda d: shard_of(d).update(name="../../etc"),
        'splits.train.shards[0].name is "../../etc"; expected "shard_00000"',
    ),
    "a file outside": (
        lambda d: shard_of(d)["files"].update({"../tokens.bin": {"size": 0, "sha256": "0" * 64}}),
        "splits.train.shards[0].files is",
    ),
    "a negative count": (
        lambda d: shard_of(d).update(num_tokens=-1),
        "splits.train.shards[0].num_tokens is -1; expected an integer from 0 to",
    ),
    "a count that is true": (lambda d: shard_of(d).update(num_spans=True), "num_spans is true; expected an integer"),
    "a count of more than there is": (
        lambda d: shard_of(d).update(num_episodes=2**61),
        "splits.train.shards[0].files.episodes.idx.size is",
    ),
    "a sum that is not one": (
        lambda d: d["splits"]["train"].update(num_tokens=5),
        "splits.train.num_tokens is 5; expected",
    ),
    "another split": (lambda d: d["splits"].update({"../up": {}}), 'the name of a split is "../up"; expected train or'),
    "another width": (lambda d: d.update(dtype="uint32"), 'dtype is "uint32"; expected "uint16"'),
    "no vocabulary": (lambda d: d.update(vocab_size=0), "vocab_size is 0; expected an integer from 1"),
    "a pad beyond the vocabulary": (lambda d: d.update(pad_token_id=1000), "pad_token_id is 1000; expected"),
    "a hash that is none": (lambda d: d["tokenizer"].update(sha256="x"), "tokenizer.sha256 is"),
    "a ledger of nothing": (lambda d: d.update(ledger={"stored": 3}), "cannot read the ledger"),
    "files that are none": (lambda d: d["splits"]["train"].update(files=["a"]), "splits.train.files[0] is"),
    "shards that are none": (lambda d: d["splits"]["train"].update(shards={}), "splits.train.shards is {}; expected"),
    "a later schema": (lambda d: d.update(schema_version=2), "schema version 2; expected 1"),
}
