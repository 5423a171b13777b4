from __future__ import annotations

import json
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from chatmill.errors import ChatmillError, DataError, UsageError
from chatmill.format import load_format
from chatmill.rollout import open_task
from chatmill.rollout.config import RolloutConfig
from chatmill.rollout.generators import generator_of
from chatmill.rollout.loop import train_rollouts
from chatmill.rollout.vocabulary import COORDINATES
from chatmill.tokenizer import open_tokenizer, train_bpe
from chatmill.train import GPT, GPTSizes
from chatmill.train.checkpoint_files import model_folder
from chatmill.train.load_model import open_model

torch.set_num_threads(1)
FORMAT = load_format("primer")
TOKENIZER = open_tokenizer("bytes", control=FORMAT.tokens, besides=COORDINATES, add_tokens=True)


@pytest.fixture
def files(tmp_path):
    lines = [
        {
            "id": number,
            "messages": [{"role": "user", "content": f"scene {number}"}],
            "objects": [{"desc": "x", "bbox_2d": [number, 0, 500, 900]}] * (number % 3),
        }
        for number in range(5)
    ]
    (tmp_path / "truth.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    torch.manual_seed(0)
    (tmp_path / "model").mkdir()
    sizes = GPTSizes(vocab_size=TOKENIZER.vocab_size, n_layer=1, n_embd=16, n_head=2, max_positions=220)
    GPT(sizes).save(tmp_path / "model")
    return tmp_path


def config_of(folder: Path, **changes) -> RolloutConfig:
    settings = {
        "truth": str(folder / "truth.jsonl"),
        "init_from_model": str(folder / "model"),
        "format": "primer",
        "add_tokens": True,
        "max_iters": 6,
        "rollout_every": 2,
        "batch_size": 3,
        "max_new_tokens": 12,
        "decoding": "sample",
        "learning_rate": 0.01,
        "save_interval": 2,
        "device": "cpu",
    }
    return RolloutConfig.from_mapping(settings | changes)


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def weights(folder: Path) -> dict[str, list]:
    return {name: tensor.tolist() for name, tensor in open_model(model_folder(folder)).state_dict().items()}


def test_a_run_writes_its_rollouts_its_metrics_and_its_model(files):
    result = train_rollouts(config_of(files, report_to=["tensorboard"]), files / "run", quiet=True)
    assert (result.step, result.total, result.health.rollouts) == (6, 6, 18)
    logged = lines_of(files / "run" / "rollouts.jsonl")
    assert [(line["step"], line["row"]) for line in logged] == [(step, row) for step in (0, 2, 4) for row in range(6)]
    ids = [line["id"] for line in logged]
    assert [sorted(ids[at : at + 5]) for at in (0, 5, 10)] == [["0", "1", "2", "3", "4"]] * 3
    assert all(len(line["response_token_ids"]) <= 12 for line in logged)
    metrics = lines_of(files / "run" / "metrics.jsonl")
    steps = [line for line in metrics if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    for line in steps:
        parts = sum(line[name] for name in ("text", "soft", "wasserstein", "outside"))
        assert line["loss"] == pytest.approx(parts, rel=1e-4)
    rounds = [line["rollouts"] for line in metrics if "rollouts" in line]
    assert len(rounds) == 3
    assert {"valid", "dropped", "truncated", "matched", "missed", "gated", "rollout_tokens"} <= rounds[0].keys()
    events = EventAccumulator(str(files / "run" / "tensorboard")).Reload()
    reported = {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in ("loss", "rollouts/valid")}
    assert reported["loss"] == [(line["step"], pytest.approx(line["loss"])) for line in steps]
    assert reported["rollouts/valid"] == [(step, line["valid"]) for step, line in zip((1, 3, 5), rounds, strict=True)]
    assert weights(files / "run") != weights(files / "model")
    train_rollouts(config_of(files, max_iters=1, save_dtype="bfloat16"), files / "half", quiet=True)
    half = open_model(model_folder(files / "half"), weights="stored")
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}


def test_every_step_is_one_forward_pass_for_each_of_its_rows(files, monkeypatch):
    calls = []
    hidden = GPT.hidden
    monkeypatch.setattr(GPT, "hidden", lambda self, x, *rest: (calls.append(len(x)), hidden(self, x, *rest))[1])
    train_rollouts(config_of(files, save_interval=0), files / "one", quiet=True)
    assert calls == [3] * 6
    calls.clear()
    train_rollouts(config_of(files, save_interval=0, gradient_accumulation_steps=2), files / "two", quiet=True)
    assert calls == [1, 2] * 6


def test_parts_of_a_step_give_the_gradient_of_the_whole(files):
    ends = []
    for parts in (1, 3):
        train_rollouts(config_of(files, gradient_accumulation_steps=parts), files / str(parts), quiet=True)
        ends.append(open_model(model_folder(files / str(parts))).state_dict())
    for name, tensor in ends[0].items():
        torch.testing.assert_close(tensor, ends[1][name], rtol=1e-3, atol=1e-5)


def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_run(files):
    train_rollouts(config_of(files), files / "whole", quiet=True)
    again = files / "again"
    train_rollouts(config_of(files, keep_checkpoints=9), again, quiet=True)
    # The logs still contain the steps after this checkpoint.
    train_rollouts(config_of(files, keep_checkpoints=9), again, resume=str(again / "step_00000002"), quiet=True)
    assert weights(again) == weights(files / "whole")
    assert (again / "rollouts.jsonl").read_bytes() == (files / "whole" / "rollouts.jsonl").read_bytes()
    steps = [line["step"] for line in lines_of(again / "metrics.jsonl") if "loss" in line]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_a_run_that_gets_a_signal_finishes_its_round_and_saves(files):
    train_rollouts(config_of(files, save_interval=6), files / "whole", quiet=True)

    settings, stopped = config_of(files, save_interval=6), files / "stopped"
    model = open_model(files / "model")
    answer = generator_of(settings, model, open_task("bytes", "primer", add_tokens=True))

    def interrupted(prompts, *, step, **others):
        if step == 2:
            signal.raise_signal(signal.SIGTERM)
        return answer(prompts, step=step, **others)

    result = train_rollouts(settings, stopped, model=model, generator=interrupted, quiet=True)
    assert (result.step, result.stopped_by, result.checkpoint) == (4, "SIGTERM", stopped / "step_00000004")
    result = train_rollouts(settings, stopped, resume="auto", quiet=True)
    assert (result.step, result.stopped_by) == (6, None)
    assert weights(stopped) == weights(files / "whole")
    assert (stopped / "rollouts.jsonl").read_bytes() == (files / "whole" / "rollouts.jsonl").read_bytes()


def test_a_run_is_replayed_from_its_log(files):
    train_rollouts(config_of(files), files / "run", quiet=True)
    log = str(files / "run" / "rollouts.jsonl")
    # Replay uses the logged answers, so the temperature has no effect.
    train_rollouts(config_of(files, replay=log, temperature=0.2), files / "replayed", quiet=True)
    assert weights(files / "replayed") == weights(files / "run")
    assert (files / "replayed" / "rollouts.jsonl").read_bytes() == (files / "run" / "rollouts.jsonl").read_bytes()
    with pytest.raises(DataError, match="no rollout for step 6, row 0"):
        train_rollouts(config_of(files, replay=log, max_iters=8), files / "longer", quiet=True)


@pytest.mark.parametrize("decoding", ["greedy", "sample", "beam"])
def test_answers_depend_on_seed_step_and_row_and_not_on_how_they_are_batched(files, decoding):
    logs = []
    for size in (64, 2):
        config = config_of(files, decoding=decoding, generate_batch_size=size, beams=2, max_iters=2)
        train_rollouts(config, files / f"run{size}", quiet=True)
        logs.append((files / f"run{size}" / "rollouts.jsonl").read_bytes())
    assert logs[0] == logs[1]


def test_every_step_and_row_samples_independently(files):
    one = {"id": 1, "messages": [{"role": "user", "content": "again"}], "objects": []}
    (files / "truth.jsonl").write_text(json.dumps(one) + "\n")
    # The learning rate is 0 and all prompts are equal, so answers differ only because they are sampled.
    train_rollouts(config_of(files, learning_rate=0, weight_decay=0), files / "run", quiet=True)
    answers = [tuple(line["response_token_ids"]) for line in lines_of(files / "run" / "rollouts.jsonl")]
    assert len(set(answers)) == len(answers) == 18


def test_targets_too_long_for_the_model_are_left_out_and_counted(files):
    torch.manual_seed(0)
    sizes = GPTSizes(vocab_size=TOKENIZER.vocab_size, n_layer=1, n_embd=16, n_head=2, max_positions=60)
    GPT(sizes).save(files / "model")
    result = train_rollouts(config_of(files), files / "run", quiet=True)
    assert 0 < result.health.too_long < 18


def test_prompts_too_long_for_the_model_are_left_out_and_counted(files):
    lines = lines_of(files / "truth.jsonl")
    lines[3]["messages"][0]["content"] = 300 * "long "
    (files / "truth.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = train_rollouts(config_of(files, max_iters=5), files / "run", quiet=True)
    # 5 steps of 3 rows use each of the five records three times.
    assert (result.step, result.health.rollouts, result.health.too_long) == (5, 12, 3)
    assert "3" not in {line["id"] for line in lines_of(files / "run" / "rollouts.jsonl")}
    for line in lines:
        line["messages"][0]["content"] = 300 * "long "
    (files / "truth.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = train_rollouts(config_of(files, max_iters=2), files / "none", quiet=True)
    assert (result.step, result.loss, result.health.rollouts, result.health.too_long) == (2, None, 0, 6)


def test_the_command_reports_what_was_too_long(run, files):
    truth = {"id": 1, "messages": [{"role": "user", "content": 300 * "long "}], "objects": []}
    (files / "truth.jsonl").write_text(json.dumps(truth) + "\n")
    Path("stage2.json").write_text(json.dumps(config_of(files, max_iters=2, decoding="beam").to_json()))
    code, out, _ = run("rollout", "train", "stage2.json", "-o", "run")
    said = "  6 prompts and targets exceed the model's maximum sequence length and were left out"
    assert code == 0 and said in out.splitlines()


def test_a_gradient_that_is_not_finite_is_reported(files):
    said = r"^step 2: the gradient norm is \w+; lower learning_rate, and resume from .*/step_00000001$"
    settings = {"learning_rate": 1e30, "rollout_every": 1, "save_interval": 1}
    with pytest.raises(ChatmillError, match=said):
        train_rollouts(config_of(files, **settings), files / "run", quiet=True)


def test_fields_are_trained_as_text_alone(files):
    truth = [{"id": 1, "messages": [{"role": "user", "content": "who?"}], "objects": [{"name": "Ada"}]}]
    (files / "truth.jsonl").write_text("".join(json.dumps(line) + "\n" for line in truth))
    train_rollouts(config_of(files, fields=["name"]), files / "run", quiet=True)
    steps = [line for line in lines_of(files / "run" / "metrics.jsonl") if "loss" in line]
    assert all(line["soft"] == line["outside"] == 0 < line["text"] for line in steps)


def test_a_hugging_face_model_answers_and_is_trained_too(files):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=TOKENIZER.vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=220,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(files / "theirs")
    settings = {"init_from_model": str(files / "theirs"), "max_iters": 2, "decoding": "greedy"}
    result = train_rollouts(config_of(files, **settings), files / "run", quiet=True)
    assert (result.step, result.health.rollouts) == (2, 6)
    assert (model_folder(files / "run") / "model.safetensors").is_file()
    assert weights(files / "run") != weights(files / "theirs")


def test_a_server_can_generate_instead_of_the_model(files):
    def answer(prompt):
        return [*b'{"object_1": {"desc": "', prompt[-3], *b'"}}']

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
            data = json.dumps({"choices": [{"token_ids": answer(prompt), "prompt_token_ids": prompt}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        place = {"server": f"http://127.0.0.1:{server.server_address[1]}/v1", "server_model": "m"}
        result = train_rollouts(config_of(files, **place, max_iters=2), files / "run", quiet=True)
    finally:
        server.shutdown()
        server.server_close()
    assert result.health.to_json()["dropped"] == {"geometry": 6}
    for line in lines_of(files / "run" / "rollouts.jsonl"):
        assert line["response_token_ids"] == answer(line["prompt_token_ids"])


def test_the_command_trains_and_prints_a_summary(run, files):
    settings = config_of(files).to_json()
    Path("stage2.json").write_text(json.dumps({**settings, "max_iters": 2}))
    code, out, err = run("rollout", "train", "stage2.json", "-o", "run")
    assert code == 0, err
    assert "run: step 2 of 2, loss" in out and "true objects" in out and "model: run/step_00000002/model" in out
    assert "step 2/2" in err
    code, out, err = run("rollout", "train", "stage2.json", "-o", "run")
    assert (code, err.count("\n")) == (2, 1) and "already contains a run" in err
    code, out, _ = run("rollout", "train", "stage2.json", "-o", "run", "--resume", "auto", "--json")
    assert code == 0 and json.loads(out)["step"] == 2
    code, out, _ = run("rollout", "keys", "--json")
    assert json.loads(out).keys() == settings.keys()


def test_the_error_about_missing_control_tokens_names_the_config_key(run, files):
    Path("stage2.json").write_text(json.dumps({**config_of(files).to_json(), "add_tokens": False}))
    code, out, err = run("rollout", "train", "stage2.json", "-o", "run")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.endswith('; add them with "add_tokens": true in the config\n') and "--add-tokens" not in err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"truth": None}, "truth is required"),
        ({"save_interval": 3}, r"save_interval is 3; expected a multiple of rollout_every \(2\)"),
        ({"sigma": 0}, "sigma is 0; expected a number above 0"),
        ({"gate": 0}, "gate is 0"),
        ({"server": "http://x"}, "server_model is missing"),
        ({"server_api": "chat"}, "server_api is set, but server is missing"),
        ({"server_key_env": "KEY"}, "server_key_env is set, but server is missing"),
        ({"server": "http://x", "server_model": "m", "server_api": "text"}, "server_api"),
        ({"decoding": "best"}, '"greedy" or "sample" or "beam"'),
        ({"colour": 1}, 'unknown key "colour"'),
    ],
)
def test_invalid_settings_are_reported_in_one_line(files, changes, said):
    with pytest.raises(UsageError, match=said) as caught:
        config_of(files, **changes)
    assert "\n" not in str(caught.value)


def test_a_model_of_another_vocabulary_or_settings_of_another_run_are_refused(files):
    train_rollouts(config_of(files, max_iters=2), files / "run", quiet=True)
    with pytest.raises(UsageError, match="seed was 1337, but is now 5; resume with the original settings"):
        train_rollouts(config_of(files, seed=5), files / "run", resume="auto", quiet=True)
    truth = files / "truth.jsonl"
    said = truth.read_text()
    truth.write_text(said.replace("500", "501"))
    with pytest.raises(
        UsageError, match=r"truth.jsonl was \w{12}…, but is now \w{12}…; resume with the original settings"
    ):
        train_rollouts(config_of(files), files / "run", resume="auto", quiet=True)
    truth.write_text(said)
    trained = {"init_from_model": str(files / "run")}
    with pytest.raises(UsageError, match="was trained with a different format"):
        train_rollouts(config_of(files, **trained, format="chatml"), files / "other", quiet=True)
    (files / "t.json").write_bytes(train_bpe(["ab"], vocab_size=262, control=list(FORMAT.tokens.values())))
    with pytest.raises(UsageError, match="was trained with a different tokenizer"):
        train_rollouts(config_of(files, **trained, tokenizer=str(files / "t.json")), files / "other", quiet=True)
    GPT(GPTSizes(vocab_size=300, n_layer=1, n_embd=16, n_head=2)).save(files / "model")
    with pytest.raises(UsageError, match="the model's vocabulary size is 300, but the tokenizer has 1271 tokens"):
        train_rollouts(config_of(files), files / "small", quiet=True)


def test_a_share_of_rows_may_be_true_answers_spread_evenly(files):
    trained = {}
    for share in (1.0, 0, 0.25, 0.5):
        result = train_rollouts(config_of(files, rollout_share=share), files / f"share{share}", quiet=True)
        logged = lines_of(files / f"share{share}" / "rollouts.jsonl")
        # The run has 18 rows; answers are generated for 6 rows (two steps) at a time.
        assert len(logged) == result.health.rollouts == int(18 * share)
        assert [line["row"] for line in logged if line["step"] == 0] == list(range(int(6 * share)))
        steps = lines_of(files / f"share{share}" / "metrics.jsonl")
        trained[share] = sum(line["trained"] for line in steps if "trained" in line)
    # This model's answers are not JSON, so each target consists of an opening brace and all true objects. In rows
    # without a rollout, the loss mask also includes the brace.
    assert trained == {share: trained[1.0] + 18 - int(18 * share) for share in trained}
