from __future__ import annotations

import json
from importlib import import_module

import pytest
from child_processes import may_fork
from prepare_fixtures import JOBS, build, conversations, digests, job_of, left_beside, lines, write_corpus

from chatmill.format import load_format
from chatmill.prepare import assemble, pipeline, unit
from chatmill.prepare.job import InputSource, Job
from chatmill.prepare.pipeline import units_of
from chatmill.records import InputFiles, units
from chatmill.store.verify import verify_dataset
from chatmill.tokenizer import byte_bpe, train_bpe


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> tuple[str, ...]:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize("name", JOBS)
def test_processes_and_unit_sizes_do_not_change_a_byte(tmp_path, inputs, name):
    job = job_of(inputs, **JOBS[name])
    build(job, tmp_path / "one")
    expected = digests(tmp_path / "one")
    assert len([path for path in expected if path.endswith("tokens.bin")]) > 2
    assert verify_dataset(tmp_path / "one", full=True).faults == ()
    for workers, unit_bytes in ((1, 20_000), (2, 9_000), (4, 1_500)):
        target = tmp_path / f"{workers}"
        build(job, target, workers=workers, unit_bytes=unit_bytes)
        assert digests(target) == expected, (workers, unit_bytes)
        assert left_beside(target) == []


@pytest.mark.parametrize("name", [name for name, options in JOBS.items() if options.get("fit") != "blocks"])
def test_writing_shards_in_processes_does_not_change_a_byte(tmp_path, inputs, name, monkeypatch, request):
    if not may_fork(request):
        return
    job = job_of(inputs, **{**JOBS[name], "shard_tokens": 5_000})
    right = build(job, tmp_path / "one")
    monkeypatch.setattr(pipeline, "FORKED_TOKENS", 0)
    monkeypatch.setattr(
        pipeline, "assemble", lambda *args, **options: pytest.fail("written by one process instead of tasks")
    )
    for workers in (2, 5):
        target = tmp_path / f"{workers}"
        assert build(job, target, workers=workers, unit_bytes=9_000).ledger.to_json() == right.ledger.to_json()
        assert digests(target) == digests(tmp_path / "one")
        assert left_beside(target) == []


@pytest.mark.parametrize("name", ["plain", "blocks", "shuffle", "all at once"])
def test_the_chunk_sizes_of_staging_and_packing_do_not_change_a_byte(tmp_path, inputs, name, monkeypatch):
    job = job_of(inputs, **JOBS[name])
    build(job, tmp_path / "one")
    monkeypatch.setattr(unit, "CHUNK", 7)
    monkeypatch.setattr(units, "WIDE_BLOCK", 3_000)
    monkeypatch.setattr(unit, "FILE_TOKENS", 1_000)
    monkeypatch.setattr(assemble, "CHUNK_TOKENS", 700)
    monkeypatch.setattr(assemble, "MAPPED", 2)
    build(job, tmp_path / "two", unit_bytes=9_000)
    assert digests(tmp_path / "two") == digests(tmp_path / "one")


@pytest.mark.parametrize("name", ["plain", "cut", "blocks", "all at once"])
def test_the_compiled_extensions_do_not_change_a_byte(tmp_path, inputs, name, monkeypatch):
    texts = (message["content"] for record in conversations(300) for message in record["messages"])
    options = {"format": "chatml", **JOBS[name]}
    control = list(load_format(options["format"]).tokens.values())
    (tmp_path / "tokenizer.json").write_bytes(train_bpe(texts, vocab_size=400, control=control))
    job = job_of(inputs, tokenizer=str(tmp_path / "tokenizer.json"), **options)
    renderer = unit.job_renderer(job)
    assert type(renderer.tokenizer._backend._encode) is byte_bpe.ByteBpe
    build(job, tmp_path / "one", renderer=renderer)
    expected = digests(tmp_path / "one")
    monkeypatch.setattr(import_module("chatmill.records.read"), "COMPILED", False)
    build(job, tmp_path / "objects", renderer=renderer)
    monkeypatch.setattr("chatmill.rows._copy", None)
    build(job, tmp_path / "arrays", renderer=renderer)
    monkeypatch.setattr(byte_bpe, "_bpe", None)
    build(job, tmp_path / "nothing")
    for target in ("objects", "arrays", "nothing"):
        assert digests(tmp_path / target) == expected, target


def test_workers_that_inherit_the_traces_of_a_template_write_the_same_bytes(tmp_path, inputs, request):
    if not may_fork(request):
        return
    (tmp_path / "tokenizer.json").write_bytes(
        train_bpe(["a b c"], vocab_size=300, control=["<|im_start|>", "<|im_end|>"])
    )
    turn = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    prompt = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    template = "{% for m in messages %}" + turn + "{% endfor %}" + prompt
    config = {"chat_template": template, "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    job = job_of(inputs, tokenizer=str(tmp_path), format="template", pack=300, on_error="skip")
    renderer = unit.job_renderer(job)
    build(job, tmp_path / "one", renderer=renderer)
    renderer = unit.job_renderer(job)
    build(job, tmp_path / "three", renderer=renderer, workers=3, unit_bytes=9_000)
    assert len(renderer._cache) > 0
    assert digests(tmp_path / "three") == digests(tmp_path / "one")


def test_the_first_blocks_are_those_of_each_source_with_readable_local_files(tmp_path):
    record = {"messages": [{"role": "user", "content": "Hi"}]}
    for name in ("a", "b", "gone"):
        (tmp_path / f"{name}.jsonl").write_bytes(lines([record] * (1 + (name == "b"))))
    (tmp_path / "other.jsonl").write_bytes(b'{"messages": 1}\n')
    sources = tuple(InputSource((str(tmp_path / f"{name}.jsonl"),), "messages") for name in ("gone", "a", "other", "b"))
    job = Job(sources)
    units = units_of(job, InputFiles([source.inputs for source in sources]), 9_000)
    (tmp_path / "gone.jsonl").unlink()
    assert [len(block) for block in unit.first_blocks([*units, *units])] == [1, 2]


def test_the_first_two_blocks_of_a_source_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(units, "WIDE_BLOCK", 1_000)
    (tmp_path / "a.jsonl").write_bytes(lines([{"messages": [{"role": "user", "content": "Hi"}]}] * 200))
    parts = units_of(
        Job((InputSource((str(tmp_path / "a.jsonl"),)),)), InputFiles([[str(tmp_path / "a.jsonl")]]), 9_000
    )
    found = [*unit.first_blocks(parts)]
    assert len(found) == 2 and 10 < len(found[0]) < 50


def test_the_folder_of_the_input_does_not_change_a_byte(tmp_path, inputs):
    (tmp_path / "elsewhere").mkdir()
    moved = write_corpus(tmp_path / "elsewhere")
    for name, files in (("one", inputs), ("two", moved)):
        build(job_of(files, val_split=0.2), tmp_path / name)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")


def test_many_units_need_few_open_files(tmp_path):
    import resource

    inputs = write_corpus(tmp_path)
    job = job_of(inputs, pack=300, dedupe=True, val_split=0.2)
    build(job, tmp_path / "one")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (assemble.MAPPED + 100, hard))
    try:
        build(job, tmp_path / "two", unit_bytes=100)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert digests(tmp_path / "two") == digests(tmp_path / "one")


def test_a_large_input_has_larger_units_instead_of_more_units(inputs, monkeypatch):
    files = InputFiles([inputs])
    assert len(pipeline.units_of(job_of(inputs), files, 1_000)) > 50
    monkeypatch.setattr(pipeline, "MOST_UNITS", 20)
    assert len(pipeline.units_of(job_of(inputs), files, 1_000)) <= 20 + len(inputs)
