from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from rollout_folders import TEMPLATES, TRUTH, write_folder, write_truth

from chatmill.errors import DataError
from chatmill.load.batch import collate
from chatmill.records import Message, Record
from chatmill.rollout import answer_rows, open_task, prompt_lists, read_truth, task_prompts
from chatmill.rollout.files import GroundTruth
from chatmill.rollout.generators import CompletionServer, TextServer
from chatmill.rollout.server import Server
from chatmill.rows import Rows, concat
from chatmill.train.checkpoint_files import model_folder as trained_folder
from chatmill.train.generation import generate
from chatmill.train.load_model import open_model

pytestmark = pytest.mark.filterwarnings("ignore")
START_LIMIT = 300
"""Seconds in which the server must respond; a slow machine needs 60."""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    place = tmp_path_factory.mktemp("served")
    write_truth(place / "truth.jsonl")
    torch.set_num_threads(1)
    # The server parses answers of Qwen3 models by their ChatML headers, which `brackets` lacks.
    for kind, names in ((Qwen3Config, ("chatml", "thinking")), (LlamaConfig, ("brackets",))):
        folders = [write_folder(place / name, name, special_coordinates=False) for name in names]
        rows = concat([answer_rows(questions(place), open_task(str(folder), None)) for folder in folders])
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(kind(**SIZES))
        teach(model, rows)
        for folder in folders:
            model.save_pretrained(folder)
    return place


SIZES = {
    "vocab_size": 1400,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
    "max_position_embeddings": 256,
}


def questions(place: Path) -> list[GroundTruth]:
    turns = [Message("user", "scene 1"), Message("assistant", "{}"), Message("user", "scene 2")]
    return [*read_truth(place / "truth.jsonl"), GroundTruth(Record(turns, "turns"), TRUTH)]


def teach(model: torch.nn.Module, rows: Rows) -> None:
    batch = collate(rows, pad_token_id=0)
    x, y = (torch.from_numpy(array.astype("int64")) for array in (batch.x, batch.y))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(80):
        loss = torch.nn.functional.cross_entropy(model(x).logits.flatten(0, 1), y.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1


@pytest.fixture(scope="module")
def url(place):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [Path(sys.executable).parent / "transformers", "serve", "--host", "127.0.0.1", "--port", str(port)]
    log = place / "serve.log"
    with log.open("wb") as output:
        child = subprocess.Popen(
            [*command, "--device", "cpu"],
            stdout=output,
            stderr=output,
            env={**os.environ, "HF_HOME": str(place / "hf")},
        )
    try:
        deadline = time.monotonic() + START_LIMIT
        while not _is_up(port):
            assert child.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        child.terminate()
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _is_up(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
            return reply.status == 200
    except OSError:
        return False


@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_greedy_answers_are_those_of_the_same_folder_in_this_process(place, url, name, api):
    folder = str(place / name)
    task, truths = open_task(folder, None), questions(place)
    prompts, records = prompt_lists(task_prompts(truths, task)), [truth.record for truth in truths]
    model = open_model(place / name)
    mine = generate(model, prompts, max_tokens=90, end_ids=[task.eos_id])
    # The model has learned to write objects and to end its answers.
    assert {task.tokenizer.decode(ids).count("object_") for ids in mine} >= {0, 2}
    assert all(ids[-1] == task.eos_id for ids in mine)
    server = TextServer(url, folder, 90, task=task, api=api)
    assert server(prompts, step=0, records=records) == mine
    assert server.counts == {"as_text": 6, "retokenized": 0}
    # A truncated answer has no end token.
    short = TextServer(url, folder, 9, task=task, api=api)(prompts, step=0, records=records)
    for cut, whole in zip(short, mine, strict=True):
        limited = whole[:9]
        assert task.tokenizer.decode(cut) == task.tokenizer.decode(limited)
        assert (cut[-1] == task.eos_id) == (len(whole) < 9)


def test_a_stream_is_read_like_a_whole_reply(place, url):
    task = open_task(str(place / "chatml"), None)
    text = task.tokenizer.decode(prompt_lists(task_prompts(questions(place)[2:3], task))[0])
    server = Server(url, str(place / "chatml"), 90)
    body = {**server.sampled(0, 0), "prompt": text, "stop": ["<|im_end|>"]}
    whole, streamed = server.answers([{**body, "stream": stream} for stream in (False, True)], "completions")
    assert whole.text.startswith('{"object_1"') and whole.finish_reason == "stop"
    assert streamed == whole


def test_what_this_server_cannot_do_is_one_line(place, url):
    folder = str(place / "chatml")
    task = open_task(folder, None)
    prompts = prompt_lists(task_prompts(questions(place), task))
    with pytest.raises(DataError, match=r'status 4..: .*set server_api to "chat" or "completions"') as caught:
        CompletionServer(url, folder, 5, pause=0)(prompts, step=0)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="check that the server is running and serves no/such/model"):
        TextServer(url, "no/such/model", 5, pause=0, task=task, api="completions")(prompts, step=0)
    # Text that looks like a control token becomes the token on the server, but is encoded as text in training.
    record = Record([Message("user", "end <|im_end|> here")])
    prompt = prompt_lists(task_prompts([GroundTruth(record, ())], task))
    with pytest.raises(DataError, match=rf"reports \d+ prompt tokens, but the training prompt has {len(prompt[0])}"):
        TextServer(url, folder, 5, task=task, api="chat")(prompt, step=0, records=[record])


def test_a_run_trains_on_the_answers_of_the_server_and_is_replayed_to_the_bit(place, url, tmp_path):
    folder = place / "thinking"
    settings = {
        "truth": str(place / "truth.jsonl"),
        "init_from_model": str(folder),
        "tokenizer": str(folder),
        "max_iters": 3,
        "rollout_every": 1,
        "batch_size": 4,
        "max_new_tokens": 90,
        "learning_rate": 0.01,
        "save_interval": 3,
        "device": "cpu",
    }
    asked = {**settings, "server": url, "server_model": str(folder), "server_api": "chat"}
    out = rollout_train(tmp_path, "asked", asked)
    assert (
        "12 answers were returned as text; for 0 of them, the number of tokens differs from the server's count" in out
    )
    logged = (tmp_path / "asked" / "rollouts.jsonl").read_text()
    lines = [json.loads(line) for line in logged.splitlines()]
    task, model = open_task(str(folder), None), open_model(folder)
    prompts = [line["prompt_token_ids"] for line in lines]
    # The weights on the server do not change, so every answer comes from the untrained model.
    assert [line["response_token_ids"] for line in lines] == generate(
        model, prompts, max_tokens=90, end_ids=[task.eos_id]
    )
    rounds = [json.loads(line) for line in (tmp_path / "asked" / "metrics.jsonl").read_text().splitlines()]
    assert [(r["as_text"], r["retokenized"]) for line in rounds if (r := line.get("rollouts"))] == [(4, 0)] * 3
    rollout_train(tmp_path, "replayed", {**settings, "replay": str(tmp_path / "asked" / "rollouts.jsonl")})
    assert (tmp_path / "replayed" / "rollouts.jsonl").read_text() == logged
    before, after, again = (
        open_model(each).state_dict()
        for each in (folder, *(trained_folder(tmp_path / n) for n in ("asked", "replayed")))
    )
    assert all(torch.equal(after[key], again[key]) for key in after)
    assert any(not torch.equal(before[key], after[key]) for key in after)


def rollout_train(place: Path, name: str, settings: dict) -> str:
    (place / f"{name}.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "chatmill", "rollout", "train", f"{name}.json", "-o", name]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout
