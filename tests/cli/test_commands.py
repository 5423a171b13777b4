from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from default_tokenizer import NOTE, without_notes

import chatmill
from chatmill.cli.app import app_of
from chatmill.store.read import open_dataset
from chatmill.tokenizer import open_tokenizer

CHAT = '{"id": "c1", "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}\n'
BAD = '{"id": "c2", "messages": [{"role": "bot", "content": "hi"}]}\n'


def test_check_counts_records_messages_and_sources(run):
    Path("chat.jsonl").write_text(CHAT * 3)
    assert run("check", "chat.jsonl") == (
        0,
        "3 records, 3 of them with an assistant turn\nmessages: 3 assistant, 3 user\nsources:  3 chat\n"
        'shape:    messages: the records have "messages"\n'
        'first:    chat.jsonl:1 (id=c1)\n  user      "hi"\n  assistant "yo"\n',
        "",
    )
    code, out, _ = run("check", "chat.jsonl", "--json")
    assert (code, json.loads(out)) == (
        0,
        {
            "records": 3,
            "with_assistant": 3,
            "messages": {"assistant": 3, "user": 3},
            "sources": {"chat": 3},
            "rejected": {},
            "files": [{"file": "chat.jsonl", "shape": "messages", "why": 'the records have "messages"'}],
            "first": {
                "id": "c1",
                "source": "chat",
                "file": "chat.jsonl",
                "line": 1,
                "tools": [],
                "weight": 1.0,
                "template_kwargs": "",
                "unread_keys": [],
                "is_text": False,
                "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}],
            },
            "noted": {},
        },
    )


def test_check_shows_the_first_record_and_names_unread_keys(run):
    call = {"name": "f", "arguments": {"x": 1}}
    answer = {"role": "assistant", "content": "no", "thinking": "hm", "tool_calls": [call], "train": False, "mood": 1}
    turns = [{"role": "user", "content": "hi\n\x1b[2J"}, answer]
    record = {"messages": turns, "tools": [{"name": "f"}], "weight": 0.5, "score": 3}
    Path("chat.json").write_text(json.dumps([record, {**record, "score": 4}]))
    Path("text.jsonl").write_text('{"text": "abc"}')
    code, out, err = run("check", "chat.json", "text.jsonl")
    assert (code, err) == (0, "")
    assert out.splitlines()[3:] == [
        'shape:    messages: the records have "messages" (chat.json)',
        'shape:    text: the records have "text" (text.jsonl)',
        "first:    chat.json:1",
        "  tools: 1, weight: 0.5",
        '  user      "hi\\n\\x1b[2J"',
        '  assistant reasoning "hm" "no" calls f({"x":1}) [weight 0]',
        "  noted record_weight: 2 rows, 0 tokens",
        'note: 2 records have the key "messages[].mood", which is not read',
        'note: 2 records have the key "score", which is not read',
    ]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_keys_that_are_not_read_are_in_the_summary_and_the_metadata(run, workers):
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo", "mood": 1}]
    Path("chat.jsonl").write_text("".join(json.dumps({"messages": turns, "n": n}) + "\n" for n in range(5)) + CHAT)
    code, out, err = run("prepare", "chat.jsonl", "-o", "out", "--workers", workers, "--tokenizer", "bytes")
    assert (code, err) == (0, "")
    assert [line for line in out.splitlines() if line.startswith("note:")] == [
        'note: 5 records have the key "messages[].mood", which is not read',
        'note: 5 records have the key "n", which is not read',
    ]
    noted = open_dataset(Path("out")).metadata.ledger.to_json()["noted"]
    assert {reason: entry["rows"] for reason, entry in noted.items()} == {
        "unread_key messages[].mood": 5,
        "unread_key n": 5,
    }


def test_prepare_reads_columns_and_texts(run):
    Path("qa.jsonl").write_text('{"q": "one?", "a": "two"}\n')
    code, _, _ = run("prepare", "qa.jsonl", "-o", "qa", "--columns", "prompt=q,completion=a")
    assert code == 0
    assert open_dataset(Path("qa")).metadata.config["sources"][0]["columns"] == "prompt=q,completion=a"
    Path("text.jsonl").write_text('{"text": "Q: one? A: two"}\n')
    code, _, err = run("prepare", "text.jsonl", "-o", "no", "--format", "chatml")
    assert (code, without_notes(err)) == (
        1,
        "chatmill: text.jsonl:1: the record is a single text without turns; use --format text\n",
    )
    code, _, err = run("prepare", "text.jsonl", "-o", "text", "--format", "text", "--response-template", "A:")
    assert (code, err) == (0, NOTE)
    rows = open_dataset(Path("text"))["train"].rows([0])
    assert bytes(rows.ids[rows.mask()][:-1].astype("u1")) == b" two"


def test_skipped_records_are_counted_and_written_to_a_file(run):
    Path("chat.jsonl").write_text(CHAT + BAD + "{\n" + CHAT)
    code, out, err = run("check", "chat.jsonl", "--on-error", "skip", "--rejects", "bad.jsonl")
    assert code == 0
    assert out.startswith("2 records")
    assert err.startswith("rejected 2: ")
    assert err.endswith("; see bad.jsonl\n")
    rejects = [json.loads(line) for line in Path("bad.jsonl").read_text().splitlines()]
    assert [(reject["line"], reject["id"]) for reject in rejects] == [(2, "c2"), (3, None)]


def test_render_shows_every_span_with_its_reason(run):
    Path("chat.jsonl").write_text(CHAT)
    code, out, err = run("render", "chat.jsonl", "--format", "primer")
    assert (code, err) == (0, NOTE)
    assert out.splitlines() == [
        "chat.jsonl:1  8 tokens, 3 trained",
        "        0 user      open      header     <|usr|>",
        "        0 user      content   role       hi",
        "        0 user      close     role       <|eot|>",
        "        1 assistant open      header     <|asst|>",
        "     *  1 assistant content   role       yo",
        "     *  1 assistant close     role       <|eot|>",
        "1 row, 8 tokens, 3 trained (37.5%)",
    ]


def test_render_as_json_gives_ids_labels_weights_and_spans(run):
    Path("chat.jsonl").write_text(CHAT)
    code, out, err = run("render", "chat.jsonl", "--format", "primer", "--json")
    usr, asst, eot = 261, 262, 263
    assert code == 0
    assert json.loads(out) == {
        "source": "chat",
        "file": "chat.jsonl",
        "line": 1,
        "ids": [usr, 104, 105, eot, asst, 121, 111, eot],
        "labels": [-100, -100, -100, -100, -100, 121, 111, eot],
        "weights": [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0],
        "spans": [
            {"start": 0, "stop": 1, "role": "user", "part": "open", "rule": "header", "weight": 0.0},
            {"start": 1, "stop": 3, "role": "user", "part": "content", "rule": "role", "weight": 0.0},
            {"start": 3, "stop": 4, "role": "user", "part": "close", "rule": "role", "weight": 0.0},
            {"start": 4, "stop": 5, "role": "assistant", "part": "open", "rule": "header", "weight": 0.0},
            {"start": 5, "stop": 7, "role": "assistant", "part": "content", "rule": "role", "weight": 1.0},
            {"start": 7, "stop": 8, "role": "assistant", "part": "close", "rule": "role", "weight": 1.0},
        ],
    }
    assert err == NOTE + "1 row, 8 tokens, 3 trained (37.5%)\n"


def test_render_shows_three_rows_by_default(run):
    Path("chat.jsonl").write_text(CHAT * 9)
    assert run("render", "chat.jsonl")[1].count("tokens, 3 trained\n") == 3
    assert run("render", "chat.jsonl", "-n", "5")[1].count("tokens, 3 trained\n") == 5
    assert run("render", "chat.jsonl", "--json")[1].count("\n") == 9


def test_render_skips_records_that_the_format_does_not_support(run):
    Path("two.toml").write_text(
        '[tokens]\nt="<|eot|>"\n[user]\nopen="<|eot|>"\nclose="<|eot|>"\n[assistant]\nopen="<|eot|>"\nclose="<|eot|>"'
    )
    Path("chat.jsonl").write_text(
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}\n' + CHAT
    )
    code, _, err = run("render", "chat.jsonl", "--format", "two.toml")
    assert code == 1
    assert err == (
        "chatmill: chat.jsonl:1: message 0 has role system, which the format two does not define; "
        "expected user, assistant; or add [system] to the format\n"
    )
    code, out, err = run("render", "chat.jsonl", "--format", "two.toml", "--on-error", "skip", "--json")
    assert (code, [json.loads(line)["line"] for line in out.splitlines()]) == (0, [2])
    assert err.endswith("rejected 1: 1 role_not_in_format; see rejects.jsonl\n")


def test_a_tokenizer_is_trained_and_overwritten_only_with_the_flag(run):
    Path("chat.jsonl").write_text(CHAT * 50)
    code, out, _ = run("tokenizer", "train", "chat.jsonl", "--vocab-size", "259", "-o", "tok.json", "--json")
    made = json.loads(out)
    assert (code, made["path"], made["vocab_size"], made["records"]) == (0, "tok.json", 259, 50)
    opened = open_tokenizer("tok.json", control={"start": "<|im_start|>", "eot": "<|im_end|>"})
    assert opened.sha256 == made["sha256"]
    assert opened.decode(opened.encode("hi <|im_end|> ü")) == "hi <|im_end|> ü"
    assert sorted(path.name for path in Path().iterdir()) == ["chat.jsonl", "tok.json"]
    before = Path("tok.json").read_bytes()
    code, _, err = run("tokenizer", "train", "chat.jsonl", "--vocab-size", "300", "-o", "tok.json")
    assert (code, err) == (1, "chatmill: tok.json: already exists; use another name or pass --overwrite\n")
    assert Path("tok.json").read_bytes() == before
    assert run("tokenizer", "train", "chat.jsonl", "--vocab-size", "260", "-o", "tok.json", "--overwrite")[0] == 0
    assert Path("tok.json").read_bytes() != before


def test_info_names_missing_control_tokens_and_the_flag_that_adds_them(run):
    Path("chat.jsonl").write_text(CHAT)
    run("tokenizer", "train", "chat.jsonl", "--vocab-size", "259", "-o", "tok.json")
    code, _, err = run("tokenizer", "info", "tok.json", "--format", "primer")
    assert code in (1, 2)
    assert all(word in err for word in ("tok.json", "<|sys|>", "<|usr|>", "<|asst|>", "<|eot|>", "--add-tokens"))
    code, out, _ = run("tokenizer", "info", "tok.json", "--format", "primer", "--add-tokens", "--json")
    info = json.loads(out)
    assert (code, info["special_token_ids"]) == (0, {"sys": 259, "usr": 260, "asst": 261, "eot": 262})
    assert info["vocab_size"] == 263


def test_info_without_a_format_lists_all_control_tokens(run):
    Path("chat.jsonl").write_text(CHAT)
    run("tokenizer", "train", "chat.jsonl", "--vocab-size", "262", "-o", "tok.json", "--format", "primer")
    code, out, _ = run("tokenizer", "info", "tok.json")
    assert (code, out.splitlines()[1:]) == (
        0,
        ["        0  <|sys|>", "        1  <|usr|>", "        2  <|asst|>", "        3  <|eot|>"],
    )
    assert json.loads(run("tokenizer", "info", "tok.json", "--json")[1])["special_token_ids"] == {
        "<|sys|>": 0,
        "<|usr|>": 1,
        "<|asst|>": 2,
        "<|eot|>": 3,
    }
    code, _, err = run("tokenizer", "info", "tok.json", "--add-tokens")
    assert (code, err) == (
        2,
        "chatmill: --add-tokens requires --format, which determines the tokens to add\n",
    )


def test_formats_lists_the_presets_and_prints_one_that_loads_again(run):
    names = [line.split()[0] for line in run("formats")[1].splitlines() if not line.startswith(" ")]
    assert names == ["chatml", "ngpt", "primer", "post-training", "text", "template"]
    Path("mine.toml").write_text(run("formats", "ngpt")[1])
    Path("chat.jsonl").write_text(CHAT)
    mine = run("render", "chat.jsonl", "--format", "mine.toml", "--json")[1]
    assert mine == run("render", "chat.jsonl", "--format", "ngpt", "--json")[1]
    assert [entry["name"] for entry in json.loads(run("formats", "--json")[1])] == [
        "chatml",
        "ngpt",
        "primer",
        "post-training",
    ]
    assert json.loads(run("formats", "chatml", "--json")[1])["toml"].startswith("# ChatML")


def test_the_version_is_that_of_the_package(run):
    assert run("--version") == (0, f"chatmill {chatmill.__version__}\n", "")


def test_the_package_runs_as_a_module():
    command = [sys.executable, "-m", "chatmill", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"chatmill {chatmill.__version__}\n", "")


def commands(group, name="chatmill"):
    for word, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{name} {word}")
        else:
            yield f"{name} {word}", command


@pytest.mark.parametrize(("name", "command"), list(commands(typer.main.get_command(app_of()))))
def test_every_command_has_an_example_and_accepts_json(name, command):
    help = command.help or ""
    assert "Example" in help
    assert f"  {name} " in help + " "
    assert any("--json" in option.opts for option in command.params)
    assert all(getattr(option, "help", "x") for option in command.params)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("prepare chat.jsonl", "Missing option '--output' / '-o'; see chatmill prepare --help"),
        ("prepare --nope", "No such option: --nope (Possible options: --shape); see chatmill prepare --help"),
        ("chat x --max-tokens -3", "Input should be greater than or equal to 1; see chatmill chat --help"),
        ("prepare chat.jsonl -o x --max-tokens 2k", "; see chatmill prepare --help"),
        ("prepare chat.jsonl -o x --fit nothing", "Invalid value for '--fit': 'nothing' is not one of 'exchanges', "),
        ("audit nothing", "No such command 'nothing'; see chatmill audit --help"),
        ("nothing", "No such command 'nothing'; see chatmill --help"),
        ("prepare a\nb -o x --max-tokens 2\nk", "--max-tokens"),
    ],
)
def test_usage_errors_are_one_line_that_names_the_help(run, command, said):
    code, out, err = run(*command.split(" "))
    assert (code, out) == (2, "")
    assert err.startswith("chatmill: ") and err.count("\n") == 1 and said in err
