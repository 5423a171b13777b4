"""If a tokenizer reports a vocabulary size that is too small, token ids beyond this size must not be stored."""

from __future__ import annotations

import json
import random
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
from prepare_fixtures import conversations, job_of, lines
from record_mutations import broken_bytes, broken_value
from store_fixtures import some_rows, write_dataset

from chatmill.prepare.engine import LocalEngine
from chatmill.prepare.pipeline import prepare_dataset
from chatmill.prepare.unit import job_renderer
from chatmill.tokenizer import open_tokenizer, train_bpe
from fault_injection.processes import apart, outcome
from fault_injection.trial import Tally, Trial

CONTROL = ["<|sys|>", "<|eot|>"]
TEXTS = [
    "The mill turns, and the water with it. " * 20,
    "def mill(x):\n    return x * 2  # größer\n" * 20,
    "水车 " * 60,
]
PROBE = "The mill: größer, 水车!\n\n  return 2\t"
AT_ONCE = 25


class Liar:
    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def mutant(good: dict[str, Any], raw: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.5:
        return broken_bytes(raw, rng)
    value = broken_value(good, rng)
    if rng.random() < 0.5:
        # Also change values inside "model", which is the most important key but is deeply nested.
        value = {**good, "model": broken_value(good["model"], rng)}
    return json.dumps(value).replace('"@nest@"', "[" * 50 + "]" * 50).encode()


def attempt(path: Path) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = open_tokenizer(path)
        ids = tokenizer.encode(PROBE)
        text_of_control = tokenizer.encode("".join(CONTROL))
    if ids and max(ids) >= tokenizer.vocab_size:
        return f"id {max(ids)} in a vocabulary of {tokenizer.vocab_size}"
    control = set(tokenizer.special_token_ids().values())
    if control & {*ids, *text_of_control}:
        return "text was encoded as a control token"
    try:
        peer = tokenizers.Tokenizer.from_str(path.read_text())
    except Exception:  # chatmill does not use the broken part
        return ""
    peer.no_truncation()
    peer.no_padding()
    if (right := peer.encode(PROBE, add_special_tokens=False).ids) != ids and not control & set(right):
        return f"ids {ids[:8]}…, expected {right[:8]}… from tokenizers"
    return ""


def mutants(size: int, seed: int, folder: Path, tally: Tally) -> None:
    rng = random.Random(seed)
    path = folder / "tokenizer.json"

    def make() -> str:
        path.write_bytes(train_bpe(TEXTS, vocab_size=400, control=CONTROL))
        return attempt(path)

    # Training a tokenizer starts threads, and this process forks.
    made = apart(make)
    assert made.value == "", made
    raw = path.read_bytes()
    good = json.loads(raw)

    def some(many: list[bytes]) -> list[list[str]]:
        said = []
        for data in many:
            path.write_bytes(data)
            ended = outcome(lambda: attempt(path))
            said.append([ended.value or "", ended.refused, ended.broke])
        return said

    for first in range(0, size, AT_ONCE):
        many = [mutant(good, raw, rng) for _ in range(min(AT_ONCE, size - first))]
        # The library may abort, so it runs in a separate process.
        ended = apart(lambda many=many: some(many), cpu_seconds=300)
        if ended.value is None:
            tally.loses(f"mutants from {first} on: {ended.broke or 'killed'}")
            continue
        for data, (wrong, refused, broke) in zip(many, ended.value, strict=True):
            if wrong:
                tally.is_wrong(f"{wrong}: {_difference(raw, data)}")
            else:
                tally.judge(survived=not refused and not broke, found=bool(refused), lost=f"{broke}: {data[:80]!r}")


def _difference(one: bytes, other: bytes) -> str:
    at = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return f"at byte {at}: {other[max(0, at - 20) : at + 40]!r}"


def liars(size: int, seed: int, folder: Path, tally: Tally) -> None:
    rng = random.Random(seed)
    (folder / "a.jsonl").write_bytes(lines(conversations(9, seed=seed)))
    job = job_of((str(folder / "a.jsonl"),))
    renderer = job_renderer(job)
    used = renderer.tokenizer.vocab_size
    for number in range(size):
        target = folder / str(number)
        if number % 2:
            vocab_size = rng.randrange(2, 120)
            liar = replace(renderer, tokenizer=Liar(renderer.tokenizer, vocab_size))
            ended = outcome(
                lambda liar=liar, target=target: (
                    prepare_dataset(job, target, renderer=liar, engine=LocalEngine(1)).sha256
                )
            )
        else:
            vocab_size = rng.randrange(500, 990)
            rows = some_rows(seed + number, count=40)
            rows.ids[len(rows.ids) // 2] = 999
            if number % 4:
                rows.ids[:] = 0
                rows.spans["target"][len(rows.spans) // 2] = 999
            ended = outcome(
                lambda rows=rows, target=target, size=vocab_size: (
                    write_dataset(target, {"train": rows}, vocab_size=size).sha256
                )
            )
        what = f"a vocabulary of {vocab_size}, reported by {used}"
        if ended.value is not None or target.exists():
            tally.is_wrong(f"{what}: ids outside the vocabulary were stored")
        else:
            tally.judge(found=bool(ended.refused), lost=f"{what}: {ended.broke}")


MUTANTS = Trial(
    "mutated tokenizers",
    "Changes bytes and values in `tokenizer.json`. The result must be a one-line error, or the same ids as with "
    "`tokenizers`",
    mutants,
    full=4_000,
    short=100,
    in_memory=True,
)
LIARS = Trial(
    "wrong vocabulary sizes",
    "Uses tokenizers that report too small a vocabulary. Ids outside the vocabulary must be refused before anything "
    "is stored",
    liars,
    full=200,
    short=12,
    in_memory=True,
)
