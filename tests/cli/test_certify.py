from __future__ import annotations

import json
from pathlib import Path

import pytest
from child_processes import may_fork

from chatmill.format.template.certify import observe
from chatmill.prepare.engine import LocalEngine
from chatmill.tokenizer import train_bpe

CHATML = """{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
CONTROL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture
def folder(tmp_path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "tokenizer.json").write_bytes(train_bpe(["a quick brown fox"] * 3, vocab_size=300, control=CONTROL))
    (made / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": CHATML}))
    return made


def write(path: Path, *conversations) -> str:
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    return path.name


def say(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


def lines(out: str) -> dict[str, tuple[str, str]]:
    return {line.split()[1]: (line.split()[0], line.split(maxsplit=2)[2]) for line in out.splitlines()}


def test_a_valid_template_passes_every_check(run, folder):
    code, out, err = run("certify", "--tokenizer", "model")
    found = lines(out)
    assert (code, err) == (0, "")
    levels = {level: [name for name, (of, _) in found.items() if of == level] for level in ("WARN", "SKIP", "FAIL")}
    assert levels == {"WARN": ["reasoning"], "SKIP": ["terminator", "bos", "tools", "null"], "FAIL": []}
    assert found["ids"][1].startswith("18 conversations have the same ids as in transformers")
    assert found["terminator"][1].endswith("without generation_config.json it is unknown whether the model stops there")
    assert "the template drops the tool_calls of message 1" in found["tools"][1]
    assert found["text_tokens"][1] == "all 4 control tokens are plain text inside messages"


def test_faulty_records_can_be_skipped(run, folder, tmp_path):
    name = write(tmp_path / "chat.jsonl", say("a", "b"), [{"role": "bot", "content": "x"}])
    code, _, err = run("certify", "--tokenizer", "model", name)
    assert (code, err.split(": ")[1]) == (1, "chat.jsonl:2")
    code, out, err = run("certify", "--tokenizer", "model", name, "--on-error", "skip")
    assert (code, lines(out)["records"]) == (0, ("PASS", "1 record; every answer is trained on"))
    assert err == "rejected 1: 1 role; see rejects.jsonl\n"


def test_a_preset_that_the_tokenizer_does_not_support_suggests_its_template(run, folder, tmp_path):
    name = write(tmp_path / "chat.jsonl", say("a", "b"))
    code, _, err = run("render", name, "--tokenizer", "model", "--format", "primer")
    assert code == 2
    assert err.endswith("--add-tokens, or use the chat template of the folder with --format template\n")


def test_the_end_of_an_answer_must_be_where_the_model_stops(run, folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": [3]}')
    code, out, _ = run("certify", "--tokenizer", "model")
    end = "the loss mask includes <|im_end|> at the end of answers; the model stops there"
    assert (code, lines(out)["terminator"]) == (0, ("PASS", end))
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
    code, out, err = run("certify", "--tokenizer", "model")
    status, text = lines(out)["terminator"]
    assert (code, status) == (1, "FAIL")
    assert text.startswith("<|im_end|> ends message 1 of probe one turn, but the model stops at </s>; ")
    assert "tokenizer_config.json:chat_template:2: {{- '<|im_start|>' + message.role" in text
    assert err == "chatmill: model/tokenizer_config.json:chat_template: not certified: terminator\n"


def test_two_bos_tokens_fail(run, folder):
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "chat_template": "<s>{{ bos_token }}" + CHATML})
    )
    code, out, _ = run("certify", "--tokenizer", "model")
    assert code == 1 and lines(out)["bos"] == ("FAIL", "<s> occurs twice at the start of probe one turn")


def test_the_template_is_also_checked_on_the_users_records(run, folder, tmp_path):
    good = write(tmp_path / "good.jsonl", say("Hi", "Yo"), say("a <|im_end|> b", "c"))
    code, out, _ = run("certify", "--tokenizer", "model", good)
    counted = "2 records, 1 of them with control tokens in message text"
    assert code == 0 and lines(out)["records"][1] == f"{counted}; every answer is trained on"
    call = {"name": "f", "arguments": {}}
    lost = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    bad = write(tmp_path / "bad.jsonl", say("Hi", "Yo"), lost)
    code, out, _ = run("certify", "--tokenizer", "model", bad, "--json")
    found = json.loads(out)
    assert code == 1 and not found["passed"]
    assert found["findings"][-1] == {
        "name": "records",
        "level": "FAIL",
        "details": {"records": 2, "refused": {"not_written": 1}, "notes": {}},
        "text": "2 records; rejected records: 1 not_written; first error: bad.jsonl:2: the template drops the "
        "tool_calls of message 1 (assistant); use a template that renders every field, or remove the record",
    }


def test_flags_select_another_template_and_its_arguments(run, folder, tmp_path):
    (tmp_path / "other.jinja").write_text(CHATML.replace("<|im_end|>\\n'", "<|im_end|>' + tail"))
    args = ("certify", "--tokenizer", "model", "--chat-template", "other.jinja")
    code, _, err = run(*args)
    assert code == 1 and "not certified: answers" in err
    code, out, _ = run(*args, "--template-arg", "tail=!", "--json")
    assert code == 0 and json.loads(out)["passed"]


def test_a_template_is_a_format_like_any_other(run, folder, tmp_path):
    chat = write(tmp_path / "chat.jsonl", say("Hi", "Yo"), say("What?", "That <|im_end|> there."))
    code, out, _ = run("render", chat, "--format", "template", "--tokenizer", "model", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and len(rows) == 2
    assert [label for label in rows[0]["labels"] if label != -100][-1] == 3
    code, out, _ = run("prepare", chat, "-o", "data", "--format", "template", "--tokenizer", "model", "--json")
    made = json.loads(out)
    assert code == 0 and made["splits"]["train"]["episodes"] == 2
    assert made["ledger"]["noted"]["control_text"]["rows"] == 1
    format = json.loads(Path("data/dataset_metadata.json").read_text())["format"]
    assert (format["name"], format["template"], format["mask"]) == ("template", CHATML, "derived")
    assert run("verify", "data", "--full")[0] == 0


def test_refused_rows_follow_on_error(run, folder, tmp_path):
    chat = write(
        tmp_path / "chat.jsonl", say("Hi", "Yo"), [{"role": "tool", "content": "x"}, *say("Hi", "Yo")], say("a", "b")
    )
    flags = ("--format", "template", "--tokenizer", "model", "--chat-template", "strict.jinja")
    (tmp_path / "strict.jinja").write_text(
        "{%- if messages[0].role != 'user' -%}{{- raise_exception('begin with a user') -}}{%- endif -%}" + CHATML
    )
    code, _, err = run("prepare", chat, "-o", "data", *flags)
    assert code == 1 and not Path("data").exists()
    assert err == (
        'chatmill: chat.jsonl:2: strict.jinja:1: the template rejects the conversation: "begin with a user"; '
        "change the conversation or the template\n"
    )
    code, out, _ = run("prepare", chat, "-o", "data", *flags, "--on-error", "skip", "--json")
    assert code == 0
    assert json.loads(out)["ledger"]["rejected"] == {"template_refuses": {"rows": 1, "tokens": 0, "trained": 0}}
    assert [json.loads(line)["line"] for line in Path("data.rejects.jsonl").read_text().splitlines()] == [2]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_any_number_of_processes_gives_the_same_bytes(run, folder, tmp_path, workers):
    chat = write(tmp_path / "chat.jsonl", *(say(*["Hi there", "Yo"] * (1 + n % 4)) for n in range(60)))
    flags = ("--format", "template", "--tokenizer", "model", "--json")
    one = json.loads(run("prepare", chat, "-o", "one", *flags, "--workers", "1")[1])
    other = json.loads(run("prepare", chat, "-o", "other", *flags, "--workers", workers)[1])
    assert one["sha256"] == other["sha256"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--mask", "tags"), "--mask can be used only with chat templates; add --format template"),
        (
            ("--format", "chatml", "--chat-template", "x.jinja", "--template-arg", "a=1"),
            "--chat-template, --template-arg can be used only with chat templates",
        ),
        (("--format", "template"), "bytes: has no chat template; pass a template with --chat-template FILE"),
        (("--format", "template", "--tokenizer", "nowhere"), "nowhere: no such file or folder; expected the folder"),
        (("--format", "template", "--tokenizer", "model", "--add-tokens"), "--add-tokens with --format template"),
        (
            ("--format", "template", "--tokenizer", "model", "--template-date", "soon"),
            '--template-date "soon" is not a date',
        ),
        (("--format", "template", "--tokenizer", "model", "--mask", "tags"), "has no generation tags"),
    ],
)
def test_conflicting_flags_are_reported(run, folder, tmp_path, flags, said):
    chat = write(tmp_path / "chat.jsonl", say("Hi", "Yo"))
    code, _, err = run("render", chat, *flags)
    assert code == 2 and said in err and err.count("\n") == 1


def test_the_date_is_printed_and_stored(run, folder, tmp_path):
    dated = "{{- strftime_now('%Y-%m-%d') -}}" + CHATML
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": dated}))
    chat = write(tmp_path / "chat.jsonl", say("Hi", "Yo"))
    flags = ("--format", "template", "--tokenizer", "model", "--template-date", "2024-02-29", "--json")
    first = json.loads(run("prepare", chat, "-o", "one", *flags)[1])
    assert first["sha256"] == json.loads(run("prepare", chat, "-o", "two", *flags)[1])["sha256"]
    other = (*flags[:-2], "2024-03-01", "--json")
    assert first["sha256"] != json.loads(run("prepare", chat, "-o", "three", *other)[1])["sha256"]
    assert json.loads(Path("one/dataset_metadata.json").read_text())["format"]["now"] == "2024-02-29T00:00:00"


def test_the_certificate_is_the_same_for_any_number_of_workers(run, folder, tmp_path, monkeypatch, request):
    if not may_fork(request):
        return
    monkeypatch.setattr(observe, "CHUNK", 8)
    chunks: list[list[int]] = []
    in_order = LocalEngine.in_order

    def counted(self, work, items, **options):
        chunks.append([])
        return in_order(self, work, (chunks[-1].append(len(item)) or item for item in items), **options)

    monkeypatch.setattr(LocalEngine, "in_order", counted)
    call = {"name": "f", "arguments": {}}
    lost = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    kinds = [say("Hi", "Yo"), say("a <|im_end|> b", "c"), say("x", "y", "z", "w"), lost]
    records = [kinds[number * 7 % 11 % 4] for number in range(60)]
    name = write(tmp_path / "chat.jsonl", *records)
    printed = {run("certify", "--tokenizer", "model", name, "--json", "--workers", str(n)) for n in (1, 2, 5)}
    [(code, out, _)] = printed
    assert code == 1
    found = {finding["name"]: finding for finding in json.loads(out)["findings"]}
    assert found["records"]["details"]["records"] == 60
    assert found["records"]["details"]["refused"] == {"not_written": records.count(lost)}
    assert chunks == [[8] * 7 + [4]] * 2
    with Path(name).open("a") as file:
        file.write('{"messages": 3}\n')
    errors = {run("certify", "--tokenizer", "model", name, "--workers", str(n)) for n in (1, 2, 5)}
    [(code, out, err)] = errors
    assert (code, out) == (1, "") and err.startswith("chatmill: chat.jsonl:61: ")
