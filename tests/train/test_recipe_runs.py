from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from train_fixtures import config, run_chatmill, sums, trained, weights

from chatmill.audit import verify_log
from chatmill.load.loader import EpisodeLoader
from chatmill.show.order_view import rows_at
from chatmill.store.read import open_dataset
from chatmill.train.loop import train_model
from chatmill.train.run_dir import read_metrics

RECIPE = """
[[source]]
name = "large"
inputs = ["{folder}/large.jsonl"]
val_split = 0.3

[[source]]
name = "a_small"
inputs = ["{folder}/small.jsonl"]
epochs = 3

[[source]]
name = "held"
inputs = ["{folder}/held.jsonl"]
only_val = true
"""
SETTINGS = {
    "max_iters": None,
    "batch_size": 2,
    "eval_interval": 8,
    "eval_samples": 0,
    "lr_schedule": "constant",
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    for seed, (name, count) in enumerate({"large": 30, "small": 6, "held": 8}.items()):
        (folder / f"{name}.jsonl").write_text(sums(count, seed=seed))
    (folder / "recipe.toml").write_text(RECIPE.format(folder=folder))
    run_chatmill("prepare", str(folder / "recipe.toml"), "-o", str(folder / "v1"), "--workers", "1")
    return folder / "v1"


def test_a_run_uses_the_epochs_of_its_recipe_and_is_evaluated_by_source(dataset, tmp_path, capsys):
    settings = config(**SETTINGS, audit_dir=str(tmp_path / "audit"))
    result = train_model(settings, model_name="run", dataset_dir=dataset, out_dir=tmp_path)
    large = open_dataset(dataset).of_source("large")
    assert result.step == (len(large["train"]) + 3 * 6) // 2
    assert "passes over each source: a_small 3, large 1" in capsys.readouterr().err
    line = read_metrics(result.folder)[-1]
    assert {name for name in line if name.startswith("val_loss/")} == {"val_loss/large", "val_loss/held"}
    assert result.val_sources.keys() == {"a_small", "held", "large"}
    [log] = (tmp_path / "audit").glob("*.log")
    assert verify_log(log).fault is None
    # The audit log numbers the episodes of the whole dataset, not those of each source.
    loader = EpisodeLoader(dataset, config(**SETTINGS), tensors=False)
    whole = open_dataset(dataset)["train"]
    for step in range(3):
        batch = loader.get_batch()
        for row, [episode] in enumerate(rows_at(log, step, dataset)["rows"]):
            ids = whole.tokens(episode)[: batch.x.shape[1]]
            np.testing.assert_array_equal(batch.x[row][: len(ids)], ids)
    loader.close()
    trained(dataset, tmp_path, name="two", **{**SETTINGS, "max_iters": 4})
    again = trained(dataset, tmp_path, name="two", resume="auto", **SETTINGS)
    one, two = weights(result.checkpoint), weights(again.checkpoint)
    assert again.step == result.step and all(np.array_equal(one[name], two[name]) for name in one)
