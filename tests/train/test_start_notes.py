from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from train_fixtures import SMALL, config, prepare, run_chatmill, write_files

from chatmill.cli.main import main as chatmill
from chatmill.config import read_values
from chatmill.load.loader import EpisodeLoader
from chatmill.store.layout import MASK
from chatmill.train.command import main
from chatmill.train.run_dir import read_metrics
from chatmill.train.start_notes import count_non_answers

ROOT = Path(__file__).resolve().parents[2]


def counted(loader: EpisodeLoader) -> tuple[int, int]:
    def trained(**changes: object) -> int:
        wide = config(batch_size=1, block_size=4096, mix_sft=None, **changes)
        total = 0
        for source in loader.sources:
            epoch = EpisodeLoader(source.path, wide, epochs=1, tensors=False)
            total += sum(int(np.count_nonzero(batch.y != -100)) for batch in epoch)
        return total

    everything = trained(use_loss_mask=False)
    return everything - trained(use_loss_mask=True), everything


@pytest.fixture(scope="module")
def folders(tmp_path_factory, sums_data):
    root = tmp_path_factory.mktemp("kinds")
    (root / "primer.jsonl").write_bytes((ROOT / "data/primer.jsonl").read_bytes())
    run_chatmill("build-sft-primer", "--primer-jsonl", str(root / "primer.jsonl"), "--out-dir", str(root / "caches"))
    prepare(root / "caches", "sums", "--format", "primer")
    packed = prepare(root, "packed", "--pack", "64")
    episodes = [[1, 2, 3, 4, 5], [6, 7, 8]]
    write_files(root / "foreign", episodes, [[0, 0, 1, 1, 0], [0, 1, 0]])
    return {
        "dataset": sums_data,
        "packed": packed,
        "cache": root / "caches/primer",
        "mix": root / "caches",
        "foreign": root / "foreign",
    }


@pytest.mark.parametrize("kind", ["dataset", "packed", "cache", "mix", "foreign"])
def test_the_count_equals_that_of_an_epochs_batches(folders, kind):
    mix = {"primer": 1, "sums": 2} if kind == "mix" else None
    pad = 9 if kind == "foreign" else None
    loader = EpisodeLoader(folders[kind], config(use_loss_mask=False, mix_sft=mix, pad_token_id=pad))
    count = count_non_answers(loader)
    assert tuple(count) == (counted(loader) if kind != "foreign" else (3, 6))
    assert count.non_answers > 0


def test_counts_come_from_metadata_without_reading_masks(folders, monkeypatch):
    loaders = [EpisodeLoader(folders[kind], config(use_loss_mask=False)) for kind in ("dataset", "cache")]
    # Reading a mask would now fail.
    monkeypatch.setattr("chatmill.load.source.reading", None)
    assert all(count_non_answers(loader) is not None for loader in loaders)


def test_no_note_is_printed_if_all_trained_tokens_are_answers(folders, tmp_path):
    assert count_non_answers(EpisodeLoader(folders["dataset"], config(use_loss_mask=True))) is None
    answers = write_files(tmp_path / "answers", [[1, 2, 3]], [[1, 1, 1]])
    assert count_non_answers(EpisodeLoader(answers, config(use_loss_mask=False, pad_token_id=0))) is None
    (answers / "train/shard_00000" / MASK).unlink()
    assert count_non_answers(EpisodeLoader(answers, config(use_loss_mask=False, pad_token_id=0))) is None


@pytest.mark.parametrize("command", ["train.py", "chatmill train"])
def test_the_note_is_printed_first_and_logged_in_json_and_metrics(folders, tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    # This file causes another note, which must be printed after the note about use_loss_mask.
    Path("chatmill.toml").write_text("training.seed = 3\n")
    Path("config.json").write_text(json.dumps({**SMALL, "max_iters": 2, "use_loss_mask": False}))
    loader = EpisodeLoader(folders["dataset"], config(use_loss_mask=False))
    others, everything = counted(loader)

    def train(*flags: str) -> tuple[str, str]:
        args = ["--config_file", "config.json", "--dataset_dir", str(folders["dataset"]), "--json", *flags]
        if command == "train.py":
            main(args)
        else:
            monkeypatch.setattr(sys, "argv", ["chatmill", "train", *args])
            with pytest.raises(SystemExit):
                chatmill()
        out, err = capsys.readouterr()
        return json.loads(out)["non_answer_tokens"], err.splitlines()[0]

    assert train("--model_name", "all") == (
        others,
        f"use_loss_mask is false, so the run also trains on {others:,} tokens in the train split that are not "
        f"part of answers ({others / everything:.0%} of all trained tokens); add --use_loss_mask to train only on "
        "answers",
    )
    first, second = read_metrics(Path("checkpoints/all"))
    assert (first["non_answer_tokens"], first["train_tokens"]) == (others, everything)
    assert "non_answer_tokens" not in second
    count, line = train("--model_name", "answers", "--use_loss_mask")
    assert (count, line) == (0, "chatmill.toml: seed 3, epoch_seed 3")
    assert "non_answer_tokens" not in read_metrics(Path("checkpoints/answers"))[0]


def test_help_shows_the_flag_first(monkeypatch, capsys):
    first_option = re.compile(r"^ +(-\S+)", re.MULTILINE)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert first_option.search(capsys.readouterr().out).group(1) == "--use_loss_mask"
    monkeypatch.setattr(sys, "argv", ["chatmill", "train", "--help"])
    with pytest.raises(SystemExit):
        chatmill()
    options = capsys.readouterr().out.partition("Options:")[2]
    assert first_option.search(options).group(1) == "--use_loss_mask,"


def test_every_shipped_config_sets_use_loss_mask():
    configs = list((ROOT / "configs").rglob("*.json"))
    assert len(configs) >= 6
    assert {path.name for path in configs if read_values(path).get("use_loss_mask") is not True} == set()


def test_the_default_of_use_loss_mask_is_that_of_the_specification():
    assert config().use_loss_mask is True  # set by the test fixtures
    assert type(config())().use_loss_mask is False
