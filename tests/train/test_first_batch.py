from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from train_fixtures import config, prepare, run_chatmill, trained, write_files

from chatmill.load.batch import Batch
from chatmill.load.loader import EpisodeLoader
from chatmill.show.dataset import dataset_text
from chatmill.train.distributed import World
from chatmill.train.first_batch import ANSWER, PROMPT, TrainedSpan, _shortened, describe, trained_spans
from chatmill.train.loop import train_model
from chatmill.train.step import count_batch, micro_batches

ALONE = World(0, 1, torch.device("cpu"))


@given(st.data())
def test_spans_are_consecutive_trained_positions_of_a_segment(data):
    rows, length = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
    shape = st.lists(st.lists(st.integers(0, 1), min_size=length, max_size=length), min_size=rows, max_size=rows)
    mask, borders = np.array(data.draw(shape), dtype=bool), np.array(data.draw(shape))
    borders[:, 0] = 0
    segments = borders.cumsum(axis=1)
    empty: Any = np.zeros((rows, length))
    batch = Batch(empty, empty, mask, empty, empty, segments, empty)
    expected = []
    for row in range(rows):
        start = None
        for at in range(length + 1):
            goes_on = at < length and mask[row, at] and (start is None or segments[row, at] == segments[row, at - 1])
            if start is not None and not goes_on:
                expected.append(TrainedSpan(row, start, at))
                start = None
            if at < length and mask[row, at] and start is None:
                start = at
    assert trained_spans(batch) == expected


def letters(ids: Sequence[int]) -> str:
    return "".join(chr(97 + id % 26) * (id % 6) for id in ids)


@given(st.lists(st.integers(1, 400), max_size=400), st.integers(0, 30), st.integers(6, 30))
def test_a_long_answer_is_shortened_at_token_boundaries(ids, start, end):
    shown, whole = _shortened(ids, letters, start=start, end=end), letters(ids)
    if "…" not in shown:
        assert shown == whole and len(shown) <= start + end
        return
    first, last = shown.split("…")
    assert whole.startswith(first) and whole.endswith(last)
    assert start - 5 < len(first) <= start or not start
    assert end - 5 < len(last) <= end


def first_of(dataset, *, text=True, **changes):
    loader = EpisodeLoader(dataset, config(**changes))
    batch = loader.get_batch()
    counts = count_batch(batch, micro_batches(batch, 1, torch.device("cpu")))
    opened = dataset_text(dataset).text if text else None
    before = loader.state_dict()
    first = describe(batch, counts, loader, ALONE, step=1, text=lambda: opened)
    assert loader.state_dict() == before
    return first


def talk(*turns: str) -> str:
    roles = ("user", "assistant") * len(turns)
    messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
    return json.dumps({"messages": messages})


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def make(*lines: str, flags: Sequence[str] = ()):
        (tmp_path / "chat.jsonl").write_text("\n".join(lines) + "\n")
        run_chatmill("prepare", "chat.jsonl", "-o", "data", "--workers", "1", *flags)
        return tmp_path / "data"

    return make


@pytest.mark.parametrize("packing", ["none", "bins"])
def test_the_first_batch_is_shown_as_it_is_trained(dataset, packing):
    data = dataset(talk("Hi", "Hello\x1b[2J", "Bye", "x" * 500), talk("1+1", "2\n"), talk("?", "!"))
    first = first_of(data, batch_size=4, block_size=700, packing=packing, epoch_shuffle=False, epoch_drop_last=False)
    answers = {each["from"]: (each["prompt"], each["answer"]) for each in first.answers}
    header = "<|im_end|>\\n<|im_start|>assistant\\n"
    long = "x" * (ANSWER // 2)
    # Only the end of the prompt is shown, starting at a token boundary.
    bye = f"<|im_start|>user\\nBye{header}"
    everything = {
        "chat.jsonl:1 (episode 0, 10 trained tokens)": (f"<|im_start|>user\\nHi{header}", "Hello\\x1b[2J<|im_end|>"),
        "chat.jsonl:1 (episode 0, 501 trained tokens)": (
            f"…{bye[-PROMPT:]}",
            f"{long}…{long[10:]}<|im_end|>",
        ),
        "chat.jsonl:2 (episode 1, 3 trained tokens)": (f"<|im_start|>user\\n1+1{header}", "2\\n<|im_end|>"),
        "chat.jsonl:3 (episode 2, 2 trained tokens)": (f"<|im_start|>user\\n?{header}", "!<|im_end|>"),
    }
    assert {key: everything[key] for key in answers} == answers
    assert len(answers) == 3
    lines = first.lines()
    rows = 3 if packing == "none" else 1
    assert lines[0] == f"first batch: {rows} rows, {first.tokens} tokens, 516 trained ({516 / first.tokens:.1%})"
    assert all(line.isprintable() for line in lines)
    assert (len(lines), first.warnings) == (10, [])


def test_token_ids_are_shown_without_a_tokenizer(tmp_path):
    data = write_files(tmp_path / "data", [[1, 2, 3, 4, 5]] * 4, [[0, 0, 1, 1, 0]] * 3 + [[0] * 5])
    first = first_of(data, text=False, pad_token_id=9, epoch_shuffle=False)
    assert first.lines() == [
        "first batch: 4 rows, 20 tokens, 6 trained (30.0%), 1 rows without trained tokens",
        "  shown as token ids; chatmill train shows text if the dataset folder contains the tokenizer",
        *[
            line
            for number in range(3)
            for line in (f"  from    episode {number} (2 trained tokens)", "  after   1 2", "  trains  3 4")
        ],
    ]


def test_answers_without_an_end_token_cause_a_warning(tmp_path):
    """The loss mask of this dataset does not include the end-of-turn tokens."""
    state = {"eot_token_id": 7}
    data = write_files(tmp_path / "data", [[1, 2, 3, 7]] * 4, [[0, 1, 1, 0]] * 4)
    (data / "tokenizer_state.json").write_text(json.dumps(state))
    first = first_of(data, text=False)
    assert first.warnings == [
        "no answer in the first batch ends with an end token (7): the model will not learn to stop"
    ]
    ended = write_files(tmp_path / "ended", [[1, 2, 3, 7]] * 4, [[0, 1, 1, 1]] + [[0, 1, 1, 0]] * 3)
    (ended / "tokenizer_state.json").write_text(json.dumps(state))
    assert first_of(ended, text=False).warnings == []


def test_answers_cut_at_the_end_of_their_row_cause_a_warning(dataset):
    lines = [talk("Hi", "Hello there, how are you?"), *[talk("Hi", "Yes")] * 3]
    data = dataset(*lines, flags=["--max-tokens", "40", "--fit", "windows"])
    # Other batches may have complete answers.
    assert first_of(data, batch_size=1, block_size=39, epoch_shuffle=False).warnings[0].startswith("1 of 1 answers")
    first = first_of(data, batch_size=5, block_size=39)
    assert first.warnings == [
        "1 of 5 answers in the first batch are truncated at the end of their row and have no end token; "
        "prepare the data with a larger --max-tokens, or with --require-terminators"
    ]


def test_a_small_share_of_trained_tokens_causes_a_warning(dataset):
    data = dataset(*[talk("x" * 900, "Yes")] * 4)
    first = first_of(data, block_size=1000)
    assert first.warnings == [
        f"the loss mask includes only {16 / first.tokens:.2%} of the tokens in the first batch; chatmill stats {data} "
        "shows the share of trained tokens in the dataset"
    ]


def test_a_new_run_shows_answers_and_a_resumed_run_only_counts(tmp_path, capsys):
    data = prepare(tmp_path, "sums")
    open_text = lambda path: dataset_text(path).text  # noqa: E731

    def run(resume: str | None = None, **changes: Any) -> list[str]:
        train_model(
            config(**changes), model_name="run", dataset_dir=data, out_dir=tmp_path, resume=resume, open_text=open_text
        )
        return capsys.readouterr().err.splitlines()

    began = run(max_iters=2)
    stored = json.loads((tmp_path / "run/first_batch.json").read_text())
    assert began[:10] == first_of(data).lines()
    assert [stored[name] for name in ("step", "rows", "as_text", "warnings")] == [1, 4, True, []]
    assert [f"  trains  {each['answer']}" for each in stored["answers"]] == began[3:10:3]
    resumed = run(max_iters=4, resume="auto")
    lines = [line.split(":")[0] for line in resumed if not line.startswith(("resuming from", "step"))]
    assert lines == ["max_iters was 2, but is now 4", "first batch"]
    assert json.loads((tmp_path / "run/first_batch.json").read_text()) == stored


def test_a_first_batch_without_trained_tokens_is_explained(tmp_path, capsys):
    data = write_files(tmp_path / "data", [[1, 2, 3]] * 8, [[0, 0, 0]] * 4 + [[0, 0, 1]] * 4)
    settings = config(max_iters=2, epoch_shuffle=False, pad_token_id=0)
    assert train_model(settings, model_name="run", dataset_dir=data, out_dir=tmp_path).trained == 4
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [
        "first batch: 4 rows, 12 tokens, 0 trained (0.0%), 4 rows without trained tokens",
        "warning: the first batch has no trained tokens: the loss mask does not mark any token in these rows; "
        f"see chatmill stats {data}, and remove these rows; the run stops after 20 steps without trained tokens",
    ]
    quiet = trained(data, tmp_path, name="quiet", max_iters=2, epoch_shuffle=False, pad_token_id=0)
    assert (quiet.trained, capsys.readouterr().err) == (4, "")
