from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HOSTILE = "\x1b[2J\x1b]0;x\x07 \u202e\u2066 \x00\x9b <script>alert(1)</script>"


def line(*texts: str) -> str:
    turns = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    return json.dumps({"messages": turns}, ensure_ascii=False) + "\n"


@pytest.fixture
def run(run):
    Path("chat.jsonl").write_text(line("hi", "yo") + line("Gold?", "Au.", "Tin?", "Sn.") + line(HOSTILE, HOSTILE))
    assert run("prepare", "chat.jsonl", "-o", "v1", "--format", "primer", "--workers", "1")[0] == 0
    return run


def test_show_lists_episodes_and_shows_one(run):
    code, out, err = run("show", "v1", "-n", "2")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "      0  chat.jsonl:1  8 tokens, 38% trained  hi",
        "      1  chat.jsonl:2  23 tokens, 35% trained  Gold?",
        "2 of 3 episodes in train; format primer",
    ]
    assert run("show", "v1", "1") == (
        0,
        "train 1  chat.jsonl:2  23 tokens, 8 trained (35%)\n"
        "user 0\n  <|usr|>Gold?<|eot|>\n"
        "assistant 1\n  <|asst|>[Au.<|eot|>]\n"
        "user 2\n  <|usr|>Tin?<|eot|>\n"
        "assistant 3\n  <|asst|>[Sn.<|eot|>]\n",
        "",
    )
    assert run("show", "v1", "0", "--decode")[1].splitlines()[6] == (
        "   *      5     121   1 assistant content   role       y"
    )


def test_show_as_json(run):
    said = json.loads(run("show", "v1", "0", "--json")[1])
    assert said["tokens"] == ["<|usr|>", "h", "i", "<|eot|>", "<|asst|>", "y", "o", "<|eot|>"]
    assert said["labels"] == [-100] * 5 + [121, 111, 263]
    assert said["segments"] == [{"start": 0, "stop": 8, "source": "chat", "file": "chat.jsonl", "line": 1}]
    assert said["spans"][4] == {
        "start": 5, "stop": 7, "role": "assistant", "part": "content", "rule": "role", "message": 1, "weight": 1.0,
        "target": None,
    }  # fmt: skip
    listed = [json.loads(each) for each in run("show", "v1", "--json")[1].splitlines()]
    assert [each["text"] for each in listed[:2]] == ["hi", "Gold?"]


def test_show_search_ignores_case(run):
    assert run("show", "v1", "--search", "GOLD")[1].splitlines() == [
        "      1  chat.jsonl:2  23 tokens, 35% trained  <|usr|>Gold?<|eot|><|asst|>Au.<|eot|><|usr|>Tin?<|e…",
        "1 of 3 episodes in train match; format primer",
    ]
    assert (
        run("show", "v1", "--search", "o", "-n", "1")[1].splitlines()[-1]
        == "stopped at --limit 1; more than 1 of 3 episodes in train match; format primer"
    )
    assert run("show", "v1", "--search", "silver")[1] == "0 of 3 episodes in train match; format primer\n"


def test_explain_is_one_sentence(run):
    assert run("explain", "v1", "0:5") == (
        0,
        'Token 5 of train episode 0, "y" (id 121), the text of assistant message 1, from chat.jsonl:1, is trained: '
        "train_on assistant selects assistant messages (rule role).\n",
        "",
    )
    said = json.loads(run("explain", "v1", "0:0", "--json")[1])
    assert (said["weight"], said["rule"], said["reason"]) == (
        0,
        "header",
        "the loss mask never includes the header of a turn",
    )


def test_stats_counts_episodes_and_tokens(run):
    code, out, err = run("stats", "v1", "--block-size", "100")
    assert (code, err) == (0, "")
    assert out.startswith("train: 3 rows, 3 segments, ")
    for words in ("tokens per row: min 8", "role", "source", "block size", "longest rows", "ledger", "stored"):
        assert words in out
    said = json.loads(run("stats", "v1", "--json")[1])["splits"]["train"]
    episodes = [json.loads(run("show", "v1", str(n), "--json")[1]) for n in range(3)]
    assert said["tokens"] == sum(len(each["ids"]) for each in episodes)
    assert said["trained"] == sum(label != -100 for each in episodes for label in each["labels"])
    assert said["length_quantiles"]["0.5"] == sorted(len(each["ids"]) for each in episodes)[1]
    assert [fill["block_size"] for fill in said["fill"]] == [512, 1024, 2048, 4096, 8192]


def test_report_writes_a_page_and_overwrites_only_with_the_flag(run):
    code, out, _ = run("report", "v1", "-o", "page.html")
    assert (code, out) == (0, f"page.html: {Path('page.html').stat().st_size:,} bytes, 3 episodes in train\n")
    page = Path("page.html").read_text()
    assert page.startswith("<!doctype html>") and "<script" not in page
    code, _, err = run("report", "v1", "-o", "page.html")
    assert (code, err) == (1, "chatmill: page.html: already exists; use another name or pass --overwrite\n")
    code, out, _ = run("report", "v1", "-o", "page.html", "--overwrite", "--json")
    assert (code, json.loads(out)["episodes"]) == (0, {"train": 3})
    assert Path("page.html").read_text() == page
    assert sorted(path.name for path in Path().iterdir()) == ["chat.jsonl", "page.html", "v1"]


@pytest.mark.parametrize(
    "command", [["show", "v1", "2"], ["show", "v1", "2", "--decode"], ["show", "v1"], ["explain", "v1", "2:1"]]
)
def test_escape_sequences_in_texts_are_not_sent_to_a_terminal(run, command, tmp_path):
    chatmill = Path(sys.executable).with_name("chatmill")
    main, other = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "200"}
    env.pop("NO_COLOR", None)
    process = subprocess.Popen([chatmill, *command], cwd=tmp_path, stdout=other, stderr=subprocess.DEVNULL, env=env)
    os.close(other)
    raw = b""
    try:
        while piece := os.read(main, 1 << 16):
            raw += piece
    except OSError:
        pass
    os.close(main)
    assert process.wait() == 0
    text = raw.decode().replace("\r\n", "\n")
    assert "\\x1b" in text
    left = re.sub("\x1b\\[[0-9;]*m", "", text).replace("\n", "")
    assert left.isprintable(), ascii(left)
    assert ("\x1b[" in text) == (command[0] == "show")


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["show", "v1", "3"], 2, "no episode 3 in train; expected 0 to 2"),
        (["show", "v1", "0", "--search", "x"], 2, "cannot be used together"),
        (["show", "v1", "--decode"], 2, "--decode requires EPISODE"),
        (["show", "v1", "--search", ""], 2, "the search text is empty"),
        (["show", "none"], 1, "no such folder"),
        (["show", "v1", "--split", "val"], 1, "has no split val"),
        (["show", "v1", "--tokenizer", "none.json"], 1, "none.json"),
        (["explain", "v1", "3"], 2, "expected EPISODE:TOKEN"),
        (["explain", "v1", "0:8"], 2, "no token 8 in episode 0 of train; expected 0 to 7"),
        (["stats", "v1", "--split", "val"], 1, "has no split val"),
        (["report", "v1", "-o", "none/page.html"], 1, "no such folder"),
        (["report", "v1", "-o", "."], 1, ".: is a folder; expected the name of a file"),
        (["report", "v1", "-o", ".", "--overwrite"], 1, ".: is a folder; expected the name of a file"),
        (["report", "v1", "-o", "v1", "--overwrite"], 1, "v1: is a folder; expected the name of a file"),
        (["view", "v1", "--audit", "none.log"], 2, "is not an audit log"),
        (["view", "v1", "--config", "none.json"], 2, "none.json"),
    ],
)
def test_errors_of_show_commands_are_reported_in_one_line(run, args, code, words):
    found, out, err = run(*args)
    assert (found, out) == (code, "")
    assert words in err
    assert err.count("\n") == 1


def test_another_tokenizer_than_the_datasets_is_refused(run):
    run("tokenizer", "train", "chat.jsonl", "--vocab-size", "270", "-o", "tok.json")
    code, _, err = run("show", "v1", "--tokenizer", "tok.json")
    assert code == 1
    given = r"was built with the tokenizer \w{12}…, but tok.json is \w{12}…"
    assert re.fullmatch(rf"chatmill: v1: {given}; pass the tokenizer that it was built with\n", err)


def test_a_tokenizer_next_to_its_dataset_is_found_and_reported_if_missing(run):
    run("tokenizer", "train", "chat.jsonl", "--vocab-size", "270", "-o", "tok.json", "--format", "primer")
    args = ["prepare", "chat.jsonl", "-o", "v2", "--format", "primer", "--tokenizer", "tok.json", "--workers", "1"]
    assert run(*args)[0] == 0
    assert "Gold?" in run("show", "v2", "1")[1]
    Path("tok.json").rename("elsewhere.json")
    code, out, err = run("show", "v2", "1")
    assert (code, "⟨" in out) == (0, True)
    assert re.fullmatch(
        r"chatmill: tokens are shown as ids: the tokenizer tok.json \(\w{12}…\) was not found; .*\n", err
    )
    assert "Gold?" in run("show", "v2", "1", "--tokenizer", "elsewhere.json")[1]


def test_a_tokenizer_with_added_tokens_is_found_again(run):
    assert run("tokenizer", "train", "chat.jsonl", "--vocab-size", "300", "-o", "small.json")[0] == 0
    added = ("--format", "primer", "--tokenizer", "small.json", "--add-tokens")
    assert run("prepare", "chat.jsonl", "-o", "v2", *added, "--workers", "1")[0] == 0
    for flags in ((), ("--tokenizer", "small.json")):
        code, out, err = run("show", "v2", "0", *flags)
        assert (code, err) == (0, "")
        assert out.endswith("user 0\n  <|usr|>hi<|eot|>\nassistant 1\n  <|asst|>[yo<|eot|>]\n")


def test_caches_are_shown_too(run):
    Path("primer.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}\n' * 3
    )
    code, _, err = run("build-sft-primer", "--primer-jsonl", "primer.jsonl", "--out-dir", "c", "--val-frac", "0.3")
    assert code == 0, err
    code, out, _ = run("show", "c/primer", "0")
    assert code == 0
    assert "[yo<|eot|>]" in out
    assert "the dataset stores a loss mask without reasons (rule given)" in run("explain", "c/primer", "0:1")[1]
    assert run("stats", "c/primer")[1].startswith("train: ")


def test_view_prints_its_address_and_ends_with_ctrl_c(run, tmp_path):
    chatmill = Path(sys.executable).with_name("chatmill")
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    process = subprocess.Popen(
        [chatmill, "view", "v1"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )
    first, second = process.stdout.readline(), process.stdout.readline()
    assert re.fullmatch(r"v1: http://127\.0\.0\.1:\d+/  \(press Ctrl-C to quit\)\n", first)
    assert second == f"the index for search and filters is kept in {tmp_path / 'cache/chatmill/view'}\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert "Traceback" not in err
    assert sorted(path.name for path in (tmp_path / "v1").iterdir()) == [
        "dataset_metadata.json", "tokenizer_state.json", "train"
    ]  # fmt: skip


def test_a_port_that_is_taken_is_reported_in_one_line(run, tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, _, err = run("view", "v1", "--port", str(taken.getsockname()[1]), "--index", "index")
    assert code == 2
    assert "cannot be used" in err and err.count("\n") == 1


def test_show_commands_do_not_need_torch(run, tmp_path):
    code = """
import sys; sys.modules["torch"] = None; sys.modules["transformers"] = None
from chatmill.cli.main import main
for args in (["show", "v1", "1"], ["explain", "v1", "1:2"], ["stats", "v1"], ["report", "v1", "-o", "r.html"]):
    sys.argv = ["chatmill", *args]
    try:
        main()
    except SystemExit as ended:
        assert ended.code in (0, None), args
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_its_extra_the_viewer_names_the_package_to_install(run, tmp_path):
    code = (
        "import sys; sys.modules['starlette'] = None; sys.modules['starlette.applications'] = None\n"
        "sys.argv = ['chatmill', 'view', 'v1']\nfrom chatmill.cli.main import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "chatmill: the viewer needs starlette.applications; pip install 'chatmill[view]'\n"
