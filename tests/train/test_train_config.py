from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
from train_fixtures import SMALL, config

from chatmill.config import from_environment, from_flags
from chatmill.errors import UsageError
from chatmill.train.config import TrainConfig, layered
from chatmill.train.step import LRSchedule

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.json"))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_shipped_config_is_valid_and_uses_the_loss_mask(name):
    found = TrainConfig.from_file(ROOT / name)
    assert found.use_loss_mask
    assert found.block_size <= found.max_positions


def test_the_documented_config_inherits_and_changes_a_seed(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    mine = tmp_path / "my_experiment.json"
    mine.write_text('{"inherits": "configs/sft1/150M.json", "epoch_seed": 42, "batch_sampling_mode": "epoch"}')
    base = json.loads((ROOT / "configs/sft1/150M.json").read_text())
    found = TrainConfig.from_file(mine).to_json()
    assert {name: found[name] for name in base} == {**base, "epoch_seed": 42}


def test_all_problems_are_reported_together():
    wrong = {"learning_rat": 1, "grad_clip": -1, "parallel": "tp", "beta2": 1, "lora": {"rank": 3}, "n_layer": 1.5}
    with pytest.raises(UsageError) as error:
        TrainConfig.from_mapping(wrong, place="c.json")
    said = str(error.value)
    assert "\n" not in said
    for part in (
        'c.json: unknown key "learning_rat"',
        "grad_clip is -1; expected a number of at least 0",
        'parallel is "tp"; expected "ddp" or "fsdp"',
        "beta2 is 1; expected a number of at least 0 and below 1",
        'lora is {"rank": 3}, which has the unknown key "rank"; expected an object with r (an integer of at least 1), ',
        "n_layer is 1.5; expected an integer of at least 1",
        "(known: activation_checkpointing,",
    ):
        assert part in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"n_embd": 10, "n_head": 4}, "n_embd 10 is not a multiple of n_head 4"),
        ({"warmup_iters": 3, "warmup_pct": 0.5}, "warmup_iters is 3 and warmup_pct is 0.5; set only one of these keys"),
        ({"post_training": True, "use_loss_mask": False}, "post_training is true and use_loss_mask is false"),
        ({"lora": {"r": 4}}, "lora is set and init_from_model is not"),
        ({"batch_size": 6, "gradient_accumulation_steps": 4}, "batch_size 6 cannot be split into 4 equal parts"),
        ({"learning_rate": 10**400}, "learning_rate is 1000"),
        ({"learning_rate": float("inf")}, "learning_rate is Infinity; expected a number of at least 0"),
        ({"learning_rate": float("nan")}, "learning_rate is NaN; expected a number of at least 0"),
        ({"warmup_iters": None, "warmup_pct": 3}, "warmup_pct is 3; expected a fraction from 0 to 1, such as 0.03"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(changes, said):
    with pytest.raises(UsageError, match=r"^the config: ") as error:
        config(**changes)
    assert said in str(error.value)


@pytest.mark.parametrize(
    "lora",
    [
        {"r": "x"},
        {"r": 2.5},
        {"r": 0},
        {"alpha": "x"},
        {"alpha": None},
        {"dropout": "a"},
        {"dropout": 2},
        {"targets": 5},
        {"targets": [5]},
        {"targets": []},
    ],
)
def test_values_of_adapters_are_checked(lora):
    with pytest.raises(UsageError) as error:
        config(lora=lora, init_from_model="model")
    assert str(error.value) == (
        f"the config: lora is {json.dumps(lora)}, in which {next(iter(lora))} has a wrong value; expected an object "
        "with r (an integer of at least 1), alpha (a number of at least 0), dropout (a fraction from 0 to 1, such as "
        "0.03 for 3 percent), targets (a string or a list of strings), "
        """such as '{"r": 16}', or null"""
    )
    right = {"r": 2, "alpha": 4, "dropout": 0, "targets": ["q_proj"]}
    assert config(lora=right, init_from_model="model").lora == right


@pytest.mark.parametrize(
    ("key", "text", "fault"),
    [
        ("lora", "{r:16}", 'lora is "{r:16}", which is not valid JSON; expected an object with r '),
        ("lora", '{"rank": 16}', 'lora is {"rank": 16}, which has the unknown key "rank"; expected an object with r '),
        (
            "lora",
            '{"r": 4, "alpha": -1}',
            'lora is {"r": 4, "alpha": -1}, in which alpha has a wrong value; expected an object',
        ),
        ("mix_sft", "{a: 1}", 'mix_sft is "{a: 1}", which is not valid JSON; expected '),
        ("batch_size", "x", 'batch_size is "x"; expected an integer of at least 1'),
    ],
)
def test_a_wrong_flag_value_is_reported_with_the_mistake_in_it(key, text, fault):
    with pytest.raises(UsageError) as error:
        from_flags(TrainConfig, {key: text})
    assert str(error.value).startswith(f"the flags: {fault}")
    assert "\n" not in str(error.value)
    assert key != "lora" or """such as '{"r": 16}'""" in str(error.value)


def test_post_training_uses_the_mask_and_all_of_one_pass():
    plain = {name: value for name, value in SMALL.items() if name != "use_loss_mask"}
    found = TrainConfig.from_mapping({**plain, "post_training": True})
    assert (found.use_loss_mask, found.epoch_drop_last) == (True, False)
    kept = TrainConfig.from_mapping({**plain, "post_training": True, "epoch_drop_last": True})
    assert kept.epoch_drop_last
    assert TrainConfig.from_mapping(plain).use_loss_mask is False


def test_the_layer_that_turns_post_training_on_also_sets_its_keys():
    file = {"use_loss_mask": False, "epoch_drop_last": True}
    on = {"use_loss_mask": True, "epoch_drop_last": False, "post_training": True}
    assert layered(file, {"post_training": True}) == on
    assert layered(file, {"post_training": True}, {"epoch_drop_last": True}) == {**on, "epoch_drop_last": True}
    assert layered(file, {"post_training": True, "epoch_drop_last": True}) == {**on, "epoch_drop_last": True}
    # A later config layer that repeats `post_training: true` does not reset the keys in POST_TRAINING.
    assert layered({**on, "epoch_drop_last": True}, {"post_training": True}) == {**on, "epoch_drop_last": True}
    assert layered(file, {"post_training": True}, {"post_training": False}) == {**on, "post_training": False}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_inherits_a_shipped_one_may_turn_post_training_on(tmp_path, monkeypatch, name):
    monkeypatch.chdir(ROOT)
    (tmp_path / "mine.json").write_text(json.dumps({"inherits": name, "post_training": True}))
    found = TrainConfig.from_file(tmp_path / "mine.json")
    assert (found.use_loss_mask, found.epoch_drop_last) == (True, False)


@pytest.mark.parametrize(
    ("environment", "values"),
    [
        ({}, {}),
        ({"POST_TRAINING": "", "WARMUP_PCT": ""}, {}),
        ({"POST_TRAINING": "1", "WARMUP_PCT": "0.05"}, {"post_training": True, "warmup_pct": 0.05}),
        ({"POST_TRAINING": "0", "HOME": "/"}, {"post_training": False}),
    ],
)
def test_the_documented_environment_variables_set_keys(environment, values):
    assert from_environment(TrainConfig, environment) == values


def test_invalid_environment_variables_are_reported_together():
    with pytest.raises(
        UsageError, match=r"POST_TRAINING is yes; expected 0 or 1; WARMUP_PCT is 5%; expected a fraction"
    ):
        from_environment(TrainConfig, {"POST_TRAINING": "yes", "WARMUP_PCT": "5%"})


def test_later_layers_win_and_the_two_warmup_keys_replace_each_other():
    file, variables, flags = {"warmup_iters": 10, "seed": 1}, {"warmup_pct": 0.1}, {"seed": 2}
    assert layered(file, variables, flags) == {"warmup_pct": 0.1, "seed": 2}
    assert layered(variables, file) == file
    assert layered({"warmup_pct": 0.1}, {"warmup_iters": None}) == {"warmup_pct": 0.1, "warmup_iters": None}


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"warmup_iters": 7}, 7),
        ({"warmup_iters": 0}, 0),
        ({"warmup_iters": None, "warmup_pct": 0.1}, 101),
        ({"warmup_iters": None, "warmup_pct": 1}, 1001),
        ({"warmup_iters": None, "warmup_pct": 0}, 0),
        ({"warmup_iters": None}, 31),
    ],
)
def test_warmup_is_a_number_of_steps_or_a_share_of_the_run(changes, steps):
    assert config(**changes).warmup_steps(1001) == steps


def rates(shape: str, warmup: int, total: int) -> list[float]:
    schedule = LRSchedule(peak=1.0, floor=0.2, warmup=warmup, total=total, shape=shape)
    return [round(schedule(step), 4) for step in range(total + 2)]


def test_the_learning_rate_warms_up_and_decays():
    assert rates("linear", 2, 6) == [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    assert rates("cosine", 0, 4) == [1.0, 0.8828, 0.6, 0.3172, 0.2, 0.2]
    assert rates("constant", 4, 4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates("cosine", 3, 2) == [0.3333, 0.6667, 1.0, 1.0]


def test_every_key_is_documented():
    names = ("reference/training.md", "explanation/loading.md", "explanation/models.md")
    pages = "".join((ROOT / "docs" / name).read_text("utf-8") for name in names)
    keys = [each.name for each in fields(TrainConfig)]
    assert [name for name in keys if f"`{name}`" not in pages] == []
