from __future__ import annotations

from unicodedata import normalize

import numpy as np
import pytest
from prepare_fixtures import JOBS, assert_equal, build, job_of, joined, stored_rows, told, write_corpus

from chatmill.fit import cut_blocks, truncate
from chatmill.format import TurnRenderer, load_format
from chatmill.ledger import Ledger
from chatmill.prepare.job import InputSource, Job
from chatmill.records import Record, read_records, record_key, shuffle_split
from chatmill.rows import NO_MESSAGE, File, Role, Rows, Rule
from chatmill.tokenizer import open_tokenizer


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> tuple[str, ...]:
    return write_corpus(tmp_path_factory.mktemp("corpus"), 300)


def expected(job: Job, ledger: Ledger) -> dict[str, list[Rows]]:
    format = load_format(job.format or "chatml")
    tokenizer = open_tokenizer(job.tokenizer, control=format.tokens)
    records = [(record, source) for source in job.sources for record in read_records(source.inputs, shape=source.shape)]
    shuffled = set(shuffle_split(len(records), job.val_split, seed=job.seed).val)
    seen = set()
    splits: dict[str, list[Rows]] = {"train": [], "val": []}
    for number, (record, source) in enumerate(records):
        ledger.add("read", rows=1)
        if job.unroll:
            rows = unrolled(record, TurnRenderer(format, tokenizer), ledger)
        else:
            rows = TurnRenderer(format, tokenizer).render([record], train_on=source.train_on or job.train_on)
            ledger.add("rendered", rows=1, tokens=len(rows.ids), trained=int(rows.mask().sum()))
        if job.fit != "blocks":
            rows = truncate(rows, job.capacity, job.fit, ledger=ledger)
        key = record_key(record)
        rows.origins["key"] = np.frombuffer(key, dtype="<u8")
        path = rows.files[0].path.rpartition("/")[2]
        rows = Rows(*(getattr(rows, name) for name in FIELDS), files=(File(rows.files[0].source, path),))
        if job.dedupe and len(rows):
            compared = tuple(
                (each.role, " ".join(normalize("NFKC", each.content).lower().split())) for each in record.messages
            )
            if compared in seen:
                ledger.add("dropped", "duplicate", rows=len(rows), tokens=len(rows.ids), trained=int(rows.mask().sum()))
                continue
            seen.add(compared)
        if source.only_val:
            val = True
        elif job.split == "shuffle":
            val = number in shuffled
        else:
            val = int.from_bytes(key[:8], "little") / 2**64 < job.val_split
        splits["val" if val else "train"].append(rows)
    return splits


def unrolled(record: Record, renderer: TurnRenderer, ledger: Ledger) -> Rows:
    answers = [number for number, message in enumerate(record.messages) if message.role == "assistant"]
    rows, until, repeated = [], -1, 0
    for answer in answers or [len(record.messages) - 1]:
        row = renderer.render(
            [Record(record.messages[: answer + 1], source=record.source, file=record.file, line=record.line)]
        )
        for span in row.spans:
            if span["message"] == NO_MESSAGE or span["message"] <= until:
                repeated += int(span["length"]) if rows else 0
                if span["role"] == Role.ASSISTANT and span["rule"] == Rule.ROLE:
                    span["weight"], span["rule"] = 0, Rule.EARLIER_ROW
        rows.append(row)
        until = answer
    made = joined(rows)
    trained = int(made.mask().sum())
    ledger.add("rendered", rows=1, tokens=len(made.ids) - repeated, trained=trained)
    if len(made) > 1:
        ledger.add("repeated", "unroll", rows=len(made) - 1, tokens=repeated)
    if until < len(record.messages) - 1:
        ledger.add("noted", "messages_after_last_answer", rows=1)
    return made


FIELDS = ("ids", "spans", "first_span", "origins", "first_segment")


def counted(ledger: Ledger) -> dict:
    return {bucket: counts for bucket, counts in ledger.to_json().items() if bucket != "stored"}


@pytest.mark.parametrize("name", JOBS)
def test_a_dataset_equals_its_records_rendered_and_truncated_one_at_a_time(tmp_path, inputs, name):
    job = job_of(inputs, **JOBS[name])
    metadata = build(job, tmp_path / "x", workers=2, unit_bytes=5_000)
    ledger = Ledger()
    splits = expected(job, ledger)
    assert metadata.splits.keys() == ({"train", "val"} if job.wants_val else {"train"})
    for split in metadata.splits:
        rows, stored = joined(splits[split]), stored_rows(tmp_path / "x", split)
        if job.fit == "blocks":
            rows = cut_blocks(rows, job.max_tokens, ledger=ledger)
            assert (stored.lengths == job.max_tokens).all()
        if job.pack is None:
            compare = assert_blocks_equal if job.fit == "blocks" else assert_equal
            compare(stored, rows)
        else:
            assert stored.lengths.max() <= job.pack
            assert len(stored) < len(rows)
            assert sorted(told(stored)) == sorted(told(rows))
    assert counted(metadata.ledger) == counted(ledger)
    metadata.ledger.check()
    stored = metadata.ledger.total("stored")
    assert stored.tokens == sum(split.num_tokens for split in metadata.splits.values())
    assert stored.trained == sum(split.num_trained_tokens for split in metadata.splits.values())


def assert_blocks_equal(one: Rows, other: Rows) -> None:
    """Compare two sets of blocks. Input files are not compared, because padding has no input file."""
    for field in ("ids", "spans", "first_span", "first_segment"):
        assert np.array_equal(getattr(one, field), getattr(other, field)), field
    for column in ("line", "key"):
        assert np.array_equal(one.origins[column], other.origins[column]), column


def test_each_source_is_read_with_its_own_options(tmp_path, inputs):
    first, second, third, fourth = inputs
    job = Job(
        (
            InputSource((first, second), "messages", "chat"),
            InputSource((third,), "messages", "last words", train_on="last"),
            InputSource((fourth,), "messages", "held out", only_val=True),
        ),
        shard_tokens=20_000,
    )
    metadata = build(job, tmp_path / "x", workers=2, unit_bytes=5_000)
    splits = expected(job, Ledger())
    for split in ("train", "val"):
        stored, rows = stored_rows(tmp_path / "x", split), joined(splits[split])
        assert stored.ids.tolist() == rows.ids.tolist()
        assert stored.weights().tolist() == rows.weights().tolist()
    assert metadata.splits["train"].files == (
        File("chat", "a.jsonl"),
        File("chat", "b.jsonl.gz"),
        File("last words", "c.json"),
    )
    assert metadata.splits["val"].files == (File("held out", "d.jsonl"),)


def test_added_records_never_move_others_between_splits(tmp_path, inputs):
    few, many = inputs[:2], inputs
    for name, files in (("few", few), ("many", many)):
        build(job_of(files, val_split=0.2), tmp_path / name)
    for split in ("train", "val"):
        old = {key for _, _, key, *_ in told(stored_rows(tmp_path / "few", split))}
        new = {key for _, _, key, *_ in told(stored_rows(tmp_path / "many", split))}
        assert old and old <= new


def test_equal_conversations_are_in_one_split_and_dedupe_keeps_the_first(tmp_path, inputs):
    build(job_of(inputs, val_split=0.2, dedupe=True), tmp_path / "x")
    found = [told_ for split in ("train", "val") for told_ in told(stored_rows(tmp_path / "x", split))]
    keys = [key for _, _, key, *_ in found]
    assert len(set(keys)) == len(keys)
    # All records of d.jsonl are also in a.jsonl.
    assert "d.jsonl" not in {file.path for file, *_ in found}
