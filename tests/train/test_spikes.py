from __future__ import annotations

import contextlib
import io
import json
import math
import re
import shutil
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from train_fixtures import config, ranks, run_chatmill, sums

from chatmill.load.loader import EpisodeLoader
from chatmill.train.command import summary
from chatmill.train.distributed import World
from chatmill.train.loop import TrainResult, train_model
from chatmill.train.run_dir import read_metrics
from chatmill.train.spikes import LEAST, PRINTED, WINDOW, LossSpikes, conversation_name, not_finite, worst
from chatmill.train.step import RowLoss, StepResult

ALONE = World(0, 1, torch.device("cpu"))


class NoSources:
    sources, split = (), "train"


def spikes(losses, *, after=0, lines=None):
    watch = LossSpikes(NoSources(), ALONE, (lines if lines is not None else []).append, after, deque(maxlen=WINDOW), 0)
    marks = {step: watch.follow(step, StepResult(loss, 1.0, None)) for step, loss in enumerate(losses, 1)}
    marks = {step: mark["spike"] for step, mark in marks.items() if mark}
    assert watch.count == len(marks)
    return marks


@given(st.lists(st.floats(1.8, 2.2), min_size=LEAST, max_size=2 * WINDOW), st.floats(5, 50))
def test_a_jump_is_a_spike_and_noise_is_not(calm, loss):
    window = sorted(calm[-WINDOW:])
    median = window[len(window) // 2]
    assert spikes([*calm, loss, *calm]) == {len(calm) + 1: loss - median}


@given(st.lists(st.floats(0, 100), max_size=LEAST - 1), st.floats(0, 1e6))
def test_the_first_steps_are_never_spikes(before, loss):
    assert spikes([*before, loss]) == {}


def test_warmup_steps_and_falling_losses_are_never_spikes():
    assert spikes([*[2.0] * 99, 9.0], after=100) == {}
    assert spikes([*[2.0] * 100, 9.0], after=100) == {101: 7.0}
    assert spikes((10 * 0.99 ** np.arange(600)).tolist()) == {}


@pytest.mark.parametrize(
    ("noise", "most"),
    [("normal", 0), ("lognormal", 12), ("exponential", 8)],
)
def test_noisy_runs_have_few_false_alarms(noise, most):
    rng = np.random.default_rng(0)
    values = {
        "normal": 2 + 0.3 * rng.normal(size=20_000),
        # Batches with only a few short answers have losses with about this much noise.
        "lognormal": 2 * np.exp(0.5 * rng.normal(size=20_000)),
        "exponential": 0.3 + rng.exponential(size=20_000),
    }
    assert len(spikes(values[noise].tolist())) <= most


def test_printed_spikes_are_limited_and_the_last_line_names_the_metrics():
    lines: list[str] = []
    series = [2.0, *[1.9] * 40]
    marks = spikes(series + [loss for _ in range(PRINTED + 5) for loss in (9.0, *[2.0] * 40)], lines=lines)
    assert (len(marks), len(lines)) == (PRINTED + 5, PRINTED)
    assert [line.endswith("further spikes are only marked in metrics.jsonl") for line in lines] == [
        *[False] * (PRINTED - 1),
        True,
    ]


# Conversations.


class State:
    loader, world = NoSources(), ALONE


def rows(*losses: float, weight: float = 10.0) -> list[RowLoss]:
    return [RowLoss(number, -1, loss, weight) for number, loss in enumerate(losses)]


def test_conversations_are_ordered_by_their_contribution_to_the_loss():
    mixed = [
        RowLoss(0, -1, 12.0, 1.0),
        RowLoss(1, -1, 6.0, 100.0),
        RowLoss(2, -1, 2.0, 1000.0),
        RowLoss(3, -1, 3.0, 50),
    ]
    assert worst(mixed, NoSources(), ALONE, usual=2.0) == [
        "episode 1 (loss 6 over 100 tokens)",
        "episode 3 (loss 3 over 50 tokens)",
        "episode 0 (loss 12 over 1 tokens)",
    ]


@pytest.mark.parametrize(
    ("losses", "advice"),
    [
        (
            (2.0, math.nan, 3.0, math.inf),
            "2 of 4 conversations have a non-finite loss: episode 1 (loss nan), episode 3 (loss inf); inspect these "
            "conversations",
        ),
        (
            (math.nan,) * 5,
            "all 5 conversations have a non-finite loss: episode 0 (loss nan), episode 1 (loss nan), "
            "episode 2 (loss nan) and 2 more; lower learning_rate, or inspect the data",
        ),
        (
            (2.0, 3.0),
            "the highest losses are: episode 1 (loss 3 over 10 tokens), episode 0 (loss 2 over 10 tokens); "
            "inspect these conversations, or lower learning_rate",
        ),
        ((), "the step has no trained tokens, so the data is not the cause; lower learning_rate"),
    ],
)
def test_conversations_with_a_loss_that_is_not_finite_are_named(losses, advice):
    assert not_finite(rows(*losses), State()) == advice


# Runs.

SAVED, STEPS, FAULTY = 96, 100, 4 * 97 + 1
"""Step of the checkpoint, number of steps (4 rows each, in file order), and line of the unusual conversation."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spike")
    lines = sums(4 * STEPS).splitlines()
    noise = bytes(np.random.default_rng(0).integers(33, 127, 30).tolist()).decode()
    messages = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": noise}]
    lines[FAULTY - 1] = json.dumps({"messages": messages})
    (folder / "sums.jsonl").write_text("\n".join(lines) + "\n")
    run_chatmill("prepare", str(folder / "sums.jsonl"), "-o", str(folder / "sums"), "--workers", "1")
    return folder / "sums"


def shown(data: Path, out: Path, *, resume: str | None = None) -> tuple[TrainResult, list[str]]:
    settings = config(max_iters=STEPS, epoch_shuffle=False, save_interval=SAVED)
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        result = train_model(settings, model_name="run", dataset_dir=data, out_dir=out, resume=resume)
    return result, [line for line in printed.getvalue().splitlines() if not line.startswith("step ")]


def marked(folder: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["spike"]) for line in read_metrics(folder) if "spike" in line]


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    return shown(data, tmp_path_factory.mktemp("runs"))


def test_a_spike_names_the_conversation(run):
    result, lines = run
    step = -(-FAULTY // 4)
    ((spiked, above),) = marked(result.folder)
    assert (spiked, result.loss_spikes) == (step, 1)
    loss, usual, place, episode = re.fullmatch(
        rf"loss spike at step {step}: (\S+), median (\S+); largest contributions: "
        r"(\S+) \(episode (\d+), loss \S+ over 31 tokens\), .*",
        lines[-1],
    ).groups()
    assert float(loss) - float(usual) == pytest.approx(above, abs=1e-3)
    assert (place, episode) == (f"sums.jsonl:{FAULTY}", str(FAULTY - 1))
    assert f'loss spikes: 1 steps; see "spike" in {result.folder / "metrics.jsonl"}' in summary(result).splitlines()


def test_a_resumed_run_finds_the_same_spikes_on_one_and_two_ranks(run, data, tmp_path):
    result, lines = run
    left_out = shutil.ignore_patterns(f"step_{STEPS:08d}")
    copies = [shutil.copytree(result.folder.parent, tmp_path / name, ignore=left_out) for name in ("one", "two")]
    again, same = shown(data, copies[0], resume="auto")
    assert (again.loss_spikes, marked(again.folder), same[-1]) == (1, marked(result.folder), lines[-1])

    def work(rank: int) -> list[Any]:
        both, said = shown(data, copies[1], resume="auto")
        return [both.loss_spikes, said]

    (count, first), second = ranks(2, work)
    assert (count, second) == (1, [1, []])
    # A resumed run prints the counts of its first batch, summed over all ranks, but prints no answers.
    assert first[1:-1] == same[1:-1]
    assert same[1].startswith("first batch: 4 rows, ")
    assert len(same) == 3
    rounded = [re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.2f}", line[-1]) for line in (first, same)]
    assert rounded[0] == rounded[1]


def test_a_conversation_of_a_mix_has_the_name_of_its_source(data, tmp_path):
    (tmp_path / "root").mkdir()
    for name in ("a", "b"):
        (tmp_path / "root" / name).symlink_to(data)
    loader = EpisodeLoader(tmp_path / "root", config(mix_sft={"a": 1, "b": 1}))
    assert conversation_name(loader, 4 * STEPS + 2, -1, "loss 3") == "b sums.jsonl:3 (episode 2, loss 3)"
    assert conversation_name(loader, 10**6, -1) == "episode 1000000"
