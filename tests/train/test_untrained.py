from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from train_fixtures import config, trained, write_blocks, write_files

from chatmill.errors import DataError
from chatmill.ledger import Ledger
from chatmill.load.loader import EpisodeLoader
from chatmill.store.metadata import write_metadata
from chatmill.store.read import open_dataset
from chatmill.train.checkpoint_files import list_checkpoints
from chatmill.train.run_dir import read_metrics
from chatmill.train.untrained import LIMIT, check_trained, has_trained

TOKENS = [1, 2, 3, 4, 5]
NONE, ALL = [0] * 5, [1] * 5
FLAGS = {"batch_size": 2, "block_size": 4, "pad_token_id": 0, "epoch_shuffle": False, "save_interval": 8}


def noted(dataset: Path, reason: str) -> None:
    metadata = open_dataset(dataset).metadata
    assert metadata is not None
    ledger = Ledger(dict(metadata.ledger.entries))
    ledger.add("noted", reason, rows=1, tokens=3)
    (dataset / "dataset_metadata.json").unlink()
    (dataset / "tokenizer_state.json").unlink()
    write_metadata(dataset, replace(metadata, ledger=ledger), tokenizer_state={})


def mask_of_zeros(folder: Path) -> Path:
    return write_files(folder / "data", [TOKENS] * 4, [NONE] * 4)


def metadata_of_zeros(folder: Path) -> Path:
    return write_blocks(folder / "data", [TOKENS] * 4, [NONE] * 4)


def unfinished(folder: Path) -> Path:
    noted(metadata_of_zeros(folder), "answer_unfinished")
    return folder / "data"


def mix_of_zeros(folder: Path) -> Path:
    for name in ("a", "b"):
        write_blocks(folder / "data" / name, [TOKENS] * 4, [NONE] * 4)
    return folder / "data"


@pytest.mark.parametrize(
    ("make", "changes", "reason"),
    [
        (
            mask_of_zeros,
            {},
            "the loss mask does not mark any of the 20 tokens; write the mask again, or set use_loss_mask to false to "
            "train on all tokens",
        ),
        (
            metadata_of_zeros,
            {},
            "the loss mask does not mark any of the 20 tokens (see chatmill stats {data}); prepare the data again from "
            "conversations with answers",
        ),
        (
            unfinished,
            {"post_training": True, "max_iters": None},
            "the loss mask does not mark any of the 20 tokens, because blocks end before the answers end "
            "(answer_unfinished); prepare the data with larger blocks",
        ),
        (
            mix_of_zeros,
            {"mix_sft": {"a": 1, "b": 1}},
            "no source of the mix has a trained answer; chatmill stats shows the details for each source",
        ),
    ],
)
def test_data_without_trained_tokens_is_refused_before_the_model_is_loaded(
    tmp_path, monkeypatch, make, changes, reason
):
    data = make(tmp_path)
    monkeypatch.setattr("chatmill.train.setup.make_model", None)
    with pytest.raises(DataError) as error:
        trained(data, tmp_path, **FLAGS, **changes)
    assert str(error.value) == f"{data}: the split train has no trained tokens: {reason.format(data=data)}"
    assert not (tmp_path / "run").exists()


LONG = [*TOKENS, *TOKENS]
CAUSES = {
    "cut off": (
        [LONG] * 80,
        [[1, 1, 1, *[0] * 7]] * 80,
        {},
        "2 of 2 conversations are longer than block_size 4 and lose their answers, because only their last tokens are "
        "kept; raise block_size, or prepare the data with --max-tokens 5",
    ),
    "first tokens": (
        [TOKENS] * 80,
        [[1, 0, 0, 0, 0]] * 80,
        {},
        "the loss mask marks only the first tokens of conversations, which cannot be predicted; write the mask again",
    ),
    "elsewhere": (
        [TOKENS] * 80,
        [NONE] * 78 + [ALL] * 2,
        {},
        "the loss mask does not mark any token in these rows; see chatmill stats {data}, and remove these rows",
    ),
    "single tokens": (
        [[1]] * 80,
        [[1]] * 80,
        {"use_loss_mask": False, "episode_min_tokens": 1},
        "these rows contain only padding or single tokens, which cannot be predicted; raise episode_min_tokens",
    ),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_run_stops_after_steps_without_trained_tokens_and_says_why(tmp_path, capsys, cause):
    episodes, masks, changes, reason = CAUSES[cause]
    data = write_files(tmp_path / "data", episodes, masks)
    reason = reason.format(data=data)
    with pytest.raises(DataError) as error:
        trained(data, tmp_path, max_iters=40, **FLAGS, **changes)
    assert str(error.value) == f"steps 1 to {LIMIT} have no trained tokens: {reason}"
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step_00000008", "step_00000016"]
    assert [line["loss"] for line in read_metrics(tmp_path / "run")][:16] == [None] * 16
    with pytest.raises(DataError) as error:
        trained(data, tmp_path, name="short", max_iters=3, **FLAGS, **changes)
    assert str(error.value) == f"no step of the run had trained tokens (3 steps): {reason}"


def test_sources_of_a_mix_without_trained_tokens_are_named(tmp_path):
    write_blocks(tmp_path / "data/good", [TOKENS] * 4, [ALL] * 4)
    write_blocks(tmp_path / "data/empty", [TOKENS] * 80, [NONE] * 80)
    changes = {"mix_sft": {"empty": 1000, "good": 1}, "max_iters": 20}
    notes = check_trained(EpisodeLoader(tmp_path / "data", config(**FLAGS, **changes)))
    assert notes == ["mix_sft: sources without trained tokens in train: empty; remove these sources from the mix"]
    with pytest.raises(DataError) as error:
        trained(tmp_path / "data", tmp_path, **FLAGS, **changes)
    assert str(error.value) == (
        f"steps 1 to {LIMIT} have no trained tokens: the loss mask does not mark any token in these rows "
        "from empty; remove these rows from the mix"
    )


def test_a_few_steps_without_trained_tokens_do_not_stop_the_run(tmp_path):
    masks = [ALL, ALL, *[NONE] * 2 * (LIMIT - 1)] * 2
    data = write_files(tmp_path / "data", [TOKENS] * len(masks), masks)
    result = trained(data, tmp_path, **{**FLAGS, "save_interval": 0}, max_iters=2 * LIMIT)
    assert (result.step, result.trained) == (2 * LIMIT, 16)


@pytest.mark.parametrize("marked", [None, 0, 9, 19])
def test_a_mask_of_another_program_is_read_up_to_the_first_trained_token(tmp_path, monkeypatch, marked):
    mask = np.zeros(20, dtype=int)
    if marked is not None:
        mask[marked] = 1
    data = write_files(tmp_path / "data", [TOKENS] * 4, mask.reshape(4, 5).tolist())
    monkeypatch.setattr("chatmill.train.untrained.SCAN", 3)
    loader = EpisodeLoader(data, config(**FLAGS))
    assert has_trained(loader.sources[0], "train") is (marked is not None)
