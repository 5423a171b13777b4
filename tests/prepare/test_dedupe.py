from __future__ import annotations

import random
import sys
import unicodedata
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prepare_fixtures import build, digests, lines, stored_rows

from chatmill.errors import UsageError
from chatmill.prepare.dedupe_columns import dedupe_identity, exact_keys, minhash, shingles
from chatmill.prepare.job import InputSource, Job
from chatmill.records import FilePart, Record, read_blocks
from chatmill.rows import rows_from_mask

TEXT = st.text(st.sampled_from("aA bB\t\n\u00a0\u3000\u2028\x1f\x85ſßéÉ\u0301ﬁ１Σσς水\x00"), max_size=8)
CONVERSATION = st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), TEXT), min_size=1, max_size=3)


def plain(conversation: list[tuple[str, str]]) -> tuple[Any, ...]:
    return tuple((role, " ".join(unicodedata.normalize("NFKC", text).lower().split())) for role, text in conversation)


@given(st.lists(CONVERSATION, min_size=1, max_size=12))
def test_keys_are_equal_if_roles_and_normalized_texts_are_equal(tmp_path_factory, conversations):
    records = [
        {"messages": [{"role": role, "content": text} for role, text in conversation]} for conversation in conversations
    ]
    file = tmp_path_factory.mktemp("keys") / "a.jsonl"
    file.write_bytes(lines(records))
    blocks = read_blocks(FilePart(file, "messages", "a"), on_fault=pytest.fail, on_end=lambda lines: None)
    in_columns = np.concatenate([exact_keys(block) for block in blocks])
    one_by_one = np.concatenate([exact_keys([Record(record["messages"])]) for record in records])
    assert in_columns.tolist() == one_by_one.tolist()
    for (key, one), (other_key, other) in combinations(zip(one_by_one.tolist(), conversations, strict=True), 2):
        assert (key == other_key) == (plain(one) == plain(other))


def conversation(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]}


def kept_lines(dataset: Path) -> list[tuple[str, int]]:
    rows = stored_rows(dataset, "train")
    return [(rows.files[origin["file"]].path, int(origin["line"])) for origin in rows.origins]


def near_job(*files: Path, **options: Any) -> Job:
    sources = tuple(InputSource((str(file),), "messages", file.stem) for file in files)
    return Job(sources, **{"near_dedupe": 0.8, "format": "primer", **options})


THRESHOLD = 0.8
RNG = random.Random(8)
WORDS = ["".join(RNG.choices("abcdefghijklmnopqrstuvwxyz", k=RNG.randint(3, 9))) for _ in range(20_000)]


def corpus(count: int) -> list[dict[str, Any]]:
    rng, texts = random.Random(5), list[list[str]]()
    for _ in range(count):
        if texts and rng.random() < 0.5:
            words, changed = list(rng.choice(texts)), rng.random() ** 2 / 2
            words = [rng.choice(WORDS) if rng.random() < changed else word for word in words]
            words[rng.randrange(len(words))] = rng.choice(WORDS)
        else:
            words = rng.choices(WORDS, k=rng.randint(20, 60))
        texts.append(words)
    return [conversation(" ".join(words[:10]), " ".join(words[10:])) for words in texts]


def similarities(records: list[dict[str, Any]]) -> list[tuple[int, int, float]]:
    """Return the exact Jaccard similarity of all pairs of records that share more than 20 sequences of 5 bytes."""
    held: dict[bytes, list[int]] = {}
    sizes = []
    for number, record in enumerate(records):
        data = "".join(message["content"] for message in record["messages"]).encode()
        own = {data[at : at + 5] for at in range(len(data) - 4)}
        sizes.append(len(own))
        for shingle in own:
            held.setdefault(shingle, []).append(number)
    from scipy.sparse import csr_matrix

    columns = np.repeat(np.arange(len(held)), [len(numbers) for numbers in held.values()])
    rows = np.concatenate(list(held.values()))
    incidence = csr_matrix((np.ones(len(rows), dtype=np.int32), (rows, columns)), (len(records), len(held)))
    common = (incidence @ incidence.T).tocoo()
    above = (common.row < common.col) & (common.data > 20)
    one, other, shared = common.row[above], common.col[above], common.data[above]
    size = np.array(sizes)
    return list(zip(one.tolist(), other.tolist(), (shared / (size[one] + size[other] - shared)).tolist(), strict=True))


def removed_by(pairs: list[tuple[int, int]], count: int) -> set[int]:
    first = list(range(count))

    def first_of(number: int) -> int:
        while first[number] != number:
            number = first[number]
        return number

    for one, other in pairs:
        earlier, later = sorted((first_of(one), first_of(other)))
        first[later] = earlier
    return {number for number in range(count) if first[number] != number}


def test_near_duplicates_match_a_search_over_all_pairs_up_to_estimation_error(tmp_path):
    records = corpus(5000)
    file = tmp_path / "a.jsonl"
    file.write_bytes(lines(records))
    metadata = build(near_job(file), tmp_path / "x", unit_bytes=200_000)
    removed = set(range(len(records))) - {line - 1 for _, line in kept_lines(tmp_path / "x")}
    dropped = {reason: entry.rows for bucket, reason, entry in metadata.ledger if bucket == "dropped"}
    assert sum(dropped.values()) == len(removed)
    pairs = similarities(records)
    right = removed_by([pair[:2] for pair in pairs if pair[2] >= THRESHOLD], len(records))
    clear = removed_by([pair[:2] for pair in pairs if pair[2] >= 0.9], len(records))
    possible = removed_by([pair[:2] for pair in pairs if pair[2] >= 0.7], len(records))
    recall, precision = len(removed & right) / len(right), len(removed & right) / len(removed)
    print(len(right), len(removed), recall, precision, dropped)
    assert recall > 0.93
    assert precision > 0.93
    assert clear <= removed <= possible


@pytest.mark.parametrize("options", [{"fit": "windows", "max_tokens": 300}, {"unroll": True}])
def test_any_number_of_workers_and_units_removes_the_same_records(tmp_path, options):
    records = corpus(200)
    for name, part in (("a", records[:120]), ("b", records[120:])):
        (tmp_path / f"{name}.jsonl").write_bytes(lines(part))
    job = near_job(tmp_path / "a.jsonl", tmp_path / "b.jsonl", pack=2000, **options)
    build(job, tmp_path / "one")
    build(job, tmp_path / "many", workers=2, unit_bytes=7_000)
    assert digests(tmp_path / "one") == digests(tmp_path / "many")


@pytest.mark.parametrize(
    ("precedence", "kept"),
    [
        ((), [("a.jsonl", 1), ("a.jsonl", 2), ("b.jsonl", 3)]),
        (("b",), [("a.jsonl", 2), ("b.jsonl", 1), ("b.jsonl", 3)]),
        (("c", "b"), [("b.jsonl", 3), ("c.jsonl", 1), ("c.jsonl", 2)]),
    ],
)
def test_the_duplicate_in_the_source_with_the_highest_precedence_is_kept(tmp_path, precedence, kept):
    long = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    exact, near = conversation("Hi", "Hello there"), conversation(long, long.upper())
    almost, other = conversation(long, long.upper() + "."), conversation("Who are you?", "A mill.")
    for name, records in (
        ("a", [exact, near]),
        ("b", [conversation(" HI", "hello\n\nthere "), exact, other]),
        ("c", [almost, exact]),
    ):
        (tmp_path / f"{name}.jsonl").write_bytes(lines(records))
    job = near_job(*(tmp_path / f"{name}.jsonl" for name in "abc"), precedence=precedence)
    metadata = build(job, tmp_path / "x")
    assert kept_lines(tmp_path / "x") == kept
    dropped = {reason: entry.rows for bucket, reason, entry in metadata.ledger if bucket == "dropped"}
    assert dropped == {"duplicate": 3, "near_duplicate": 1}


def test_chains_of_near_duplicates_keep_their_first_record(tmp_path):
    """Each record differs from the previous one in one letter, so only records that are close together are similar."""
    letters = random.Random(3)
    text = list("".join(letters.choices("abcdefghijklmnop", k=400)))
    records = []
    for at in range(40):
        text[at * 10] = "."
        records.append(conversation("q", "".join(text)))
    (tmp_path / "a.jsonl").write_bytes(lines(records))
    build(near_job(tmp_path / "a.jsonl"), tmp_path / "x")
    assert kept_lines(tmp_path / "x") == [("a.jsonl", 1)]


def test_system_messages_and_short_texts_are_never_near_duplicates(tmp_path):
    system = {"role": "system", "content": "You are a helpful assistant. " * 20}
    records = [conversation(*texts) for texts in (("a", ""), ("b", ""), ("ab", "c"), ("a", "bd"), ("", ""), ("", ""))]
    records = [{"messages": [system, *record["messages"]]} for record in records]
    (tmp_path / "a.jsonl").write_bytes(lines(records))
    build(near_job(tmp_path / "a.jsonl", format="chatml"), tmp_path / "x")
    assert kept_lines(tmp_path / "x") == [("a.jsonl", line) for line in (1, 2, 3, 4, 5)]


def test_sequences_never_cross_conversations():
    ids = np.array([7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9], dtype=np.uint32)
    rows = rows_from_mask(ids, np.zeros(len(ids)), [3, 6, 3])
    rows.spans["message"] = 0
    hashes, start = shingles(rows, np.arange(3), 3)
    assert start.tolist() == [0, 1, 3, 4]
    assert hashes[0] == hashes[3]
    assert len(set(hashes.tolist())) == 3
    values = minhash(hashes, start)
    assert (values[0] == values[2]).all()
    assert not (values[0] == values[1]).all()


def test_a_threshold_out_of_range_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"--near-dedupe 1.5 is not between 0.5 and 1"):
        build(near_job(tmp_path / "a.jsonl", near_dedupe=1.5), tmp_path / "x")


def test_without_its_library_near_dedupe_names_the_package_to_install(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(lines([conversation("Hi", "Hello")]))
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(UsageError, match=r"^near_dedupe needs rensa; pip install 'chatmill\[recipe\]'$"):
        build(near_job(tmp_path / "a.jsonl"), tmp_path / "x")


def test_the_dedupe_identity_depends_on_the_minhash_version(monkeypatch):
    job = near_job(Path("a.jsonl"))
    before = dedupe_identity(job)
    monkeypatch.setitem(sys.modules, "rensa", SimpleNamespace(RMinHash=SimpleNamespace(ALGORITHM_VERSION=-1)))
    assert dedupe_identity(job) != before
    assert dedupe_identity(near_job(Path("a.jsonl"), near_dedupe=None)) == {}
