from __future__ import annotations

import gzip
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from default_tokenizer import without_notes
from prepare_fixtures import Faults, build, conversations, digests, job_of, lines

from chatmill.cli.main import main
from chatmill.errors import DataError, RecordError
from chatmill.prepare.engine import LocalEngine
from chatmill.prepare.pipeline import prepare_dataset, relative_names
from chatmill.prepare.unit import job_renderer
from chatmill.tokenizer import train_bpe


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat.jsonl").write_bytes(lines(conversations(30)))
    return tmp_path


def everything(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.lstat().st_size if path.is_file() else 0) for path in folder.rglob("*"))


def refused(monkeypatch, capsys, command: str) -> tuple[int, str]:
    before = everything(Path.cwd())
    monkeypatch.setattr(sys, "argv", ["chatmill", "prepare", *shlex.split(command)])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    err = without_notes(err)
    assert out == ""
    assert err.startswith("chatmill: ") and err.count("\n") == 1, err
    assert everything(Path.cwd()) == before
    return ended.value.code, err.removeprefix("chatmill: ").removesuffix("\n")


FLAGS = {
    "no.jsonl -o x": (1, "no.jsonl: no such file; expected a file, a folder or a glob"),
    "'no*.jsonl' -o x": (1, "no*.jsonl: the glob matches no file; expected at least one"),
    "chat.jsonl -o new/deep/x --val-file no.jsonl": (1, "no.jsonl: no such file; expected a file, a folder or a glob"),
    "chat.jsonl -o x --tokenizer no.json": (1, "no.json: "),
    "chat.jsonl -o x --format nothing": (2, '"nothing"'),
    "chat.jsonl -o x --shape nothing": (2, 'unknown shape "nothing"; expected '),
    "chat.jsonl -o x --max-tokens 1": (2, "--max-tokens 1 is too small; expected at least 2"),
    "chat.jsonl -o x --max-tokens -4 --pack 0": (2, "--max-tokens -4 is too small; expected at least 2"),
    "chat.jsonl -o x --pack 1": (2, "--pack 1 is too small; expected at least 2"),
    "chat.jsonl -o x --pack 50 --max-tokens 60": (2, "--max-tokens 60 is greater than --pack 50; expected at most 50"),
    "chat.jsonl -o x --fit blocks": (2, "--fit blocks requires the block size as --max-tokens"),
    "chat.jsonl -o x --fit blocks --max-tokens 9 --pack 9": (2, "--fit blocks already makes full rows; remove"),
    "chat.jsonl -o new/x --fit blocks --max-tokens 90": (1, 'use a format such as "post-training"'),
    "chat.jsonl -o x --val-split 1": (2, "--val-split 1.0 is not between 0 and 1; 0.1 keeps a tenth for validation"),
    "chat.jsonl -o x --val-split -0.1": (2, "--val-split -0.1 is not between 0 and 1"),
    "chat.jsonl -o x --val-split nan": (2, "--val-split nan is not between 0 and 1"),
    "chat.jsonl -o x --val-split 0.1 --val-file chat.jsonl": (2, "both select validation data; use only one"),
    "chat.jsonl -o x --val-file ./chat.jsonl": (
        1,
        "chat.jsonl: is used for both training and validation; use it",
    ),
    "chat.jsonl -o new/deep/x --val-split 0.00001": (
        1,
        "the split val would be empty; use at least --val-split 0.",
    ),
    "chat.jsonl -o x --val-split 0.99999": (1, "the split train would be empty; use more records, or a smaller --val"),
    "chat.jsonl -o x --split shuffle --seed -1": (2, "--seed -1 is negative; expected an integer of at least 0"),
    "chat.jsonl -o x --shard-tokens 0": (2, "--shard-tokens 0 is too small; expected at least 1"),
    "chat.jsonl -o x --address auto": (2, "--address requires --engine ray"),
    "chat.jsonl -o new/x --engine ray --address 127.0.0.1:1": (2, "no Ray cluster at 127.0.0.1:1 ("),
    "chat.jsonl -o x --fit error --max-tokens 20": (1, "chat.jsonl:1: "),
    "chat.jsonl -o x --fit drop --max-tokens 3": (1, "the split train would be empty; no records are left"),
    "chat.jsonl -o .": (2, ".: has no name; use NAME or DIR/NAME as the folder of the dataset"),
    "chat.jsonl -o ..": (2, "..: has no name"),
    "chat.jsonl -o chat.jsonl": (1, "chat.jsonl: already exists and is not a folder; use another name"),
    "chat.jsonl -o chat.jsonl --overwrite": (1, "chat.jsonl: is not a folder and is not replaced"),
    "chat.jsonl -o chat.jsonl/x": (1, "chat.jsonl/x: cannot be created (File exists); use another folder"),
    "chat.jsonl -o /proc/x": (1, "/proc/x: cannot be created ("),
    "chat.jsonl -o /proc/no/where/x": (1, "/proc/no/where/x: cannot be created ("),
    "no.toml -o x": (1, "no.toml: cannot be read (No such file or directory); a recipe is a YAML or TOML file"),
    "chat.jsonl no.toml -o x": (1, "no.toml: no such file; expected a file, a folder or a glob"),
}


@pytest.mark.parametrize("command", FLAGS)
def test_invalid_flags_are_reported_in_one_line(place, monkeypatch, capsys, command):
    code, said = FLAGS[command]
    found, line = refused(monkeypatch, capsys, command)
    assert said in line
    assert found == code


INPUTS = {
    "no bytes": ("a.jsonl", b"", "a.jsonl: the input is empty; expected at least one record"),
    "blank lines": ("a.jsonl", b"\n \n\n", "a.jsonl: the input has no records; expected at least one"),
    "an empty array": ("a.json", b"[]", "the input has no records; expected at least one"),
    "nothing, compressed": ("a.jsonl.gz", gzip.compress(b""), "the input has no records; expected at least one"),
    "compressed and truncated": (
        "a.jsonl.gz",
        gzip.compress(lines(conversations(9)))[:-9],
        "the compressed file is truncated",
    ),
    "not JSON": ("a.jsonl", lines(conversations(9)) + b"{nonsense\n", "a.jsonl:10: "),
    "no known role": ("a.jsonl", b'{"messages": [{"role": "bot", "content": ""}]}\n', "a.jsonl:1: "),
    "no answer": (
        "a.jsonl",
        b'{"messages": [{"role": "user", "content": "?"}]}\n',
        "the split train would be empty; no records are left to train on (1 no_trained_tokens)",
    ),
}


def test_an_error_about_empty_input_names_the_first_files(place, monkeypatch, capsys):
    for name in "abcde":
        (place / f"{name}.jsonl").write_bytes(b"")
    code, line = refused(monkeypatch, capsys, "a.jsonl b.jsonl c.jsonl d.jsonl e.jsonl -o x")
    said = "a.jsonl, b.jsonl, c.jsonl and 2 more: the input is empty; expected at least one record"
    assert (code, line) == (1, said)


def test_overwrite_is_not_advised_for_a_folder_that_is_not_a_dataset(place, monkeypatch, capsys):
    (place / "notes").mkdir()
    _, line = refused(monkeypatch, capsys, "chat.jsonl -o notes")
    assert line == "notes: already exists; use another name or pass --overwrite"
    (place / "notes/plan.txt").write_text("plan")
    _, line = refused(monkeypatch, capsys, "chat.jsonl -o notes")
    assert line == "notes: already exists and has no dataset_metadata.json; use another name"


@pytest.mark.parametrize("kind", INPUTS)
def test_input_that_cannot_be_read_is_reported_in_one_line(place, monkeypatch, capsys, kind):
    name, data, said = INPUTS[kind]
    (place / name).write_bytes(data)
    code, line = refused(monkeypatch, capsys, f"{name} -o new/x --shape messages")
    assert code == 1
    assert said in line


def test_if_all_records_are_skipped_the_error_gives_the_reason(place, monkeypatch, capsys):
    (place / "a.jsonl").write_bytes(b"{}\n[]\n")
    monkeypatch.setattr(sys, "argv", shlex.split("chatmill prepare a.jsonl -o x --shape messages --on-error skip"))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    line = capsys.readouterr().err
    assert "the split train would be empty; no records are left to train on (" in line
    assert len((place / "x.rejects.jsonl").read_text().splitlines()) == 2


def test_a_refused_command_keeps_the_rejects_of_an_earlier_one(place, monkeypatch, capsys):
    (place / "x.rejects.jsonl").write_bytes(b"")
    (place / "x").mkdir()
    (place / "x/notes.txt").write_bytes(b"mine")
    refused(monkeypatch, capsys, "no.jsonl -o x --on-error skip --overwrite")
    refused(monkeypatch, capsys, "chat.jsonl -o x --on-error skip --overwrite")
    assert (place / "x.rejects.jsonl").read_bytes() == b""
    said = (1, "x.rejects.jsonl: already exists; use another name or pass --overwrite")
    assert refused(monkeypatch, capsys, "chat.jsonl -o x --on-error skip") == said


def test_a_dataset_is_never_written_over_its_own_input(place, monkeypatch, capsys):
    build(job_of(("chat.jsonl",)), Path("x"))
    (place / "chat.jsonl").rename(place / "x/chat.jsonl")
    Path("y").symlink_to("x")
    said = "x: is not replaced, because dataset_metadata.json does not list chat.jsonl; "
    assert refused(monkeypatch, capsys, "x/chat.jsonl -o x --overwrite")[1].startswith(said)
    said = "x: contains y/tokenizer_state.json, which the command reads; use another folder"
    (place / "x/chat.jsonl").unlink()
    assert refused(monkeypatch, capsys, "y/tokenizer_state.json -o x --overwrite --shape messages") == (1, said)
    assert refused(monkeypatch, capsys, "x/chat.jsonl -o y --overwrite")[1].startswith("y: is a symbolic link")


def test_stored_file_names_are_unique_and_independent_of_how_inputs_are_given(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert relative_names([Path("one.jsonl"), Path("more/two.jsonl")]) == ["one.jsonl", "more/two.jsonl"]
    there = tmp_path / "there" / "one.jsonl"
    assert relative_names([Path("one.jsonl"), there]) == ["here/one.jsonl", "there/one.jsonl"]
    assert relative_names([Path(f"/{there}")]) == ["one.jsonl"]
    assert relative_names([there, Path(f"/{tmp_path}/here/one.jsonl")]) == ["there/one.jsonl", "here/one.jsonl"]


def test_an_existing_dataset_is_replaced_only_with_overwrite(place, monkeypatch, capsys):
    build(job_of(("chat.jsonl",)), Path("x"))
    said = "x: already exists; use another name or pass --overwrite"
    assert refused(monkeypatch, capsys, "chat.jsonl -o x") == (1, said)
    build(job_of(("chat.jsonl",), max_tokens=50), Path("y"))
    build(job_of(("chat.jsonl",), max_tokens=50), Path("x"), overwrite=True)
    assert digests(Path("x")) == digests(Path("y"))


def test_a_tokenizer_without_the_tokens_of_the_format_is_reported(place, monkeypatch, capsys):
    Path("bare.json").write_bytes(train_bpe(["a few words of text"], vocab_size=260, control=["<|other|>"]))
    code, line = refused(monkeypatch, capsys, "chat.jsonl -o x --tokenizer bare.json")
    assert code == 2
    assert "bare.json" in line and "<|im_start|>" in line and "--add-tokens" in line


class Liar:
    def __init__(self, tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size

    def __getattr__(self, name: str):
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize(
    ("vocab_size", "said"),
    [(2**32 + 1, "a vocabulary of 4294967297 ids; at most 4294967296 can be stored"), (200, "token id ")],
)
def test_a_vocabulary_that_cannot_be_stored_and_ids_beyond_it_are_refused(place, vocab_size, said):
    job = job_of(("chat.jsonl",))
    renderer = job_renderer(job)
    with pytest.raises(DataError, match=said):
        prepare_dataset(
            job,
            Path("x"),
            renderer=replace(renderer, tokenizer=Liar(renderer.tokenizer, vocab_size)),
            engine=LocalEngine(1),
        )
    assert [path.name for path in place.iterdir()] == ["chat.jsonl"]


def test_input_that_changes_while_it_is_read_is_not_published(place):
    def change(progress) -> None:
        with Path("chat.jsonl").open("ab") as file:
            file.write(lines(conversations(1)))

    with pytest.raises(DataError, match=r"chat.jsonl: grew from .* bytes while it was being read; build again"):
        prepare_dataset(job_of(("chat.jsonl",)), Path("x"), engine=LocalEngine(1), on_progress=change)
    assert [path.name for path in place.iterdir()] == ["chat.jsonl"]


RECIPES = {
    "not valid TOML": ("fit = ", "recipe.toml: not valid TOML: "),
    "a number of 400 digits": (
        f'val_split = {"9" * 400}\n[[source]]\ninputs = ["chat.jsonl"]',
        "recipe.toml: the recipe: val_split must be a number",
    ),
    "a row longer than the limit": (
        f'pack = {"9" * 20}\n[[source]]\ninputs = ["chat.jsonl"]',
        f"recipe.toml: pack {'9' * 20} is too large; expected at most 2147483648",
    ),
    "no source": (
        'fit = "tail"',
        "recipe.toml: no sources; expected a list of mappings ([[sources]] in TOML), each with",
    ),
    "no inputs": (
        "[[source]]",
        "recipe.toml: source 0 has no inputs; expected a list of files, globs, folders or URLs",
    ),
    "a number instead of a list": ("[[source]]\ninputs = 1", "source 0: inputs must be a list of strings"),
    "an unknown key": ('[[source]]\ninputs = ["chat.jsonl"]\ncolour = 1', 'source 0 has unknown key "colour" (known: '),
    "a table instead of a list": ('[source]\ninputs = ["chat.jsonl"]', "no sources; expected a list of mappings"),
    "wrong kinds": (
        'max_tokens = "9"\nval_split = true\nfit = "best"\ndedupe = 1\n[[source]]\ninputs = ["chat.jsonl"]',
        "recipe.toml: the recipe: max_tokens must be an integer; the recipe: val_split must be a number; "
        'the recipe: fit must be "exchanges", "turns", "tail", "windows", "drop", "error", "blocks"; '
        "the recipe: dedupe must be true or false",
    ),
    "a path instead of a name": (
        '[[source]]\ninputs = ["chat.jsonl"]\nname = "../up"',
        'the source name "../up" is empty or a path; expected a plain name',
    ),
    "too small": ('max_tokens = 1\n[[source]]\ninputs = ["chat.jsonl"]', "recipe.toml: max_tokens 1 is too small"),
}


@pytest.mark.parametrize("kind", RECIPES)
def test_all_errors_of_a_recipe_are_reported_in_one_line(place, monkeypatch, capsys, kind):
    text, said = RECIPES[kind]
    (place / "recipe.toml").write_text(text)
    code, line = refused(monkeypatch, capsys, "recipe.toml -o x")
    assert code in (1, 2)
    assert said in line


def test_flags_that_belong_in_the_recipe_are_refused(place, monkeypatch, capsys):
    (place / "recipe.toml").write_text('[[source]]\ninputs = ["chat.jsonl"]')
    code, line = refused(monkeypatch, capsys, "recipe.toml -o x --pack 90 --val-split 0.1 --workers 2")
    assert (code, line) == (2, "--pack, --val-split cannot be used with a recipe; set them in recipe.toml instead")


@pytest.fixture
def faulty(place) -> Path:
    records = [json.dumps(record).encode() for record in conversations(400)]
    records[150] = b'{"messages": [{"role": "bot", "content": ""}]}'
    records[149] = json.dumps({"messages": [{"role": "user", "content": "a" * 3000}] * 2}).encode()
    records[222] = b"{"
    records[399] = b"[]"
    (place / "faulty.jsonl").write_bytes(b"\n".join(records) + b"\n")
    (place / "later.jsonl").write_bytes(b"[]\n" + lines(conversations(40)))
    return place


WAYS = [(1, 2**20), (1, 3_000), (2, 30_000), (4, 1_000)]


@pytest.mark.parametrize(("workers", "unit_bytes"), WAYS)
def test_the_first_fault_in_input_order_is_reported(faulty, workers, unit_bytes):
    with pytest.raises(RecordError) as error:
        build(job_of(("faulty.jsonl", "later.jsonl")), Path("x"), workers=workers, unit_bytes=unit_bytes)
    assert (error.value.file, error.value.line) == ("faulty.jsonl", 151)
    assert not list(Path.cwd().glob(".*"))


@pytest.mark.parametrize(("workers", "unit_bytes"), WAYS)
def test_a_row_that_is_too_long_is_reported_before_a_later_invalid_record(faulty, workers, unit_bytes):
    job = job_of(("faulty.jsonl",), fit="error", max_tokens=2_000)
    with pytest.raises(RecordError) as error:
        build(job, Path("x"), workers=workers, unit_bytes=unit_bytes)
    assert error.value.line == 150


@pytest.mark.parametrize(("workers", "unit_bytes"), WAYS)
def test_rejects_are_reported_in_input_order(faulty, workers, unit_bytes):
    told = Faults()
    job = job_of(("faulty.jsonl", "later.jsonl"), on_error="skip")
    metadata = build(job, Path("x"), workers=workers, unit_bytes=unit_bytes, on_fault=told)
    assert [(file, line) for file, line, _ in told] == [
        ("faulty.jsonl", 151),
        ("faulty.jsonl", 223),
        ("faulty.jsonl", 400),
        ("later.jsonl", 1),
    ]
    rejected = {reason: entry.rows for bucket, reason, entry in metadata.ledger if bucket == "rejected"}
    kinds = [kind for *_, kind in told]
    assert rejected == {kind: kinds.count(kind) for kind in kinds}
    assert metadata.ledger.total("read").rows == 441
