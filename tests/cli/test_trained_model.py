from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from trained_model import ESCAPE, TALKS, chatmill, train_small

from chatmill.cli import chat
from chatmill.format import TurnRenderer, load_format, open_renderer
from chatmill.records import Message, Record
from chatmill.show.dataset import open_view
from chatmill.show.text import visible
from chatmill.tokenizer import open_tokenizer, train_bpe
from chatmill.train.chat_model import ChatModel, ChatSession, open_chat_model
from chatmill.train.generation import Sampling
from chatmill.train.run_dir import read_metrics

torch.set_num_threads(1)
ANSWERS = dict(talk for talks in TALKS.values() for talk in talks)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "data").mkdir()
        train_small(folder)
    return folder


@pytest.fixture
def run(made, run, monkeypatch):
    monkeypatch.chdir(made)
    return run


# Chat.


def test_a_prompt_is_answered_and_the_answer_ends_at_the_end_token(run):
    assert run("chat", "checkpoints/small", "--prompt", "a?") == (0, "alpha\n", "")
    assert run("chat", "checkpoints/small/step_00000060", "--prompt", "1+1") == (0, "2\n", "")


def test_escape_sequences_in_an_answer_are_escaped(run):
    code, out, err = run("chat", "checkpoints/small", "--prompt", "c?")
    assert (code, out, err) == (0, "\\x1b[31mred\\u202e\n", "")


def test_json_has_the_exact_answer_and_whether_it_ended(run):
    code, out, err = run("chat", "checkpoints/small", "--prompt", "c?", "--json")
    said = {"prompt": "c?", "answer": ESCAPE, "tokens": len(ESCAPE.encode()) + 1, "stopped": True}
    assert (code, json.loads(out), err) == (0, {"answers": [said]}, "")


def test_an_answer_without_an_end_token_is_truncated_with_a_note(run):
    code, out, err = run("chat", "checkpoints/small", "--prompt", "a?", "--max-tokens", "3")
    assert (code, out, err) == (0, "alp\n", "(cut off after 3 tokens without an end-of-turn token)\n")


def test_a_conversation_continues_with_all_earlier_messages(made, monkeypatch):
    monkeypatch.chdir(made)
    model = open_chat_model("checkpoints/small")
    asked = []
    answer = model.answer
    monkeypatch.setattr(
        type(model), "answer", lambda self, messages, **kw: asked.append(messages) or answer(messages, **kw)
    )
    talk = ChatSession(model, 20, Sampling())
    talk.reset("S")
    pieces: list[str] = []
    first, second = talk.send("a?", pieces.append), talk.send("x", pieces.append, role="tool")
    history = [Message("system", "S"), Message("user", "a?"), Message("assistant", first.text), Message("tool", "x")]
    assert asked == [history[:2], history]
    assert "".join(pieces) == first.text + second.text
    talk.reset()
    talk.send("a?", pieces.append)
    assert asked[-1] == [Message("user", "a?")]


@pytest.mark.parametrize("format", ["primer", "chatml", "ngpt", "post-training"])
def test_the_prompt_is_the_same_as_in_training(made, monkeypatch, format):
    monkeypatch.chdir(made)
    messages = [Message("user", "a?"), Message("assistant", "b"), Message("tool", "c"), Message("user", "<|eot|>")]
    model = open_chat_model("checkpoints/small")
    if format != "primer":
        chosen = load_format(format)
        tokenizer = open_tokenizer("data/tokenizer.json", control=chosen.tokens, add_tokens=True)
        model = ChatModel(model.model, TurnRenderer(chosen, tokenizer))
    wanted = TurnRenderer(load_format(format), model.tokenizer).prompt_ids(Record(messages))
    assert model.prompt(messages) == wanted


def test_the_prompt_of_a_chat_template_equals_that_of_transformers(made, monkeypatch, tmp_path):
    transformers = pytest.importorskip("transformers")
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    raw = train_bpe(["who are you?"] * 9, vocab_size=275, control=["<|im_start|>", "<|im_end|>"])
    (tmp_path / "tokenizer.json").write_bytes(raw)
    config = {"chat_template": template, "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    monkeypatch.chdir(made)
    model = ChatModel(open_chat_model("checkpoints/small").model, open_renderer("template", str(tmp_path)))
    talk = [("system", "s"), ("user", "who are you?"), ("assistant", "who?"), ("user", "you")]
    peer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), chat_template=template)
    asked = [{"role": role, "content": text} for role, text in talk]
    wanted = peer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    assert model.prompt([Message(*turn) for turn in talk]) == wanted


def test_chat_answers_lines_and_executes_commands(run, monkeypatch):
    lines = "a?\n\n/new\nb?\n/nope\n/help\n/system S\n/quit\nc?\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    code, out, err = run("chat", "checkpoints/small")
    assert (code, out) == (0, "alpha\nbeta\n")
    assert err == f"unknown command /nope; /help lists the commands\n{chat.HELP}\n"


def test_a_full_interactive_conversation_can_be_restarted(run, monkeypatch):
    lines = io.StringIO(f"a?\n{'x' * 80}\n/new\nb?\n")
    monkeypatch.setattr(lines, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdin", lines)
    code, out, err = run("chat", "checkpoints/small")
    assert (code, out) == (0, "> alpha\n> > > beta\n> ")
    said = "format: primer\nType a message. /help  lists commands.\n"
    assert err == f"{said}the conversation has 94 tokens, but the model has 64 positions; start a new conversation\n\n"


def test_a_full_conversation_from_a_pipe_is_reported_in_one_line(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("x" * 80))
    one_line(run("chat", "checkpoints/small"), 1, "the model has 64 positions; start a new conversation")


def test_ctrl_c_stops_the_answer_but_not_the_conversation(made, monkeypatch):
    monkeypatch.chdir(made)
    model = open_chat_model("checkpoints/small")
    talk = ChatSession(model, 20, Sampling())
    pieces: list[str] = []

    def show(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 2:
            raise KeyboardInterrupt

    said = talk.send("a?", show)
    assert (said.text, said.tokens, said.stopped, pieces) == ("al", 2, False, ["a", "l", " …"])
    assert talk.messages == [Message("user", "a?"), Message("assistant", "al")]


def test_characters_of_several_tokens_are_printed_when_complete(made, monkeypatch):
    monkeypatch.chdir(made)
    model = open_chat_model("checkpoints/small")
    ids = model.tokenizer.encode("a€\x07\n")
    assert [piece for piece in model.text_pieces(ids) if piece] == ["a", "€", "\x07", "\n"]
    assert list(model.text_pieces(ids[1:3]))[-1] == "\\xe2\\x82"


def test_sampling_with_a_seed_is_reproducible(run):
    flags = ["--prompt", "zzz", "--temperature", "2", "--max-tokens", "12", "--json"]
    first = run("chat", "checkpoints/small", *flags, "--seed", "1")
    assert first == run("chat", "checkpoints/small", *flags, "--seed", "1")
    assert first != run("chat", "checkpoints/small", *flags, "--seed", "2")


def one_line(found: tuple[int, str, str], code: int, *parts: str) -> None:
    assert (found[0], found[1]) == (code, "")
    assert found[2].startswith("chatmill: ") and found[2].count("\n") == 1
    for part in parts:
        assert part in found[2]


def test_options_that_do_not_match_the_model_are_reported_in_one_line(run, made):
    model = "checkpoints/small"
    one_line(run("chat", "none", "--prompt", "x"), 2, "none: no such folder")
    one_line(run("chat", "data", "--prompt", "x"), 1, "data: has no config.json")
    one_line(run("chat", model, "--json"), 2, "--prompt")
    one_line(run("chat", model, "--prompt", "x" * 80), 1, "the model has 64 positions; start a new conversation")
    one_line(
        run("chat", model, "--prompt", "x", "--tokenizer", "bytes"),
        1,
        "pass the tokenizer that the model was trained with",
    )
    one_line(run("eval", "none", "data/v1"), 2, "none: no such folder")
    one_line(run("eval", model, "none"), 1, "none")
    one_line(run("eval", model, "data/v1"), 1, "data/v1: has no split val; expected train")


def test_a_tokenizer_that_was_moved_has_to_be_given(run, made, tmp_path, monkeypatch):
    shutil.copytree(made / "checkpoints/small/step_00000060/model", tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    one_line(
        run("chat", "model", "--prompt", "a?"), 2, "model: the tokenizer of this model was not found in", "--tokenizer"
    )
    tokenizer = str(made / "data/tokenizer.json")
    assert run("chat", "model", "--prompt", "a?", "--tokenizer", tokenizer) == (0, "alpha\n", "")
    shutil.copy(tokenizer, "model")
    assert run("chat", "model", "--prompt", "a?") == (0, "alpha\n", "")


def test_a_model_without_a_format_or_template_is_reported_with_a_fix(run, made, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(made / "checkpoints/small/step_00000060/model", folder)
    (folder / "training.json").unlink()
    shutil.copy(made / "data/tokenizer.json", folder)
    helps = "pass the chat format of the model as --format, or a folder with a chat template as --tokenizer\n"
    said = f"chatmill: {folder}: has no chat template, and {folder} does not record a chat format; {helps}"
    assert run("chat", str(folder), "--prompt", "a?") == (2, "", said)
    assert run("chat", str(folder), "--prompt", "a?", "--format", "template") == (2, "", said)
    assert run("chat", str(folder), "--prompt", "a?", "--format", "primer") == (0, "alpha\n", "")


# Evaluation.


def test_eval_reports_losses_and_answers_by_source(run):
    code, out, err = run("eval", "checkpoints/small", "data/v1", "--split", "train")
    assert (code, err) == (0, "")
    assert [line.split()[:2] + line.split()[3:] for line in out.splitlines()] == [
        ["source", "conversations", "questions", "exact", "stopped"],
        ["words", "3", "3", "100.0%", "100.0%"],
        ["sums", "2", "2", "100.0%", "100.0%"],
        ["all", "5", "5", "100.0%", "100.0%"],
    ]
    code, out, err = run("eval", "checkpoints/small", "data/v1", "--split", "train", "--json")
    found = json.loads(out)
    rates = {"exact": 3, "stopped": 3, "exact_rate": 1.0, "stop_rate": 1.0, "questions": 3, "conversations": 3}
    assert found["sources"]["words"].items() >= rates.items()
    assert (found["questions"], found["exact_rate"], found["left_out"], found["cut_conversations"]) == (5, 1.0, {}, 0)
    assert 0 < found["loss"] < 0.3


def test_eval_shows_the_expected_and_the_generated_answer(run, made):
    Path("other.jsonl").write_text(Path("words.jsonl").read_text().replace("alpha", "al\\u001bgo"))
    flags = ["--format", "primer", "--tokenizer", "data/tokenizer.json", "--overwrite"]
    chatmill("prepare", "other.jsonl", "-o", "data/other", *flags)
    code, out, err = run("eval", "checkpoints/small", "data/other", "--split", "train", "--wrong", "3")
    assert (code, err) == (0, "")
    assert out.splitlines()[2:] == ["other.jsonl:1", "  expected al\\x1bgo<|eot|>", "  got      alpha<|eot|>"]
    assert "66.7%   100.0%" in out.splitlines()[1]


def test_eval_reports_the_prompts_it_skipped(run):
    code, out, _ = run("eval", "checkpoints/small", "data/v1", "--split", "train", "-n", "2", "--max-tokens", "2")
    assert (code, out.splitlines()[-1]) == (0, "skipped: 3 answers over --limit")


def test_eval_refuses_data_of_another_tokenizer(run):
    chatmill("prepare", "words.jsonl", "-o", "data/bytes", "--format", "primer", "--overwrite")
    one_line(run("eval", "checkpoints/small", "data/bytes"), 1, "data/bytes: was prepared with tokenizer")


@pytest.fixture
def sampled(run):
    if not Path("data/held").exists():
        flags = ["--format", "primer", "--tokenizer", "data/tokenizer.json", "--val-split", "0.6"]
        chatmill("prepare", "words.jsonl", "sums.jsonl", "-o", "data/held", *flags)
    shutil.rmtree("out/held", ignore_errors=True)

    def sampled(*flags: str, since: str = "step 1: ") -> list[str]:
        known = ["--init_from_model", "checkpoints/small/step_00000060/model", "--learning_rate", "0"]
        named = ["--model_name", "held", "--out_dir", "out", "--dataset_dir", "data/held", "--max_iters", "1"]
        batches = ["--batch_size", "1", "--block_size", "64", "--use_loss_mask", "--eval_interval", "1"]
        code, _, err = run("train", *named, *known, *batches, "--audit_dir", "null", "--device", "cpu", *flags)
        assert code == 0, err
        lines = err.splitlines()
        return lines[next(at for at, line in enumerate(lines) if line.startswith(since)) :]

    return sampled


def held() -> list[tuple[str, str]]:
    shown = open_view("data/held")
    texts = [shown.text.text(shown.dataset["val"].tokens(at)) for at in range(len(shown.dataset["val"]))]
    return [talk for text in texts for talk in ANSWERS.items() if talk[0] in text]


def test_an_evaluation_shows_sample_answers_and_keeps_their_rates(sampled):
    told = sampled("--eval_samples", "9")
    assert told[0].endswith("trained tokens, val_exact_rate 1, val_stop_rate 1")
    assert len(told) == 1 + 2 * len(held()) > 1
    for (ask, answer), asked, said in zip(held(), told[1::2], told[2::2], strict=True):
        assert (asked, said) == (f"  prompt    <|usr|>{ask}<|eot|><|asst|>", f"  answer    {visible(answer)}<|eot|>")
    (line,) = (line for line in read_metrics(Path("out/held")) if "val_loss" in line)
    assert (line["val_exact_rate"], line["val_stop_rate"]) == (1, 1)


def test_without_samples_an_evaluation_reports_only_losses(sampled):
    (told,) = sampled("--eval_samples", "0")
    assert told.endswith("trained tokens")


def test_a_sample_answer_without_an_end_is_shown_with_the_expected_answer(sampled):
    # An untrained model repeats one token, so its answer has no end token.
    told = sampled(
        "--init_from_model", "null", "--n_layer", "1", "--n_embd", "16", "--n_head", "2", "--eval_samples", "1"
    )
    assert told[0].endswith("val_exact_rate 0, val_stop_rate 0")
    most = 32 + len(held()[0][1].encode()) + 1
    assert told[2].endswith(f"  (no end token after {most} tokens)")
    assert told[3:] == [f"  expected  {visible(held()[0][1])}<|eot|>"]


def test_without_the_tokenizer_only_the_rates_of_sample_answers_are_shown(sampled):
    Path("data/tokenizer.json").rename("data/elsewhere.json")
    try:
        told = sampled(since="sample answers")
    finally:
        Path("data/elsewhere.json").rename("data/tokenizer.json")
    assert told[0] == "sample answers are scored but not shown: the tokenizer of data/held was not found"
    assert told[-1].endswith("val_exact_rate 1, val_stop_rate 1")
    assert not any(line.startswith("  said") for line in told)


# Rows.


def test_rows_names_the_conversations_of_a_step_by_file_and_line(run, made):
    code, out, err = run("rows", "--step", "1", "--json")
    found = json.loads(out)
    assert (code, err, found["run"], found["step"], found["conversations"]) == (0, "", "checkpoints/small", 1, 5)
    metrics = [json.loads(line) for line in (made / "checkpoints/small/metrics.jsonl").read_text().splitlines()]
    assert found["loss"] == pytest.approx(metrics[0]["loss"], rel=1e-5)
    losses = [row["loss"] for row in found["rows"]]
    assert losses == sorted(losses, reverse=True)
    assert {(row["episode"], row["segment"], row["place"], row["text"]) for row in found["rows"]} == {
        (number, -1, f"{name}.jsonl:{line}", ask)
        for number, (name, line, ask) in enumerate(
            (name, line, ask) for name, talks in TALKS.items() for line, (ask, _) in enumerate(talks, 1)
        )
    }
    code, out, err = run("rows", "checkpoints/small", "--step", "1", "-n", "2")
    lines = out.splitlines()
    assert lines[0] == f"checkpoints/small, step 1: 5 conversations, loss {found['loss']:.4f}"
    worst = found["rows"][0]
    assert lines[2].split() == [f"{worst['loss']:.4f}", str(worst["episode"]), worst["place"], worst["text"]]
    assert len(lines) == 4


def test_rows_reports_missing_runs_and_steps_in_one_line(run, made, tmp_path, monkeypatch):
    one_line(run("rows", "--step", "61"), 1, "checkpoints/small: has no losses for step 61")
    one_line(run("rows", "data", "--step", "1"), 1, "data: does not contain per-conversation losses")
    one_line(run("rows", "--step", "1", "--dataset", "none"), 1, "none: no such folder")
    monkeypatch.chdir(tmp_path)
    one_line(run("rows", "--step", "1"), 2, "checkpoints: no run")
    assert run("rows", str(made / "checkpoints/small"), "--step", "1", "--dataset", str(made / "data/v1"))[0] == 0


def test_rows_refuses_another_dataset_in_one_line(run):
    Path("one.jsonl").write_text(Path("words.jsonl").read_text().splitlines()[0])
    chatmill("prepare", "one.jsonl", "-o", "data/one", "--format", "primer", "--overwrite")
    found = run("rows", "--step", "1", "--dataset", "data/one")
    one_line(found, 1, "data/one: has the hash ", "but the run's data has the hash ")


def test_rows_uses_the_dataset_of_each_step(run):
    flags = ["--format", "primer", "--tokenizer", "data/tokenizer.json", "--overwrite"]
    for name in ("sums", "words"):
        chatmill("prepare", f"{name}.jsonl", "-o", f"data/first_{name}", *flags)
    shutil.rmtree("out/two", ignore_errors=True)
    of_run = ["--model_name", "two", "--out_dir", "out", "--max_iters", "1", "--batch_size", "2"]
    chatmill("train", *of_run, "--config_file", "small.json", "--dataset_dir", "data/first_sums")
    chatmill("train", *of_run, "--resume", "auto", "--dataset_dir", "data/first_words")
    for step, name in ((1, "sums"), (2, "words")):
        found = json.loads(run("rows", "out/two", "--step", str(step), "--json")[1])["rows"]
        assert len(found) == 2
        assert all(row["place"] == f"{name}.jsonl:{row['episode'] + 1}" for row in found)
    chatmill("prepare", "words.jsonl", "-o", "data/first_sums", *flags)
    one_line(run("rows", "out/two", "--step", "1"), 1, "data/first_sums: has the hash ")


@pytest.mark.parametrize("rows", ["all of it", "its end"])
def test_rows_names_the_line_of_each_conversation_of_a_packed_row(run, rows):
    flags = ["--format", "primer", "--tokenizer", "data/tokenizer.json", "--overwrite", "--pack", "100"]
    chatmill("prepare", "words.jsonl", "sums.jsonl", "-o", "data/packed", *flags)
    shutil.rmtree("out/packed", ignore_errors=True)
    block = "100" if rows == "all of it" else "22"
    of_run = ["--block_size", block, "--batch_size", "1", "--max_iters", "1", "--max_positions", "128"]
    chatmill(
        "train",
        "--model_name",
        "packed",
        "--out_dir",
        "out",
        *of_run,
        "--config_file",
        "small.json",
        "--dataset_dir",
        "data/packed",
    )
    found = json.loads(run("rows", "out/packed", "--step", "1", "--json")[1])["rows"]
    asked = [(f"{name}.jsonl:{line}", ask) for name, talks in TALKS.items() for line, (ask, _) in enumerate(talks, 1)]
    assert sorted((row["place"], row["text"]) for row in found) == sorted(asked if rows == "all of it" else asked[-3:])


def test_episodes_of_several_sources_are_counted_over_all_of_them(run):
    for name in ("sums", "words"):
        flags = ["--format", "primer", "--tokenizer", "data/tokenizer.json", "--overwrite"]
        chatmill("prepare", f"{name}.jsonl", "-o", f"data/mixed/{name}", *flags)
    Path("mixed.json").write_text(
        json.dumps({"inherits": "small.json", "mix_sft": {"sums": 0.4, "words": 0.6}, "max_iters": 1})
    )
    shutil.rmtree("out/mixed", ignore_errors=True)
    chatmill(
        "train",
        "--model_name",
        "mixed",
        "--config_file",
        "mixed.json",
        "--dataset_dir",
        "data/mixed",
        "--out_dir",
        "out",
    )
    found = json.loads(run("rows", "out/mixed", "--step", "1", "--json")[1])["rows"]
    places = ["sums.jsonl:1", "sums.jsonl:2", "words.jsonl:1", "words.jsonl:2", "words.jsonl:3"]
    assert all(row["place"] == places[row["episode"]] for row in found)
    assert {row["place"].split(".")[0] for row in found} == {"sums", "words"}


def test_eval_of_a_mix_names_the_sources_without_val_rows(run):
    flags = ["--format", "primer", "--tokenizer", "data/tokenizer.json", "--overwrite"]
    chatmill("prepare", "sums.jsonl", "-o", "data/parted/sums", *flags, "--val-split", "0.5")
    chatmill("prepare", "words.jsonl", "-o", "data/parted/words", *flags)
    code, out, err = run("eval", "checkpoints/small", "data/parted")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()[:2]] == ["source", "sums"]
    assert out.splitlines()[2:] == ["sources without episodes in val: words"]
    found = json.loads(run("eval", "checkpoints/small", "data/parted", "--json")[1])
    assert (list(found["sources"]), found["empty_sources"]) == (["sums"], ["words"])
    code, out, err = run("eval", "checkpoints/small", "data/parted/words")
    assert code == 1 and "has no split val" in err
