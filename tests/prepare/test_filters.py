from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from prepare_fixtures import Faults, build, digests, lines, stored_rows

from chatmill.errors import DataError, RecordError, UsageError
from chatmill.prepare import filters as filters_module
from chatmill.prepare import unit
from chatmill.prepare.job import Filters, InputSource, Job

TEXTS = ("grist ", "mill-stone ", "flour? ", "Wheat, rye and oats. ", "42 ")
ORDER = ("min_turns", "max_turns", "match", "no_match", "min_tokens", "max_tokens", "min_trained_share")
ORDER += ("max_trained_share",)


def corpus(count: int = 60) -> list[dict]:
    rng = random.Random(5)
    records = []
    for _ in range(count):
        messages = [{"role": "system", "content": rng.choice(TEXTS)}] if rng.random() < 0.3 else []
        for _ in range(rng.randint(1, 4)):
            messages.append({"role": "user", "content": "".join(rng.choices(TEXTS, k=rng.randint(1, 4)))})
            messages.append({"role": "assistant", "content": "".join(rng.choices(TEXTS, k=rng.randint(1, 6)))})
        records.append({"messages": messages})
    return records


RECORDS = corpus()


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> dict[bool, dict[int, tuple[int, float]]]:
    folder = tmp_path_factory.mktemp("measured")
    (folder / "a.jsonl").write_bytes(lines(RECORDS))
    measured = {}
    for unroll in (False, True):
        build(Job((InputSource((str(folder / "a.jsonl"),)),), unroll=unroll), folder / f"{unroll}")
        rows, by_line = stored_rows(folder / f"{unroll}", "train"), {}
        weights, start = rows.weights(), rows.row_start
        for row, line in enumerate(rows.origins["line"].tolist()):
            of_row = weights[start[row] : start[row + 1]]
            by_line.setdefault(line, []).append((len(of_row), int((of_row > 0).sum())))
        measured[unroll] = {
            line: (max(size for size, _ in sizes), sum(part for _, part in sizes) / sum(size for size, _ in sizes))
            for line, sizes in by_line.items()
        }
    return measured


def removed_by(record: dict, size: int, share: float, given: list[dict]) -> str | None:
    """Return the name of the first filter that removes a record, computed without chatmill."""
    turns = len([message for message in record["messages"] if message["role"] != "system"])
    texts = [message["content"] for message in record["messages"]]
    tests = {
        "min_turns": lambda value: turns < value,
        "max_turns": lambda value: turns > value,
        "match": lambda value: not any(re.search(value, text) for text in texts),
        "no_match": lambda value: any(re.search(value, text) for text in texts),
        "min_tokens": lambda value: size < value,
        "max_tokens": lambda value: size > value,
        "min_trained_share": lambda value: share < value,
        "max_trained_share": lambda value: share > value,
    }
    return next((name for name in ORDER for each in given if name in each and tests[name](each[name])), None)


CHOICES = {
    "min_turns": [1, 3, 5],
    "max_turns": [3, 5, 7],
    "match": ["stone", "^grist", "[0-9]+ $"],
    "no_match": ["oats\\. Wheat", "(?i)WHEAT, rye.*wheat", "zzz"],
    "min_tokens": [40, 90, 150],
    "max_tokens": [150, 250, 500],
    "min_trained_share": [0.05, 0.2, 0.4],
    "max_trained_share": [0.5, 0.7, 0.9],
}


def some_filters(rng: random.Random) -> dict:
    return {name: rng.choice(values) for name, values in CHOICES.items() if rng.random() < 0.3}


@pytest.mark.parametrize("seed", range(10))
def test_filters_keep_what_an_oracle_keeps(tmp_path, measured, seed):
    rng, unroll = random.Random(seed), bool(seed % 2)
    given = [some_filters(rng), some_filters(rng)]
    expected = {line: removed_by(record, *measured[unroll][line], given) for line, record in enumerate(RECORDS, 1)}
    (tmp_path / "a.jsonl").write_bytes(lines(RECORDS))
    source = InputSource((str(tmp_path / "a.jsonl"),), filters=Filters(**given[1]))
    job = Job((source,), filters=Filters(**given[0]), unroll=unroll)
    unit_bytes = rng.choice([5_000, 2**22])
    if all(expected.values()):
        with pytest.raises(DataError, match=r"no records are left to train on \(.*filter "):
            build(job, tmp_path / "v1", unit_bytes=unit_bytes)
        return
    metadata = build(job, tmp_path / "v1", unit_bytes=unit_bytes)
    rows = stored_rows(tmp_path / "v1", "train")
    assert np.unique(rows.origins["line"]).tolist() == [line for line, name in expected.items() if name is None]
    listed = tmp_path / "v1" / "removed.jsonl"
    found = [json.loads(line) for line in listed.read_text().splitlines()] if listed.exists() else []
    place = {"source": "a", "file": "a.jsonl"}
    removed = {line: f"filter {name}" for line, name in expected.items() if name is not None}
    assert found == [{**place, "line": line, "reason": reason} for line, reason in removed.items()]
    assert metadata.ledger.total("read").rows == len(RECORDS)
    before = [name for name in expected.values() if name in ORDER[:4]]
    counts = {reason: entry.rows for bucket, reason, entry in metadata.ledger if bucket == "filtered"}
    assert counts == {f"filter {name}": before.count(name) for name in set(before)}


def some_job(folder: Path, **keys) -> Job:
    first, second = (str(folder / f"{name}.jsonl") for name in "ab")
    (folder / "a.jsonl").write_bytes(lines(RECORDS))
    (folder / "b.jsonl").write_bytes(lines([*corpus(40)[::-1], RECORDS[3]]))
    sources = (
        InputSource((first,), name="a", max_samples=30, filters=Filters(no_match="42 42", max_tokens=400)),
        InputSource((second,), name="b", filters=Filters(min_turns=3)),
    )
    return Job(sources, dedupe=True, filters=Filters(min_tokens=60, languages=("en", "de", "la")), **keys)


@pytest.mark.parametrize("keys", [{}, {"unroll": True, "val_split": 0.2}, {"pack": 600, "split": "shuffle"}])
def test_workers_unit_sizes_and_resuming_do_not_change_a_byte(tmp_path, monkeypatch, keys):
    job = some_job(tmp_path, **keys)
    build(job, tmp_path / "one")
    expected = digests(tmp_path / "one")
    assert "removed.jsonl" in expected
    monkeypatch.setattr(unit, "CHUNK", 7)
    monkeypatch.setattr(unit, "FILE_TOKENS", 500)
    build(job, tmp_path / "two", workers=2, unit_bytes=3_000)
    assert digests(tmp_path / "two") == expected
    with pytest.raises(KeyboardInterrupt):
        build(job, tmp_path / "three", unit_bytes=1_500, on_progress=stop_after(4))
    build(job, tmp_path / "three", unit_bytes=1_500, resume=True)
    assert digests(tmp_path / "three") == expected


def stop_after(count: int):
    seen = []

    def stop(progress) -> None:
        seen.append(progress)
        if len(seen) == count:
            raise KeyboardInterrupt

    return stop


def test_max_samples_keeps_the_first_records_that_pass_all_other_filters(tmp_path):
    records = [RECORDS[0], RECORDS[0], *RECORDS[1:9]]
    (tmp_path / "a.jsonl").write_bytes(lines(records))
    build(Job((InputSource((str(tmp_path / "a.jsonl"),), max_samples=4),), dedupe=True), tmp_path / "v1")
    assert stored_rows(tmp_path / "v1", "train").origins["line"].tolist() == [1, 3, 4, 5]


PREDICATES = """
def short(record):
    assert set(record["messages"][0]) == {"role", "content"}
    return len(record["messages"]) < 5

def wrong(record):
    return 3

def failing(record):
    if len(record["messages"]) > 6:
        raise ValueError("too\\nlong")
    return True
"""


@pytest.fixture
def with_predicates(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = f"own_predicates_{abs(hash(str(tmp_path)))}"
    Path(f"{module}.py").write_text(PREDICATES)
    Path("a.jsonl").write_bytes(lines(RECORDS))

    def job(name: str, **keys) -> tuple[Job, str]:
        full = f"{module}:{name}"
        return Job((InputSource(("a.jsonl",)),), filters=Filters(predicate=full), **keys), full

    return job


def test_a_predicate_runs_only_if_it_is_allowed(with_predicates, tmp_path):
    job, name = with_predicates("short")
    with pytest.raises(UsageError, match=f"allow it with --allow-code {name}$"):
        build(job, tmp_path / "v1")
    with pytest.raises(UsageError, match="--allow-code os:remove: no filter uses this predicate"):
        build(job, tmp_path / "v1", allow_code=(name, "os:remove"))
    build(job, tmp_path / "v1", allow_code=(name,), workers=2, unit_bytes=2_000)
    kept = [line for line, record in enumerate(RECORDS, 1) if len(record["messages"]) < 5]
    assert stored_rows(tmp_path / "v1", "train").origins["line"].tolist() == kept
    missing, name = with_predicates("nothing")
    with pytest.raises(UsageError, match="has no function nothing"):
        build(missing, tmp_path / "v2", allow_code=(name,))


def test_a_failing_predicate_is_reported_in_one_line_or_rejects_the_record(with_predicates, tmp_path):
    long = [line for line, record in enumerate(RECORDS, 1) if len(record["messages"]) > 6]
    job, name = with_predicates("failing")
    with pytest.raises(RecordError, match=rf"^a.jsonl:{long[0]}: the predicate {name} failed \(ValueError: too\\nlong"):
        build(job, tmp_path / "v1", allow_code=(name,), unit_bytes=2_000)
    job, name = with_predicates("failing", on_error="skip")
    faults = Faults()
    metadata = build(job, tmp_path / "v1", allow_code=(name,), unit_bytes=2_000, on_fault=faults)
    assert faults == [("a.jsonl", line, "predicate") for line in long]
    assert metadata.ledger.total("rejected").rows == len(long)
    wrong, name = with_predicates("wrong")
    with pytest.raises(RecordError, match="returned 3; a predicate must return True or False"):
        build(wrong, tmp_path / "v2", allow_code=(name,))


def test_the_language_filter_uses_the_answers(tmp_path):
    answers = {
        "en": "The miller grinds the grain between two heavy stones, and the flour falls into a sack.",
        "de": "Der Müller mahlt das Korn zwischen zwei schweren Steinen, und das Mehl fällt in einen Sack.",
        "fr": "Le meunier moud le grain entre deux lourdes pierres, et la farine tombe dans un sac.",
        "": "42",
    }
    turns = ({"role": "user", "content": "What does the miller do with all of the grain?"},)
    records = [{"messages": [*turns, {"role": "assistant", "content": text}]} for text in answers.values()]
    (tmp_path / "a.jsonl").write_bytes(lines(records))
    source = InputSource((str(tmp_path / "a.jsonl"),), filters=Filters(languages=("de", "fr")))
    build(Job((source,)), tmp_path / "v1")
    assert stored_rows(tmp_path / "v1", "train").origins["line"].tolist() == [2, 3, 4]
    with pytest.raises(UsageError, match="the languages filter has unknown codes: xx; expected codes from: "):
        build(Job((source,), filters=Filters(languages=("xx",))), tmp_path / "v2")


def test_an_expression_that_never_ends_is_reported_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(filters_module, "MATCH_SECONDS", 0.2)
    messages = [{"role": "user", "content": "a" * 60 + "b"}, {"role": "assistant", "content": "ok"}]
    (tmp_path / "a.jsonl").write_bytes(lines([RECORDS[0], {"messages": messages}]))
    source = InputSource((str(tmp_path / "a.jsonl"),), filters=Filters(no_match="^(a+)+$"))
    with pytest.raises(
        RecordError, match=r"a.jsonl:2: the regular expression of the filter no_match took more than 0.2 sec"
    ):
        build(Job((source,), on_error="skip"), tmp_path / "v1")
