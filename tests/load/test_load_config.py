from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from chatmill.config import integer, key
from chatmill.errors import UsageError
from chatmill.load.config import LoadConfig


def write(path, **values):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))
    return path


def test_the_documented_keys_have_the_documented_defaults():
    documented = {
        "batch_sampling_mode": "epoch",
        "epoch_seed": 1337,
        "epoch_shuffle": True,
        "epoch_drop_last": True,
        "pad_token_id": None,
        "episode_min_tokens": 2,
        "use_loss_mask": False,
    }
    config = LoadConfig().to_json()
    assert {name: config[name] for name in documented} == documented
    assert (config["batch_size"], config["block_size"], config["packing"]) == (8, 512, "none")


def test_the_documented_example_is_a_config(tmp_path):
    example = {
        "batch_size": 8,
        "block_size": 512,
        "use_loss_mask": True,
        "batch_sampling_mode": "epoch",
        "epoch_seed": 1337,
        "epoch_shuffle": True,
        "epoch_drop_last": True,
        "pad_token_id": None,
        "episode_min_tokens": 2,
    }
    assert LoadConfig.from_file(write(tmp_path / "a.json", **example)) == LoadConfig(use_loss_mask=True)


def test_all_faults_are_reported_in_one_error():
    with pytest.raises(UsageError) as caught:
        LoadConfig.from_mapping({"batch_size": 0, "epoch_sed": 1, "use_loss_mask": "yes", "mix_by": "weight"})
    assert str(caught.value).startswith(
        'the config: unknown key "epoch_sed"; batch_size is 0; expected an integer of at least 1; '
        'use_loss_mask is "yes"; expected true or false; '
        'mix_by is "weight"; expected "rows" or "tokens" or "trained_tokens" (known: batch_sampling_mode, batch_size, '
    )


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"batch_size": True}, "batch_size is true; expected an integer of at least 1"),
        ({"batch_size": 8.0}, "batch_size is 8.0; expected an integer of at least 1"),
        ({"epoch_seed": 2**32}, "epoch_seed is 4294967296; expected an integer from 0 to 4294967295"),
        ({"pad_token_id": -1}, "pad_token_id is -1; expected an integer of at least 0, or null"),
        ({"packing": "best"}, 'packing is "best"; expected "none" or "bins"'),
        ({"batch_sampling_mode": None}, 'is null; expected "epoch" or "feistel" or "random"'),
        (
            {"batch_size": 8, "gradient_accumulation_steps": 3},
            "8 cannot be split into 3 equal parts; expected a multiple",
        ),
        ({"packing": "bins", "episode_min_tokens": 0}, "packing=bins requires at least 1"),
        (
            {"mix_sft": {"a": -1, "b": 0}},
            "the weight of a is -1; expected a number above 0; mix_sft: the weight of b is 0",
        ),
        ({"mix_sft": {"a": 10**400}}, "mix_sft: the weight of a is 1000"),
        ({"mix_sft": {}}, "mix_sft is empty"),
        ({"mix_sft": ["a"]}, "an object that maps sources to weights, or null"),
    ],
)
def test_an_invalid_value_is_refused_with_the_expected_one(values, what):
    with pytest.raises(UsageError) as caught:
        LoadConfig.from_mapping(values)
    assert what in str(caught.value)
    with pytest.raises(UsageError):
        LoadConfig(**values)


def test_a_file_inherits_from_the_working_directory_before_its_own_folder(tmp_path, monkeypatch):
    write(tmp_path / "configs" / "base.json", epoch_seed=1, batch_size=4)
    write(tmp_path / "configs" / "sft" / "configs" / "base.json", epoch_seed=2)
    write(tmp_path / "configs" / "sft" / "near.json", epoch_seed=3)
    child = write(tmp_path / "configs" / "sft" / "mine.json", inherits="configs/base.json", block_size=64)
    monkeypatch.chdir(tmp_path)
    assert LoadConfig.from_file(child) == LoadConfig(epoch_seed=1, batch_size=4, block_size=64)
    write(child, inherits="near.json")
    assert LoadConfig.from_file("configs/sft/mine.json") == LoadConfig(epoch_seed=3)
    monkeypatch.chdir(tmp_path / "configs" / "sft")
    write(child, inherits="configs/base.json", epoch_seed=9)
    assert LoadConfig.from_file("mine.json", batch_size=2) == LoadConfig(epoch_seed=9, batch_size=2)


def test_the_last_file_of_an_inheritance_chain_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.json", epoch_seed=1, batch_size=1, block_size=1)
    write(tmp_path / "b.json", inherits="a.json", batch_size=2, block_size=2)
    write(tmp_path / "c.json", inherits="b.json", block_size=3)
    assert LoadConfig.from_file("c.json") == LoadConfig(epoch_seed=1, batch_size=2, block_size=3)


def test_circular_inheritance_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.json", inherits="b.json")
    write(tmp_path / "b.json", inherits="a.json")
    with pytest.raises(UsageError, match=r"a.json: inherits from itself \(a.json -> b.json -> a.json\)"):
        LoadConfig.from_file("a.json")


def test_the_error_for_a_missing_inherited_file_lists_both_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "sub" / "a.json", inherits="base.json")
    with pytest.raises(UsageError, match=r"not found; expected base.json or sub/base.json"):
        LoadConfig.from_file("sub/a.json")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[1]", "is not a JSON object"),
        ("{", "expected a JSON object"),
        ('{"batch_size": 1, "batch_size": 2}', '"batch_size" is given twice'),
        ('{"inherits": 3}', '"inherits" is 3; expected the name of a file'),
        ('{"model": 3}', 'a.json: unknown key "model"'),
        ('{"pad_token_id": NaN}', "pad_token_id is NaN"),
    ],
)
def test_a_file_that_is_not_a_config_is_refused_by_name(tmp_path, text, what):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        LoadConfig.from_file(path)
    assert what in str(caught.value)
    assert "a.json" in str(caught.value)


def test_a_file_that_is_a_link_to_itself_is_refused(tmp_path):
    (tmp_path / "a.json").symlink_to("a.json")
    with pytest.raises(UsageError, match=r"a.json: cannot be read \(Too many levels of symbolic links\)"):
        LoadConfig.from_file(tmp_path / "a.json")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"none.json: cannot be read"):
        LoadConfig.from_file(tmp_path / "none.json")


def test_keys_of_a_subclass_are_checked_with_the_others(tmp_path):
    @dataclass(frozen=True, kw_only=True)
    class WithLayers(LoadConfig):
        n_layer: int = key(2, "layers", integer(1))

        def conflicts(self) -> Iterator[str]:
            yield from super().conflicts()
            if self.n_layer > self.block_size:
                yield "more layers than tokens"

    with pytest.raises(UsageError, match=r"batch_size is 0; .*; n_layer is 0; expected"):
        WithLayers(n_layer=0, batch_size=0)
    with pytest.raises(UsageError, match="more layers than tokens"):
        WithLayers(n_layer=3, block_size=2)
    assert WithLayers.from_file(write(tmp_path / "a.json", n_layer=3)).n_layer == 3
    with pytest.raises(UsageError, match='unknown key "n_layer"'):
        LoadConfig.from_file(tmp_path / "a.json")


def test_the_order_part_contains_only_keys_that_change_the_order():
    base = LoadConfig().order_part()
    assert LoadConfig(use_loss_mask=True, block_size=9, pad_token_id=4).order_part() == base
    for changes in ({"epoch_seed": 1}, {"batch_size": 4}, {"packing": "bins"}, {"episode_min_tokens": 3}):
        assert LoadConfig(**changes).order_part() != base
    packed = LoadConfig(packing="bins").order_part()
    assert LoadConfig(packing="bins", block_size=9).order_part() != packed


def test_the_loading_page_documents_every_key_with_its_default():
    page = (Path(__file__).resolve().parents[2] / "docs" / "explanation" / "loading.md").read_text("utf-8")
    told = dict(re.findall(r"^\| `(\w+)` \| `?([^|`]+)`? \|", page, re.MULTILINE))
    defaults = {name: json.dumps(value) for name, value in LoadConfig().to_json().items()}
    assert {name: told.get(name, "").strip() for name in defaults} == defaults
