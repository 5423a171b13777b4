from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from default_tokenizer import without_notes

from chatmill.cli.main import main
from chatmill.store import files
from chatmill.store.read import open_dataset
from chatmill.store.verify import verify_dataset

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    shutil.copytree(ROOT / "data", tmp_path / "data", ignore=shutil.ignore_patterns("cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def run(monkeypatch, capsys, command: str) -> str:
    monkeypatch.setattr(sys, "argv", ["chatmill", *shlex.split(command)])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    err = without_notes(re.sub(r".*: done, .* rows, .* tokens.* in .*\n", "", err))
    assert (ended.value.code or 0, err) == (0, "")
    return out


def script(command: str, *, code: int = 0) -> subprocess.CompletedProcess[str]:
    name, *flags = shlex.split(command)
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / name), *flags], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    return done


def sha256(folder: str) -> str:
    return json.loads((Path(folder) / "dataset_metadata.json").read_text())["sha256"]


def test_the_summary_accounts_for_all_tokens(place, monkeypatch, capsys):
    out = run(monkeypatch, capsys, "prepare data/conversations.jsonl -o x --val-split 0.1 --max-tokens 120")
    lines = out.splitlines()
    assert lines[0].startswith("x/train: 2") and " episodes, " in lines[0] and lines[0].endswith("shards 1")
    assert lines[1].startswith("x/val: 3")
    ledger = [line.split() for line in lines[2:]]
    assert ledger[0] == ["reason", "rows", "tokens", "trained"]
    assert [words[0] for words in ledger[1:]] == [
        *("read", "rendered", "stored", "truncated", "dropped", "note:", "note:")
    ]
    assert lines[-2] == "note: 8,235 of 22,183 trained tokens were cut off; raise --max-tokens, or use --fit windows"
    assert lines[-1] == (
        "note: 77 rows were dropped because the last exchange does not fit, a loss of 4,168 of 22,183 trained "
        "tokens (18.8%); "
        "raise --max-tokens, or use --fit turns or --fit windows"
    )
    assert verify_dataset("x", full=True).faults == ()
    stored = open_dataset("x")
    assert len(stored["train"]) + len(stored["val"]) == 400 - 77


def test_the_note_about_windows_does_not_claim_a_loss(place, monkeypatch, capsys):
    answer = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a" * 90}]}
    Path("long.jsonl").write_text(json.dumps(answer))
    lines = run(monkeypatch, capsys, "prepare long.jsonl -o w --max-tokens 64 --fit windows").splitlines()
    assert lines[-1] == "note: 3 rows have only part of an answer; raise --max-tokens"
    trained = {words[0]: words[-1] for words in map(str.split, lines) if words[0] in ("rendered", "stored")}
    assert trained == {"rendered": "91", "stored": "91"}


@pytest.mark.parametrize(
    ("flags", "limit"),
    [
        ("--pack 120", "--pack"),
        ("--pack 120 --max-tokens 120", "--pack and --max-tokens"),
        ("--pack 240 --max-tokens 120", "--max-tokens"),
    ],
)
def test_the_notes_name_the_options_that_limit_the_length(place, monkeypatch, capsys, flags, limit):
    lines = run(monkeypatch, capsys, f"prepare data/conversations.jsonl -o x {flags}").splitlines()
    assert lines[-2:] == [
        f"note: 8,235 of 22,183 trained tokens were cut off; raise {limit}, or use --fit windows",
        "note: 77 rows were dropped because the last exchange does not fit, a loss of 4,168 of 22,183 trained "
        f"tokens (18.8%); raise {limit}, or use --fit turns or --fit windows",
    ]


def test_json_holds_the_hash_the_splits_and_the_ledger(place, monkeypatch, capsys):
    told = json.loads(run(monkeypatch, capsys, "prepare data/conversations.jsonl -o x --pack 512 --json"))
    assert told.keys() == {"path", "sha256", "format", "splits", "ledger"}
    assert told["format"] == "chatml"
    assert (told["path"], told["sha256"]) == ("x", sha256("x"))
    train = told["splits"].pop("train")
    assert told["splits"] == {}
    episodes = open_dataset("x")["train"]
    assert (train["episodes"], train["tokens"], train["shards"]) == (len(episodes), episodes.num_tokens, 1)
    assert train["longest"] <= 512
    stored = told["ledger"]["stored"][""]
    assert (stored["rows"], stored["tokens"], stored["trained"]) == (400, train["tokens"], train["trained_tokens"])


def test_a_recipe_gives_the_same_dataset_as_flags(place, monkeypatch, capsys):
    Path("recipe.toml").write_text(
        'max_tokens = 200\nval_split = 0.1\nsplit = "shuffle"\nseed = 3\n\n'
        '[[source]]\ninputs = ["data/conversations.jsonl"]\n'
    )
    run(monkeypatch, capsys, "prepare recipe.toml -o one --workers 1")
    flags = "--max-tokens 200 --val-split 0.1 --split shuffle --seed 3"
    run(monkeypatch, capsys, f"prepare data/conversations.jsonl -o two {flags}")
    assert sha256("one") == sha256("two")


def test_a_recipe_reads_each_source_in_its_own_way(place, monkeypatch, capsys):
    Path("recipe.toml").write_text(
        'max_tokens = 300\n\n[[source]]\ninputs = ["data/conv*.jsonl"]\nname = "chat"\n\n'
        '[[source]]\ninputs = ["data/tool_conversations.jsonl"]\nshape = "tool"\ntrain_on = "last"\n\n'
        '[[source]]\ninputs = ["data/primer.jsonl"]\nshape = "primer"\nonly_val = true\n'
    )
    told = json.loads(run(monkeypatch, capsys, "prepare recipe.toml -o x --json"))
    assert told["splits"]["val"]["episodes"] == 120
    metadata = open_dataset("x").metadata
    assert metadata is not None
    assert [file.source for file in metadata.splits["train"].files] == ["chat", "tool_conversations"]
    assert [file.path for file in metadata.splits["val"].files] == ["data/primer.jsonl"]


def test_rejected_records_are_written_to_a_file_and_counted(place, monkeypatch, capsys):
    lines = Path("data/conversations.jsonl").read_bytes().splitlines()[:20]
    Path("some.jsonl").write_bytes(b"\n".join([*lines[:7], b"{}", *lines[7:], b"nonsense"]))
    out = run(monkeypatch, capsys, "prepare some.jsonl -o x --on-error skip --rejects out.jsonl")
    assert out.splitlines()[-1] == "2 records were rejected; see out.jsonl"
    assert [json.loads(line)["line"] for line in Path("out.jsonl").read_text().splitlines()] == [8, 22]
    assert len(open_dataset("x")["train"]) == 20


def test_notes_about_dropped_rows_count_the_lost_trained_tokens(place, monkeypatch, capsys):
    out = run(monkeypatch, capsys, "prepare data/conversations.jsonl -o x --max-tokens 120")
    [dropped] = [line.split()[-1] for line in out.splitlines() if line.startswith("dropped ")]
    [note] = [line for line in out.splitlines() if "does not fit" in line]
    assert note == (
        "note: 77 rows were dropped because the last exchange does not fit, a loss of "
        f"{dropped} of 22,183 trained tokens (18.8%); raise --max-tokens, or use --fit turns or --fit windows"
    )
    data = Path("data/conversations.jsonl").read_text("utf-8").splitlines(keepends=True)
    Path("one.jsonl").write_text(data[0] + data[2], "utf-8")
    out = run(monkeypatch, capsys, "prepare one.jsonl -o y --max-tokens 200 --fit drop --tokenizer bytes")
    assert "note: 1 row was too long and was dropped, a loss of " in out


def test_a_validation_split_larger_than_the_training_split_gets_a_note(place, monkeypatch, capsys):
    large, small = "data/conversations.jsonl", "data/primer.jsonl"
    note = "note: val has more episodes than train (400 and 120); check that they are not swapped"
    assert note in run(monkeypatch, capsys, f"prepare {small} --val-file {large} -o x").splitlines()
    assert "note: val has" not in run(monkeypatch, capsys, f"prepare {large} --val-file {small} -o y")


def test_validation_files_go_to_the_validation_split(place, monkeypatch, capsys):
    run(monkeypatch, capsys, "prepare data/conversations.jsonl -o x --val-file data/primer.jsonl --shape messages")
    assert [len(open_dataset("x")[split]) for split in ("train", "val")] == [400, 120]


def test_overwrite_replaces_and_resume_with_nothing_to_resume_builds(place, monkeypatch, capsys):
    run(monkeypatch, capsys, "prepare data/conversations.jsonl -o x --resume")
    first = sha256("x")
    run(monkeypatch, capsys, "prepare data/conversations.jsonl -o x --overwrite --max-tokens 64")
    assert sha256("x") != first
    assert sorted(path.name for path in place.iterdir()) == ["data", "x"]


def test_an_old_dataset_that_cannot_be_removed_is_a_warning_and_exit_0(place, monkeypatch, capsys):
    run(monkeypatch, capsys, "prepare data/primer.jsonl -o x")
    remove = files.Disk.remove

    def held(self, path):
        if path.name == "mask.bin":
            raise PermissionError(1, "Operation not permitted", str(path))
        remove(self, path)

    monkeypatch.setattr(files.Disk, "remove", held)
    monkeypatch.setattr(sys, "argv", shlex.split("chatmill prepare data/primer.jsonl -o x --overwrite --max-tokens 64"))
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        with pytest.raises(SystemExit) as ended:
            main()
    assert (ended.value.code or 0, without_notes(capsys.readouterr().err)) == (
        0,
        "chatmill: warning: x: was replaced, but the old dataset was not removed: x.kept contains "
        "train/shard_00000/mask.bin, which cannot be removed (Operation not permitted); inspect and remove it\n",
    )
    assert verify_dataset("x", full=True).faults == ()


def test_progress_is_shown_in_a_terminal(place):
    import pty

    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", "from chatmill.cli.main import main; main()", "prepare"]
    with subprocess.Popen(
        [*command, "data/conversations.jsonl", "-o", "x", "--json"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm"},
    ) as build:
        os.close(theirs)
        shown = b""
        try:
            while piece := os.read(ours, 4096):
                shown += piece
        except OSError:
            # On a pseudo-terminal, `os.read` raises OSError after the other end is closed.
            pass
        assert build.stdout is not None
        assert json.loads(build.stdout.read())["path"] == "x"
    os.close(ours)
    assert b"render" in shown and b"tokens" in shown and b"400 rows" in shown


def test_the_chat_script_runs_as_documented(place, monkeypatch, capsys):
    flags = "--input data/conversations.jsonl --output_dir data/chat_sft --val_split 0.1"
    out = script(f"prepare_chat_sft.py {flags}").stdout
    assert out.startswith("data/chat_sft/train: ")
    run(monkeypatch, capsys, "prepare data/conversations.jsonl -o same --shape messages --val-split 0.1")
    assert sha256("data/chat_sft") == sha256("same")


def test_the_tool_script_runs_as_documented(place, monkeypatch, capsys):
    flags = "--input data/tool_conversations.jsonl --output_dir data/tool_sft --val_split 0.1"
    script(f"prepare_tool_sft.py {flags}")
    run(monkeypatch, capsys, "prepare data/tool_conversations.jsonl -o same --shape tool --val-split 0.1")
    assert sha256("data/tool_sft") == sha256("same")


def test_the_scripts_take_their_other_flags(place, monkeypatch, capsys):
    run(
        monkeypatch,
        capsys,
        "tokenizer train data/conversations.jsonl --vocab-size 600 --format chatml -o tokenizer.json",
    )
    common = "--input data/conversations.jsonl --tokenization tokenizer.json --tokens_per_shard 5000"
    told = script(f"prepare_chat_sft.py {common} --output_dir one --val_split 0.2 --seed 7 --verbose").stdout
    summary = json.loads(told)
    assert summary["splits"]["train"]["shards"] > 3
    assert summary["splits"]["val"]["episodes"] == 80
    flags = "--tokenizer tokenizer.json --shard-tokens 5000 --val-split 0.2 --split shuffle --seed 7 --shape messages"
    run(monkeypatch, capsys, f"prepare data/conversations.jsonl -o same --format chatml {flags}")
    assert sha256("one") == sha256("same")
    script(f"prepare_chat_sft.py {common} --output_dir two --val_file data/primer.jsonl")
    assert len(open_dataset("two")["val"]) == 120


def test_a_failing_script_prints_one_line(place):
    flags = "--input data/no.jsonl --output_dir x --val_split 0.1"
    assert script(f"prepare_chat_sft.py {flags}", code=1).stderr == (
        "chatmill: data/no.jsonl: no such file; expected a file, a folder or a glob\n"
    )
    flags = "--input data/conversations.jsonl --output_dir x --val_split 1"
    assert script(f"prepare_chat_sft.py {flags}", code=2).stderr.count("\n") == 1


@pytest.mark.parametrize("flags", ["--workers 2", "--split shuffle --seed 7"])
def test_an_empty_val_names_the_smallest_share_that_fills_it(place, monkeypatch, capsys, flags):
    def refused(command: str) -> str:
        monkeypatch.setattr(sys, "argv", ["chatmill", *shlex.split(command)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 1
        return without_notes(capsys.readouterr().err)

    command = f"prepare data/primer.jsonl -o x {flags} --val-split"
    line = refused(f"{command} 0.0001")
    share, *others = re.findall(r"--val-split ([0-9.]+)", line)
    assert line.startswith(f"chatmill: the split val would be empty; use at least --val-split {share}")
    assert "the split val would be empty" in refused(f"{command} {float(share) * 0.98:.6g}")
    assert "x/val: 1 episode," in run(monkeypatch, capsys, f"{command} {share}")
    if not others:
        assert "shuffle" in flags
        return
    assert f", or at least --val-split {others[0]} with --split shuffle --seed 42" in line
    exact = f"prepare data/primer.jsonl -o y --split shuffle --seed 42 --val-split {others[0]}"
    assert "y/val: 1 episode," in run(monkeypatch, capsys, exact)


def test_the_scripts_name_their_own_flags_for_an_empty_val(place):
    line = script("prepare_chat_sft.py --input data/primer.jsonl --output_dir x --val_split 0.0001", code=1)
    share, exact = re.findall(r"--val_split ([0-9.]+)", line.stderr)
    assert f", or at least --val_split {exact} with --seed 42" in line.stderr and "--split " not in line.stderr
    assert f"use at least --val_split {share}," in line.stderr
