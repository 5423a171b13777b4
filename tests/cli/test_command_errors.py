from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from chatmill.errors import DataError
from chatmill.store.read import open_dataset

CHAT = '{"id": "c1", "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}\n'
BAD = '{"id": "c2", "messages": [{"role": "bot", "content": "hi"}]}\n'


def test_a_faulty_record_stops_with_one_line_and_exit_code_1(run):
    Path("chat.jsonl").write_text(CHAT + BAD)
    code, out, err = run("check", "chat.jsonl")
    assert (code, out) == (1, "")
    assert err == (
        'chatmill: chat.jsonl:2 (id=c2): message 0 has role "bot"; expected system, user, assistant or tool; '
        "--columns assistant=bot maps this role\n"
    )


@pytest.mark.parametrize(
    "command",
    [
        "tokenizer train chat.jsonl --vocab-size 300 -o chat.jsonl",
        "tokenizer train *.jsonl --vocab-size 300 -o hard.jsonl",
        "tokenizer train chat.jsonl --vocab-size 300 -o link.json",
        "export transcripts chat.jsonl --context-length 99 -o ./chat.jsonl",
        "export transcripts chat.jsonl --context-length 99 -o out.txt --on-error skip --rejects out.txt",
        "export transcripts chat.jsonl --context-length 99 --tokenizer tok.json --add-tokens -o tok.json",
        "report v1 -o v1/tokenizer_state.json",
        "report v1 --tokenizer tok.json -o tok.json",
        "report v1 -o null",
        "prepare chat.jsonl -o v1 --on-error skip --rejects v1/r.jsonl",
        "prepare chat.jsonl -o v1 --on-error skip --rejects notes.md",
        "check chat.jsonl --on-error skip --rejects notes.md",
        "render chat.jsonl --tokenizer tok.json --add-tokens --on-error skip --rejects tok.json",
        "build-sft-oasst1 --input chat.jsonl --on-error skip --rejects chat.jsonl",
        "reweigh v1 --train-on last -o v1/train",
        "reweigh v1 --train-on last -o .",
        "export parquet v1 -o ..",
    ],
)
def test_no_command_replaces_its_input_or_foreign_files(run, command):
    Path("chat.jsonl").write_text(CHAT * 20)
    Path("hard.jsonl").hardlink_to("chat.jsonl")
    Path("link.json").symlink_to("chat.jsonl")
    Path("notes.md").write_text("mine\n")
    Path("null").symlink_to("/dev/null")
    assert run("tokenizer", "train", "chat.jsonl", "--vocab-size", "300", "-o", "tok.json")[0] == 0
    assert run("prepare", "chat.jsonl", "-o", "v1", "--workers", "1")[0] == 0

    def everything() -> dict[str, tuple[int, bytes]]:
        files = [path for path in Path().rglob("*") if path.is_file() and path.name != "null"]
        return {str(path): (path.lstat().st_ino, path.read_bytes()) for path in files}

    before = everything()
    code, out, err = run(*command.split(), "--overwrite")
    assert (code in (1, 2), out, err.count("\n")) == (True, "", 1), err
    assert everything() == before


@pytest.mark.parametrize(
    ("args", "code", "line"),
    [
        (["check", "none.jsonl"], 1, "none.jsonl"),
        (["render", "empty.jsonl"], 1, "empty.jsonl: no records; expected at least one"),
        (["render", "empty.jsonl", "--json"], 1, "empty.jsonl: no records; expected at least one"),
        (["check", "empty.jsonl"], 1, "empty.jsonl: no records; expected at least one"),
        (["check", "*.none"], 1, "*.none"),
        (["check", "chat.jsonl", "--shape", "rows"], 2, 'unknown shape "rows"'),
        (
            ["render", "chat.jsonl", "--format", "llama3"],
            2,
            'no format "llama3"; expected chatml, ngpt, primer, post-training or a .toml file, or text, or template '
            "(the chat template of the tokenizer folder)\n",
        ),
        (["render", "chat.jsonl", "--tokenizer", "none.json"], 1, "none.json"),
        (["formats", "chatlm"], 2, 'no preset "chatlm"'),
        (["tokenizer", "train", "chat.jsonl", "--vocab-size", "10", "-o", "t.json"], 2, "256"),
        (
            ["tokenizer", "train", "chat.jsonl", "--vocab-size", "300", "-o", "no/t.json"],
            1,
            "no: no such folder; create it",
        ),
        (
            ["check", "chat.jsonl", "--on-error", "skip", "--rejects", "no/r.jsonl"],
            1,
            "no: no such folder; create it or use another folder",
        ),
    ],
)
def test_errors_are_one_line_and_never_a_traceback(run, args, code, line):
    Path("chat.jsonl").write_text(CHAT)
    Path("empty.jsonl").write_text("\n")
    found, out, err = run(*args)
    assert (found, out) == (code, "")
    assert line in err
    assert err.count("\n") == 1
    assert err.startswith("chatmill: ")


@pytest.mark.parametrize("command", [["check"], ["check", "--json"], ["render"], ["render", "--json"]])
def test_an_input_whose_records_are_all_rejected_is_an_error(run, command):
    Path("bad.jsonl").write_text(BAD * 2)
    name, *more = command
    code, _, err = run(name, "bad.jsonl", *more, "--on-error", "skip")
    assert code == 1
    assert err.endswith("chatmill: bad.jsonl: every record was rejected (2); expected at least one valid record\n")
    assert Path("rejects.jsonl").read_text().count("\n") == 2


def test_unknown_flags_and_commands_are_usage_errors(run):
    assert run("check", "--no-such-flag")[0] == 2
    assert run("mill")[0] == 2


@pytest.mark.parametrize(
    "command", [["check"], ["render"], ["prepare", "-o", "out", "--rejects", "./rejects.jsonl", "--overwrite"]]
)
def test_the_rejects_file_cannot_be_an_input(run, command):
    Path("rejects.jsonl").write_text(CHAT + "bad\n")
    name, *more = command
    code, _, err = run(name, "rejects.jsonl", *more, "--on-error", "skip")
    assert (code, err) == (
        2,
        "chatmill: rejects.jsonl: is an input, which the rejects would overwrite; use another file\n",
    )
    assert Path("rejects.jsonl").read_text() == CHAT + "bad\n"


@pytest.mark.parametrize("encoding", ["utf-8:strict", "ascii"])
def test_characters_outside_the_output_encoding_are_escaped(tmp_path, encoding):
    name = os.fsdecode(b"b\xff.jsonl")
    (tmp_path / name).write_text(CHAT.replace("hi", "3 × 3") + BAD, encoding="utf-8")
    commands = [
        ["check", name, "--on-error", "skip"],
        ["render", name, "-n", "1", "--json"],
        ["prepare", name, "-o", "d", "--on-error", "skip"],
        ["show", "d", "--json"],
        ["show", "d", "0", "--json"],
    ]
    code = f"""
import sys
from chatmill.cli.main import main

for command in {commands!r}:
    sys.argv = ["chatmill", *command]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (command, end)
    print(end="\\0", flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    checked, rendered, _, shown, row, _ = done.stdout.split("\0")
    assert checked.startswith("1 record, ")
    assert json.loads((tmp_path / "rejects.jsonl").read_bytes())["file"] == name
    assert json.loads(rendered)["file"] == name
    assert "3 × 3" in json.loads(shown)["text"]
    assert json.loads(row)["segments"][0]["file"] == name


DEEP = "[" * 20_000
HUGE = "9" * 26


def test_too_deep_nesting_is_reported_in_one_line_with_its_place(run):
    Path("chat.jsonl").write_text(CHAT)
    Path("deep.toml").write_text(f"a = {DEEP}")
    Path("tokens").mkdir()
    assert run("tokenizer", "train", "chat.jsonl", "--vocab-size", "260", "-o", "tokens/tokenizer.json")[0] == 0
    Path("tokens/special_tokens_map.json").write_text(DEEP)
    question = '{"id": "1", "messages": [{"role": "user", "content": "q"}], "objects": '
    Path("truth.jsonl").write_text(f"{question}{DEEP}{']' * 20_000}}}\n")
    run("prepare", "chat.jsonl", "-o", "d")
    for path in (*Path("d").rglob("spans.bin"), *Path("d").rglob("origins.bin")):
        path.unlink()
    Path("d/dataset_metadata.json").write_text("{}")
    Path("d/tokenizer_state.json").write_text(DEEP)
    with pytest.raises(DataError, match=r"^d/tokenizer_state.json: cannot be read \(maximum recursion depth"):
        open_dataset("d").tokenizer_state()
    for name, config in (("odd", DEEP), ("mine", '{"model_type": "gpt"}')):
        Path(name).mkdir()
        Path(name, "config.json").write_text(config)
    Path("mine/training.json").write_text(DEEP)
    Path("mine/model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    for args, line in (
        ("chat odd --prompt q", "odd/config.json: cannot be read as JSON (maximum recursion depth"),
        ("chat mine --prompt q", "mine/training.json: cannot be read (maximum recursion depth"),
        ("render chat.jsonl --format deep.toml", "deep.toml: not valid TOML: maximum recursion depth exceeded"),
        ("prepare deep.toml -o d2", "deep.toml: not valid TOML: maximum recursion depth exceeded"),
        ("certify --tokenizer tokens", "tokens/special_tokens_map.json: cannot be read (maximum recursion depth"),
        ("rollout answers truth.jsonl -o d3 --add-tokens", "truth.jsonl:1: the record is nested too deeply; expected"),
    ):
        code, out, err = run(*args.split())
        assert (code, out, err.count("\n"), err[: len(f"chatmill: {line}")]) == (1, "", 1, f"chatmill: {line}")
    Path("config.json").write_text("{}")
    code, _, err = run("train", "--model_name", "m", "--config_file", "config.json", "--mix_sft", DEEP)
    assert (code, err[:34]) == (2, 'chatmill: the flags: mix_sft is "[')


@pytest.mark.parametrize(
    "args",
    [
        "prepare chat.jsonl -o d2 --pack",
        "render chat.jsonl -n",
        "stats d --block-size",
        "order d --mode random --first",
        "tokenizer train chat.jsonl -o t.json --vocab-size",
    ],
)
def test_a_number_out_of_range_is_a_usage_error(run, args):
    Path("chat.jsonl").write_text(CHAT)
    run("prepare", "chat.jsonl", "-o", "d")
    code, out, err = run(*args.split(), HUGE)
    assert (code, out, "Traceback" in err) == (2, "", False)
    assert "2147483648" in err or "16777216" in err


def test_running_out_of_memory_is_reported_in_one_line(run, monkeypatch):
    def much(*args, **options):
        return np.empty(1 << 50, dtype=np.int64)

    monkeypatch.setattr("chatmill.cli.record_options.ReadOptions.records", much)
    code, out, err = run("check", "chat.jsonl")
    assert (code, out) == (1, "")
    assert err.startswith("chatmill: not enough memory (Unable to allocate 8.00 PiB")
    assert err.endswith("); process less data at a time\n")
