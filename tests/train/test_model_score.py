from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from model_fixtures import small_gpt
from train_fixtures import run_chatmill, write_files

from chatmill.errors import DataError
from chatmill.format import TurnRenderer, load_format
from chatmill.records import read_records
from chatmill.store.read import open_dataset
from chatmill.tokenizer import open_tokenizer
from chatmill.train import GPT, GPTSizes
from chatmill.train.score import EvalScore, check_tokenizer, open_all, score_model

PRIMER = load_format("primer")
BYTES = open_tokenizer("bytes", control=PRIMER.tokens)
EOT = BYTES.special_token_ids()["eot"]
SIZES = GPTSizes(vocab_size=BYTES.vocab_size, n_layer=1, n_embd=32, n_head=2, max_positions=96)
TALKS = {"long": ["what is it?", "a lamp", "and that?", "a rather long and winding road"], "short": ["hi", "yo"]}


def write(folder: Path, name: str, count: int) -> Path:
    path = folder / f"{name}.jsonl"
    with path.open("w") as file:
        for number in range(count):
            said = [f"{text}{number}" for text in TALKS[name]]
            messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(said)]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("score")
    return [write(folder, "long", 5), write(folder, "short", 9)]


def prepared(files: list[Path], name: str, *flags: str) -> Path:
    target = files[0].parent / name
    inputs = [str(path) for path in files]
    run_chatmill("prepare", *inputs, "-o", str(target), "--format", "primer", "--workers", "1", *flags)
    return target


@pytest.fixture(scope="module")
def dataset(files):
    return prepared(files, "plain")


@pytest.fixture(scope="module")
def model():
    return small_gpt(SIZES)


def plain_losses(model: GPT, ids: list[int], mask: list[int]) -> tuple[float, int]:
    x = torch.tensor([ids])
    with torch.no_grad():
        logits = model.logits(x, torch.arange(len(ids))[None], torch.zeros_like(x))[0]
    losses = F.cross_entropy(logits[:-1], x[0, 1:], reduction="none").double()
    trained = torch.tensor(mask[1:], dtype=torch.bool)
    return float(losses[trained].sum()), int(trained.sum())


def greedy(model: GPT, prompt: list[int], count: int) -> list[int]:
    ids: list[int] = []
    while len(ids) < count and EOT not in ids:
        x = torch.tensor([prompt + ids])
        with torch.no_grad():
            ids.append(int(model.logits(x, torch.arange(x.shape[1])[None], torch.zeros_like(x))[0, -1].argmax()))
    return ids


def oracle(model: GPT, files: list[Path], dataset: Path, count: int) -> dict[str, EvalScore]:
    episodes = open_dataset(dataset)["train"]
    found: dict[str, EvalScore] = {}
    number = 0
    for path in files:
        one = found.setdefault(path.stem, EvalScore())
        for record in read_records([str(path)], shape="messages"):
            total, trained = plain_losses(model, episodes.tokens(number).tolist(), episodes.mask(number).tolist())
            one.add(EvalScore(1, total, trained))
            for at, message in enumerate(record.messages):
                if message.role == "assistant":
                    cut = type(record)(record.messages[:at])
                    said = greedy(model, TurnRenderer(PRIMER, BYTES).prompt_ids(cut), count)
                    exact = said == [*BYTES.encode(message.content), EOT]
                    one.add(EvalScore(questions=1, exact=exact, stopped=said[-1] == EOT))
            number += 1
    return found


def same(found: dict[str, EvalScore], wanted: dict[str, EvalScore]) -> None:
    assert found.keys() == wanted.keys()
    for name, right in wanted.items():
        assert found[name].loss_sum == pytest.approx(right.loss_sum, rel=1e-5)
        for key in ("conversations", "weight", "questions", "exact", "stopped"):
            assert getattr(found[name], key) == getattr(right, key)


def teach(model: GPT, dataset: Path, episodes: range) -> None:
    ids = torch.tensor([open_dataset(dataset)["train"].tokens(number).tolist() for number in episodes])
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(60):
        logits = model.logits(ids, positions, torch.zeros_like(ids))
        optimizer.zero_grad()
        F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()


def test_scores_equal_those_computed_one_conversation_and_token_at_a_time(dataset, files):
    torch.manual_seed(0)
    model = GPT(SIZES)
    teach(model, dataset, range(5, 14))
    wanted = oracle(model, files, dataset, 12)
    found = score_model(model, dataset, split="train", max_tokens=12)
    same(found.sources, wanted)
    # The test is meaningful only if the model has learned some answers but not all.
    assert 0 < found.all.exact < found.all.questions == 19
    assert found.all.loss_sum == pytest.approx(sum(each.loss_sum for each in wanted.values()), rel=1e-5)
    assert (found.cut, found.left_out) == (0, Counter())
    assert [answer.place for answer in found.answers[-2:]] == [f"{files[1].name}:8", f"{files[1].name}:9"]


@pytest.mark.parametrize("size", [90, 96, 400])
def test_packed_conversations_have_the_same_scores(dataset, files, model, size):
    packed = prepared(files, f"packed{size}", "--pack", str(size))
    assert len(open_dataset(packed)["train"]) < 14
    found = score_model(model, packed, split="train", max_tokens=6)
    same(found.sources, score_model(model, dataset, split="train", max_tokens=6).sources)
    assert (found.cut, found.left_out) == (0, Counter())


def test_a_limit_selects_prompts_evenly_and_reports_how_many_are_left_out(dataset, model):
    found = score_model(model, dataset, split="train", max_tokens=2, limit=4)
    assert found.left_out == {"over_the_limit": 15}
    everything = score_model(model, dataset, split="train", max_tokens=2)
    assert [answer.prompt for answer in found.answers] == [everything.answers[at].prompt for at in (0, 4, 9, 14)]
    assert found.all.loss_sum == everything.all.loss_sum


def test_conversations_longer_than_the_model_are_truncated_and_not_prompted(dataset):
    short = small_gpt(GPTSizes(vocab_size=BYTES.vocab_size, n_layer=1, n_embd=32, n_head=2, max_positions=40))
    found = score_model(short, dataset, split="train", max_tokens=100)
    assert (found.cut, found.left_out) == (5, {"too_long": 5})
    assert max(len(answer.prompt.prompt) + len(answer.ids) for answer in found.answers) <= 40


@pytest.mark.parametrize("flags", [(), ("--pack", "400"), ("--pack", "100")])
def test_the_last_tokens_of_a_truncated_conversation_count_for_its_source(dataset, files, flags):
    short = small_gpt(GPTSizes(vocab_size=BYTES.vocab_size, n_layer=1, n_embd=32, n_head=2, max_positions=40))
    episodes = open_dataset(dataset)["train"]
    found = score_model(short, prepared(files, f"cut{''.join(flags)}", *flags), split="train", limit=0)
    wanted = {"long": EvalScore(), "short": EvalScore()}
    for number in range(14):
        last = [values.tolist()[-41:] for values in (episodes.tokens(number), episodes.mask(number))]
        wanted["long" if number < 5 else "short"].add(EvalScore(1, *plain_losses(short, *last)))
    same(found.sources, wanted)
    assert found.cut == 5


def test_a_dataset_without_an_end_token_has_only_losses(tmp_path, model):
    folder = write_files(tmp_path / "x", [[5, 6, 9, 7, 8, 9], [1, 9]], [[0, 1, 1, 0, 1, 1], [1, 1]])
    found = score_model(model, folder, split="train")
    wanted = [plain_losses(model, [5, 6, 9, 7, 8, 9], [0, 1, 1, 0, 1, 1]), plain_losses(model, [1, 9], [0, 1])]
    same(found.sources, {"x": EvalScore(2, *np.sum(wanted, axis=0))})
    assert found.left_out == {"unfinished": 3}


def test_episodes_without_tokens_are_not_conversations(tmp_path, model):
    folder = write_files(tmp_path / "x", [[], [5, 6, 9], [], [1], []], [[], [0, 1, 1], [], [1], []])
    found = score_model(model, folder, split="train")
    same(found.sources, {"x": EvalScore(2, *plain_losses(model, [5, 6, 9], [0, 1, 1]))})


def test_data_with_a_different_tokenizer_is_refused(dataset, tmp_path):
    (tmp_path / "training.json").write_text(json.dumps({"tokenizer_sha256": "ab" * 32}))
    with pytest.raises(
        DataError, match=f"{dataset}: was prepared with tokenizer {BYTES.sha256[:12]}…, but the model .* abab"
    ):
        check_tokenizer(tmp_path, open_all(dataset)[0])
    (tmp_path / "training.json").write_text(json.dumps({"tokenizer_sha256": BYTES.sha256}))
    check_tokenizer(tmp_path, open_all(dataset)[0])


@pytest.mark.parametrize("said", [{"tokenizer_sha256": 5}, []])
def test_an_invalid_tokenizer_hash_in_a_model_folder_is_a_one_line_error(dataset, tmp_path, said):
    path = tmp_path / "training.json"
    path.write_text(json.dumps(said))
    with pytest.raises(
        DataError, match=f"{path}: expected an object with a string as tokenizer_sha256; remove the file, or save"
    ):
        check_tokenizer(tmp_path, open_all(dataset)[0])


def test_ids_outside_the_vocabulary_are_a_one_line_error(dataset, tmp_path):
    small = small_gpt(GPTSizes(vocab_size=100, n_layer=1, n_embd=32, n_head=2, max_positions=96))
    strange = write_files(tmp_path / "strange", [[5, 6, 9], [1, 100]], [[0, 1, 1], [1, 1]])
    for folder, largest in ((dataset, BYTES.vocab_size - 1), (strange, 100)):
        with pytest.raises(
            DataError, match=f"{folder}: has token ids up to {largest}, but the model's vocabulary size is 100; use the"
        ):
            score_model(small, folder, split="train")


def test_every_cache_of_a_folder_is_scored_under_its_name(dataset, files, model):
    root = files[0].parent / "root"
    for name, path in zip(("a", "b"), files, strict=True):
        prepared([path], f"root/{name}")
    (root / "notes.txt").write_text("not a cache")
    alone = score_model(model, dataset, split="train", max_tokens=6)
    found = score_model(model, root, split="train", max_tokens=6)
    same(found.sources, {"a": alone.sources["long"], "b": alone.sources["short"]})
    assert [answer.ids for answer in found.answers] == [answer.ids for answer in alone.answers]
