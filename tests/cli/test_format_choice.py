from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from default_tokenizer import FORMAT, NOTE

from chatmill.cli.prepare import script
from chatmill.format import open_renderer, resolve_format
from chatmill.prepare import InputSource, Job, prepare_dataset
from chatmill.records import Message, Record
from chatmill.rollout.task import open_task
from chatmill.store.read import open_dataset
from chatmill.tokenizer import train_bpe

CHAT = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}\n'
TOKENS = ["<|im_start|>", "<|im_end|>", "<|own|>", "<|close|>"]
TEMPLATE = (
    "{% for m in messages %}<|own|>{{ m.role }}\n{{ m.content }}<|close|>{% endfor %}"
    "{% if add_generation_prompt %}<|own|>assistant\n{% endif %}"
)
OWN = "<|own|>user\nhi<|close|><|own|>assistant\nyo<|close|>"
CHATML = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
VOCABULARY = train_bpe(["the user and the assistant say hi and yo " * 9], vocab_size=300, control=TOKENS)


def listed(template: str, name: str = "default") -> list[dict[str, str]]:
    return [{"name": name, "template": template}]


FOLDERS = {
    "in tokenizer_config.json": {"tokenizer_config.json": json.dumps({"chat_template": TEMPLATE})},
    "in a list": {"tokenizer_config.json": json.dumps({"chat_template": listed(TEMPLATE)})},
    "in chat_template.jinja": {"tokenizer_config.json": "{}", "chat_template.jinja": TEMPLATE},
    "in chat_template.json": {"chat_template.json": json.dumps({"chat_template": TEMPLATE})},
}


@pytest.fixture
def folders(run):
    for name, files in {**FOLDERS, "plain": {"tokenizer_config.json": "{}"}}.items():
        Path(name).mkdir()
        Path(name, "tokenizer.json").write_bytes(VOCABULARY)
        for file, text in files.items():
            Path(name, file).write_text(text)
    Path("chat.jsonl").write_text(CHAT)


def stored(name: str) -> tuple[str, str]:
    dataset = open_dataset(name)
    renderer = open_renderer("chatml", "plain")
    return renderer.tokenizer.decode(dataset["train"].tokens(0)), dataset.metadata.format["name"]


def test_a_chat_template_is_found_wherever_a_folder_may_have_one(folders):
    assert [resolve_format(None, place) for place in FOLDERS] == ["template"] * len(FOLDERS)


def test_the_chat_template_of_a_folder_is_used_and_reported(run, folders):
    place = "in tokenizer_config.json"
    code, _, err = run("prepare", "chat.jsonl", "-o", "v1", "--tokenizer", place)
    assert (code, err) == (0, f"format: template, the chat template of {place}\n")
    assert stored("v1") == (OWN, "template")
    code, _, err = run("render", "chat.jsonl", "--tokenizer", place)
    assert (code, err) == (0, f"format: template, the chat template of {place}\n")


def test_a_folder_without_a_chat_template_uses_chatml_and_reports_it(run, folders):
    code, _, err = run("prepare", "chat.jsonl", "-o", "v1", "--tokenizer", "plain")
    assert (code, err) == (
        0,
        "format: chatml, because plain has no chat template\n"
        "note: the rows may not match the format that the model was trained with; pass its chat template with "
        "--chat-template FILE, or choose a format with --format\n",
    )
    assert stored("v1") == (CHATML, "chatml")
    file = "plain/tokenizer.json"
    code, _, err = run("render", "chat.jsonl", "--tokenizer", file)
    assert (code, err) == (0, f"format: chatml, because {file} has no chat template\n")


def test_without_a_tokenizer_the_default_tokenizer_and_format_are_reported(run, folders):
    assert run("prepare", "chat.jsonl", "-o", "v1")[2] == FORMAT + NOTE
    assert run("render", "chat.jsonl")[2] == FORMAT + NOTE
    assert run("render", "chat.jsonl", "--format", "primer")[2] == NOTE
    assert run("prepare", "chat.jsonl", "-o", "v2", "--tokenizer", "bytes")[2] == ""
    assert run("render", "chat.jsonl", "--tokenizer", "bytes")[2] == ""


def test_an_explicit_format_overrides_the_chat_template(run, folders):
    place = "in chat_template.jinja"
    code, _, err = run("prepare", "chat.jsonl", "-o", "v1", "--tokenizer", place, "--format", "chatml")
    assert (code, err, stored("v1")) == (0, "", (CHATML, "chatml"))
    code, _, err = run("prepare", "chat.jsonl", "-o", "v2", "--tokenizer", place, "--format", "template")
    assert (code, err, stored("v2")) == (0, "", (OWN, "template"))


def test_an_explicit_chat_template_needs_no_format(run, folders):
    Path("own.jinja").write_text(TEMPLATE)
    code, _, err = run("prepare", "chat.jsonl", "-o", "v1", "--tokenizer", "plain", "--chat-template", "own.jinja")
    assert (code, err, stored("v1")) == (0, "format: template, the chat template of own.jinja\n", (OWN, "template"))


def test_a_tokenizer_file_ignores_the_template_next_to_it_with_a_note(run, folders):
    file = "in chat_template.jinja/tokenizer.json"
    code, _, err = run("prepare", "chat.jsonl", "-o", "v1", "--tokenizer", file)
    assert (code, stored("v1")) == (0, (CHATML, "chatml"))
    assert err == (
        f"format: chatml, because {file} is a file and not a model folder\n"
        "note: to use the chat template of in chat_template.jinja, pass --tokenizer in chat_template.jinja\n"
    )


def test_several_templates_without_a_default_are_an_error(run, folders):
    Path("plain", "tokenizer_config.json").write_text(json.dumps({"chat_template": listed(TEMPLATE, "rag")}))
    code, out, err = run("prepare", "chat.jsonl", "-o", "v1", "--tokenizer", "plain")
    assert (code, out) == (2, "")
    assert err.endswith(
        "plain: has the chat templates rag but no default; choose a template with --chat-template FILE\n"
    )


def test_the_default_format_gives_the_same_bytes_as_the_explicit_one(run, folders):
    for name, flags in {"left out": (), "named": ("--format", "template")}.items():
        assert run("prepare", "chat.jsonl", "-o", name, "--tokenizer", "in a list", *flags)[0] == 0
    one, other = (Path(name, "dataset_metadata.json").read_bytes() for name in ("left out", "named"))
    assert one == other


def test_an_interrupted_build_resumes_with_its_format(folders, monkeypatch):
    def job(format: str | None) -> Job:
        return Job((InputSource(("chat.jsonl",)),), tokenizer="in a list", format=format)

    def interrupt(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("chatmill.prepare.pipeline.publish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare_dataset(job(None), "v1")
    assert Path(".v1.building.units").is_dir()
    steps = []
    prepare_dataset(job("template"), "v1", resume=True, on_progress=lambda now: steps.append(now.step))
    assert "check" in steps
    assert stored("v1") == (OWN, "template")


def test_recipes_and_the_documented_scripts_share_the_rule(run, folders, monkeypatch, capsys):
    Path("recipe.toml").write_text('tokenizer = "in a list"\n[[source]]\ninputs = ["chat.jsonl"]\n')
    assert run("prepare", "recipe.toml", "-o", "v1")[0] == 0
    assert stored("v1") == (OWN, "template")
    flags = ["--input", "chat.jsonl", "--output_dir", "v2", "--tokenization", "in a list"]
    monkeypatch.setattr(sys, "argv", ["prepare_chat_sft.py", *flags])
    with pytest.raises(SystemExit) as ended:
        script("messages", "")
    assert (ended.value.code, stored("v2")) == (0, (OWN, "template"))
    assert capsys.readouterr().err == "format: template, the chat template of in a list\n"


def test_json_and_show_name_the_format(run, folders):
    code, out, _ = run("prepare", "chat.jsonl", "-o", "v1", "--tokenizer", "in a list", "--json")
    assert (code, json.loads(out)["format"]) == (0, "template")
    assert run("show", "v1", "--tokenizer", "in a list")[1].endswith("1 of 1 episode in train; format template\n")


def test_adding_tokens_to_a_template_says_how_to_name_a_preset(run, folders):
    code, _, err = run("prepare", "chat.jsonl", "-o", "v1", "--tokenizer", "in a list", "--add-tokens")
    assert code == 2
    assert err.endswith("tokens of its tokenizer; use a preset, for example --format chatml\n")


def test_rollouts_are_rendered_by_the_same_rule(folders):
    names = [("plain", None, "chatml"), ("in a list", None, "template"), ("in a list", "chatml", "chatml")]
    for folder, format, name in names:
        assert open_task(folder, format, fields=("name",)).renderer.to_json()["name"] == name


def test_renderers_are_opened_by_the_same_rule(folders):
    record = Record([Message("user", "hi"), Message("assistant", "yo")])
    for name, text in (("in a list", OWN), ("plain", CHATML)):
        renderer = open_renderer(None, name)
        assert renderer.tokenizer.decode(renderer.render([record]).ids) == text
    assert resolve_format(None, "nowhere") == resolve_format(None, "bytes") == "chatml"
