from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from chatmill import Message, Record
from chatmill.cli.main import main
from chatmill.errors import DataError
from chatmill.format import open_renderer
from chatmill.format.template.hf_folder import TemplateSource
from chatmill.integrations.trl_peer import TRLPeer
from chatmill.show.compare import PeerRow
from chatmill.tokenizer import train_bpe

HEADER = "{{ '<|im_start|>' + m.role + '\\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
PLAIN = f"{{% for m in messages %}}{HEADER}{{{{ m.content + '<|im_end|>\\n' }}}}{{% endfor %}}{PROMPT}"
TAGGED = (
    f"{{% for m in messages %}}{HEADER}{{% if m.role == 'assistant' %}}{{% generation %}}{{{{ m.content + "
    f"'<|im_end|>' }}}}{{% endgeneration %}}{{{{ '\\n' }}}}{{% else %}}{{{{ m.content + '<|im_end|>\\n' }}}}"
    f"{{% endif %}}{{% endfor %}}{PROMPT}"
)
"""A template whose tags include the end of the turn, but not the line end."""
NO_END = TAGGED.replace(
    "m.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}", "m.content }}{% endgeneration %}{{ '<|im_end|>\\n' }}"
)
"""A template whose tags exclude the end of the turn."""
CONTROL = ["<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
TURNS = [("user", "Hi"), ("assistant", "Yo"), ("user", "So?"), ("assistant", "Ok.")]


def chat(*turns: tuple[str, str]) -> dict:
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def make_model(folder: Path, template: str, eos: str = "<|im_end|>") -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(train_bpe(["x"], vocab_size=256 + len(CONTROL), control=CONTROL))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<|begin_of_text|>"}))
    return folder


def trl_template(name: str) -> str:
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.origin is not None
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text("utf-8")


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["chatmill", "compare", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def write(*records: dict) -> str:
    Path("chat.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return "chat.jsonl"


def shown(row: PeerRow | str, renderer) -> str:
    assert isinstance(row, PeerRow)
    out, trained = "", False
    for id, trains in zip(row.ids[: row.kept].tolist(), row.trained[: row.kept].tolist(), strict=True):
        out += ("[" if trains else "]") if trains != trained else ""
        out += renderer.tokenizer.decode([id])
        trained = trains
    return out + ("]" if trained else "")


S, E = "<|im_start|>", "<|im_end|>"


@pytest.mark.parametrize(
    ("template", "options", "expected"),
    [
        (TAGGED, {}, f"{S}user\nHi{E}\n{S}assistant\n[Yo{E}]\n{S}user\nSo?{E}\n{S}assistant\n[Ok.{E}]\n"),
        (NO_END, {}, f"{S}user\nHi{E}\n{S}assistant\n[Yo]{E}\n{S}user\nSo?{E}\n{S}assistant\n[Ok.]{E}\n"),
        (PLAIN, {}, f"[{S}user\nHi{E}\n{S}assistant\nYo{E}\n{S}user\nSo?{E}\n{S}assistant\nOk.{E}\n]"),
        (TAGGED, {"max_length": 23}, f"{S}user\nHi{E}\n{S}assistant\n[Yo]"),
        (TAGGED, {"max_length": 21}, ""),
        (
            TAGGED,
            {"assistant_only_loss": False, "max_length": 0},
            f"[{S}user\nHi{E}\n{S}assistant\nYo{E}\n{S}user\nSo?{E}\n{S}assistant\nOk.{E}\n]",
        ),
    ],
    ids=["tags", "tags without the end token", "no tags", "cut", "dropped", "default"],
)
def test_rows_of_trl_are_those_written_by_hand(tmp_path, template, options, expected):
    renderer = open_renderer("template", str(make_model(tmp_path / "model", template)))
    with TRLPeer(renderer, **options) as peer:
        row, _ = peer.rows(Record([Message(*turn) for turn in TURNS]))
    assert shown(row, renderer) == expected


def test_rows_are_those_that_sfttrainer_itself_prepares(tmp_path):
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=300, **shape)).to(torch.float32)
    records = [
        chat(*TURNS),
        chat(("system", "é <|im_end|>\n"), *TURNS[:2]),
        chat(("user", ""), ("assistant", "x" * 40)),
    ]
    pairs = [{"prompt": one["messages"][:-1], "completion": one["messages"][-1:]} for one in records]
    llama3 = trl_template("llama3")
    for number, (template, data, masked, limit) in enumerate(
        [
            (TAGGED, records, True, 60),
            (llama3, records, True, 1024),
            (PLAIN, records, False, 30),
            (PLAIN, pairs, False, 99),
        ]
    ):
        folder = make_model(tmp_path / f"model{number}", template, "<|eot_id|>" if template == llama3 else E)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        args = SFTConfig(
            output_dir=str(tmp_path),
            report_to="none",
            use_cpu=True,
            bf16=False,
            assistant_only_loss=masked,
            max_length=limit,
        )
        trainer = SFTTrainer(model=model, args=args, train_dataset=Dataset.from_list(data), processing_class=tokenizer)
        expected = [(one["input_ids"], one["labels"]) for one in trainer.train_dataset]
        renderer = open_renderer("template", str(folder))
        with TRLPeer(renderer, assistant_only_loss=masked, max_length=limit) as peer:
            assert peer.setup.patched == (template == llama3)
            rows = [
                peer.rows(Record(one["messages"]), completion=len(one["messages"]) - 1 if data is pairs else None)[0]
                for one in records
            ]
        prepared = []
        for row in rows:
            assert isinstance(row, PeerRow)
            ids = row.ids[: row.kept].tolist()
            labels = [id if trained else -100 for id, trained in zip(ids, row.trained.tolist(), strict=False)]
            if row.kept:
                prepared.append((ids, labels))
        assert prepared == expected


def test_equal_masks_are_equal_and_the_default_is_one_line(run, tmp_path):
    make_model(tmp_path / "model", TAGGED)
    code, out, err = run(write(chat(*TURNS), chat(*TURNS[:2])), "model", "--exit-code")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "chatmill and TRL 1.16.0 with assistant_only_loss=True, max_length=1024",
        "2 records: 2 equal",
        "tokens  trained by both  only by chatmill  only by TRL  by neither",
        "77                   10                 0            0          67",
        "",
        "TRL's default, assistant_only_loss=False, trains on 75 tokens; chatmill does not train on 65 of them (86.7%)",
    ]


def test_an_end_that_trl_does_not_train_is_found_and_shown(run, tmp_path):
    make_model(tmp_path / "model", NO_END)
    code, out, _ = run(write(chat(*TURNS[:2])), "model")
    assert code == 0
    assert "TRL warns: the end of an answer is not in the loss; the model may not learn to stop" in out.splitlines()
    assert out.splitlines()[-7:-2] == [
        "the end of an answer, which TRL does not train on: the model does not learn to stop",
        "  1 trained only by chatmill, in 1 record",
        "    chat.jsonl:1",
        "      chatmill …│s│t│a│n│t│↵│[Y│o│<|im_end|>]│↵",
        "      TRL      …│s│t│a│n│t│↵│[Y│o]│<|im_end|>│↵",
    ]
    code, out, _ = run("chat.jsonl", "model", "--json", "--exit-code")
    found = json.loads(out)
    assert (code, found["equal"], found["peer"]["end_trained"]) == (1, False, False)
    assert [(each["name"], each["only_chatmill"], each["only_peer"]) for each in found["reasons"]] == [("end", 1, 0)]


def test_what_differs_has_a_colour_in_a_terminal_unless_none_is_wanted(run, tmp_path, monkeypatch):
    make_model(tmp_path / "model", NO_END)
    data = write(chat(*TURNS[:2]))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    yellow = "\x1b[1;33m<|im_end|>"
    assert yellow in run(data, "model")[1]
    assert "\x1b[1;33m" not in run(data, "model", "--no-color")[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[1;33m" not in run(data, "model")[1]


def test_without_tags_trl_says_why_and_every_token_is_compared(run, tmp_path):
    make_model(tmp_path / "model", PLAIN)
    code, out, _ = run(write(chat(("system", "S"), *TURNS[:2])), "model")
    line = out.splitlines()[1]
    assert code == 0
    said = "with this template, TRL cannot train on answers only, so it trains on every token: ValueError: "
    assert line.startswith(said)
    assert "patching is not supported for this template" in line
    reasons = [
        line
        for line in out.splitlines()
        if line and not line.startswith((" ", "TRL", "with this", "chatmill", "1 rec"))
    ]
    assert reasons[2:] == [
        "headers and end markers of system, user and tool turns",
        "the header of an answer, which is part of the prompt",
        "user text",
        "system text",
        "tokens after the end of an answer, which the model never generates",
    ]


def test_odd_records_are_compared_or_refused_with_a_reason(run, tmp_path):
    make_model(tmp_path / "model", TAGGED)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"é": [1, None]}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    data = write(
        chat(("user", ""), ("assistant", "")),
        chat(("user", "x <|im_end|>\n<|im_start|>assistant\n"), ("assistant", "y <|im_start|> z")),
        chat(("user", "\u202e\x00👩‍👧 é"), ("assistant", "\u00a0ok\n\n")),
        chat(("user", "long " * 400), ("assistant", "gone")),
        chat(("user", "no answer")),
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
            ],
            "tools": tools,
        },
        chat(("user", "q"), ("assistant", "a"), ("user", "last")),
        {**chat(*TURNS[:2]), "weight": 0.5},
    )
    code, out, err = run(data, "model", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert found["records"] == {
        "all": 8,
        "equal": 4,
        "mask": 0,
        "cut": 0,
        "ids": 1,
        "dropped": 1,
        "refused": {"chatmill": 1, "TRL": 1, "both": 0},
    }
    assert [(each["name"], each["records"]) for each in found["reasons"]] == [("control_text", 1), ("dropped", 1)]
    assert found["tokens"]["other_weight"] == 3
    by = {each["by"]: each for each in found["refusals"]}
    assert by["TRL"]["first"] == "chat.jsonl:5"
    assert by["TRL"]["reason"].startswith("RuntimeError: You're using `assistant_only_loss=True`, but at least one")
    assert by["chatmill"]["first"] == "chat.jsonl:6"
    assert by["chatmill"]["reason"].startswith("the template drops the tool_calls of message 1 (assistant)")


def test_what_a_template_refuses_is_said_by_both(run, tmp_path):
    make_model(
        tmp_path / "model",
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TAGGED,
    )
    code, out, _ = run(write(chat(("system", "S"), *TURNS), chat(*TURNS)), "model")
    assert code == 0
    assert out.splitlines()[1:4] == [
        "2 records: 1 equal, 1 refused by both",
        "  chatmill refuses 1 of the records, the first at chat.jsonl:1: model/tokenizer_config.json:chat_template:1: "
        'the template rejects the conversation: "no system"; change the conversation or the template',
        "  TRL refuses 1 of the records, the first at chat.jsonl:1: TemplateError: no system",
    ]


@pytest.mark.parametrize("name", ["gemma", "qwen2_5", "qwen3", "deepseekv3", "llama3"])
def test_templates_that_trl_has_an_edition_of_are_replaced_by_it(tmp_path, name):
    """TRL tests each template with conversations that contain tools, which some of these templates reject."""
    renderer = open_renderer("template", str(make_model(tmp_path / "model", trl_template(name))))
    with TRLPeer(renderer) as peer:
        assert (peer.setup.patched, peer.setup.no_mask) == (True, "")


def test_an_image_is_one_line_that_names_its_record(run, tmp_path):
    make_model(tmp_path / "model", TAGGED)
    image = [{"type": "image", "image": "x.png"}, {"type": "text", "text": "What?"}]
    messages = [{"role": "user", "content": image}, {"role": "assistant", "content": "A cat."}]
    code, out, err = run(write({"messages": messages}), "model")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("chatmill: chat.jsonl:1: ")


def test_prompts_and_completions_are_given_to_trl_as_such(run, tmp_path):
    make_model(tmp_path / "model", PLAIN)
    pair = {"prompt": chat(*TURNS[:3])["messages"], "completion": chat(TURNS[3])["messages"]}
    code, out, _ = run(write(pair), "model", "--json")
    found = json.loads(out)
    assert code == 0
    # If the template has no generation tags, TRL trains on the completion and the newline after it; chatmill leaves out
    # the newline.
    assert [(each["name"], each["only_peer"]) for each in found["reasons"]] == [("after", 1)]
    assert found["tokens"]["both"] == 4


ENDLESS = (
    "{% if 'loop' in messages[0].content %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}"
)
HUGE = "{% if 'huge' in messages[0].content %}{{ messages[0].content * 900000000 }}{% endif %}"


@pytest.mark.parametrize(("trap", "text"), [(ENDLESS, "loop"), (HUGE, "huge")], ids=["endless", "huge"])
def test_a_hostile_template_costs_its_record_and_nothing_else(run, tmp_path, monkeypatch, trap, text):
    monkeypatch.setattr("chatmill.integrations.trl_peer.SECONDS", 1.0)
    make_model(tmp_path / "model", trap + TAGGED)
    code, out, err = run(write(chat(*TURNS), chat(("user", text), ("assistant", "a")), chat(*TURNS)), "model", "--json")
    assert (code, err) == (0, "")
    records = json.loads(out)["records"]
    assert (records["equal"], records["refused"]) == (2, {"chatmill": 0, "TRL": 0, "both": 1})


def test_a_template_that_never_ends_is_given_up_in_one_line(tmp_path, monkeypatch):
    """chatmill's own renderer would reject this template when it is opened, so only TRL renders with it."""
    monkeypatch.setattr("chatmill.integrations.trl_peer.SECONDS", 1.0)
    renderer = open_renderer("template", str(make_model(tmp_path / "model", TAGGED)))
    endless = TemplateSource("endless.jinja", ENDLESS.replace("'loop' in messages[0].content", "true"))
    renderer.folder = replace(renderer.folder, template=endless)
    with pytest.raises(DataError, match="cannot run with this template"):
        TRLPeer(renderer)


def test_another_peer_and_a_missing_trl_are_one_line(run, tmp_path, monkeypatch):
    make_model(tmp_path / "model", TAGGED)
    data = write(chat(*TURNS))
    code, _, err = run("--peer", "axolotl", data, "model")
    assert code == 2 and "'axolotl' is not one of 'trl'; see chatmill compare --help" in err
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *of: None if name == "trl" else find(name, *of))
    code, out, err = run(data, "model")
    assert (code, out) == (2, "")
    assert err == "chatmill: TRL is not installed; run pip install 'chatmill[trl]'\n"
