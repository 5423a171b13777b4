from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chatmill.store.hashed import json_text, self_hash


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the metadata of a dataset and update its hash, as an attacker would."""
    path = folder / "dataset_metadata.json"
    data = json.loads(path.read_bytes())
    data.pop("sha256")
    change(data)
    data["sha256"] = self_hash(data)
    path.write_bytes(json_text(data))


def shard_of(data: dict[str, Any]) -> Any:
    return data["splits"]["train"]["shards"][0]


FORGED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a path instead of a name": (
        lambda d: shard_of(d).update(name="../../etc"),
        'splits.train.shards[0].name is "../../etc"; expected "shard_00000"',
    ),
    "a file outside the dataset": (
        lambda d: shard_of(d)["files"].update({"../tokens.bin": {"size": 0, "sha256": "0" * 64}}),
        "splits.train.shards[0].files is",
    ),
    "a negative count": (
        lambda d: shard_of(d).update(num_tokens=-1),
        "splits.train.shards[0].num_tokens is -1; expected an integer from 0 to",
    ),
    "a count of true": (lambda d: shard_of(d).update(num_spans=True), "num_spans is true; expected an integer"),
    "a count that is too large": (
        lambda d: shard_of(d).update(num_episodes=2**61),
        "splits.train.shards[0].files.episodes.idx.size is",
    ),
    "a wrong sum": (
        lambda d: d["splits"]["train"].update(num_tokens=5),
        "splits.train.num_tokens is 5; expected",
    ),
    "another split": (lambda d: d["splits"].update({"../up": {}}), 'the name of a split is "../up"; expected train or'),
    "another width": (lambda d: d.update(dtype="uint32"), 'dtype is "uint32"; expected "uint16"'),
    "no vocabulary": (lambda d: d.update(vocab_size=0), "vocab_size is 0; expected an integer from 1"),
    "a padding id outside the vocabulary": (lambda d: d.update(pad_token_id=1000), "pad_token_id is 1000; expected"),
    "an invalid hash": (lambda d: d["tokenizer"].update(sha256="x"), "tokenizer.sha256 is"),
    "an empty ledger": (lambda d: d.update(ledger={"stored": 3}), "cannot read the ledger"),
    "invalid files": (lambda d: d["splits"]["train"].update(files=["a"]), "splits.train.files[0] is"),
    "invalid shards": (lambda d: d["splits"]["train"].update(shards={}), "splits.train.shards is {}; expected"),
    "a newer schema": (lambda d: d.update(schema_version=2), "schema version 2; expected 1"),
}
