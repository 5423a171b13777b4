from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatmill.cli.build import cache_config
from chatmill.cli.main import main as chatmill
from chatmill.cli.tokenizer_hash import tokenizer_sha256
from chatmill.errors import DataError, UsageError
from chatmill.load.mix import MIX_SFT
from chatmill.settings import KEYS
from chatmill.store.primer_cache import open_cache
from chatmill.train import command
from chatmill.train.config import TrainConfig
from chatmill.train.project import compare_tokenizer

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--n_layer", "1", "--n_embd", "16", "--n_head", "2", "--device", "cpu", "--eval_samples", "0"]
EVERYTHING = """
[tokenizer]
path = "bytes"
[training]
seed = 7
[model]
T = 100
[data]
caches.sft_token_cache = "caches"
mix_sft = {primer = 1, dolly15k = 3}
"""
in_this_folder = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/primer.jsonl").write_bytes((ROOT / "data/primer.jsonl").read_bytes())
    Path("dolly.jsonl").write_text('{"instruction": "i", "response": "r"}\n' * 40)
    return tmp_path


@pytest.fixture
def run(place, monkeypatch, capsys):
    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["chatmill", *args])
        with pytest.raises(SystemExit) as ended:
            chatmill()
        code = ended.value.code
        return (code if isinstance(code, int) else 0), *capsys.readouterr()

    return run


@pytest.fixture
def runs(place, monkeypatch):
    started = []
    monkeypatch.setattr(
        command, "train_model", lambda config, **more: started.append(SimpleNamespace(config=config, **more))
    )
    return started


def config_of(runs: list[SimpleNamespace], *args: str) -> TrainConfig:
    flags = ["--model_name", "mine", *args]
    given = {flags[at].removeprefix("--"): flags[at + 1] for at in range(0, len(flags), 2)}
    command.run(given)
    return runs.pop().config


def test_one_settings_file_configures_building_and_training(run):
    Path("chatmill.toml").write_text(EVERYTHING)
    assert run("build-sft-primer")[0] == run("build-sft-dolly15k", "--input", "dolly.jsonl")[0] == 0
    for source in ("primer", "dolly15k"):
        meta = open_cache(f"caches/{source}").meta
        assert (meta.seed, meta.T_max, meta.tokenizer_sha256) == (7, 100, tokenizer_sha256("bytes"))
    code, _, err = run("train", "--model_name", "mine", *SMALL, "--use_loss_mask", "--max_iters", "4")
    assert code == 0, err
    stored = json.loads(Path("checkpoints/mine/config.json").read_text())
    taken = {name: stored[name] for name in ("seed", "epoch_seed", "block_size", "dataset_dir", "mix_sft")}
    mix = {"primer": 1, "dolly15k": 3}
    assert taken == {"seed": 7, "epoch_seed": 7, "block_size": 100, "dataset_dir": "caches", "mix_sft": mix}
    assert err.splitlines()[0] == (
        'chatmill.toml: seed 7, epoch_seed 7, block_size 100, dataset_dir "caches", '
        'mix_sft {"primer": 1, "dolly15k": 3}'
    )
    Path("chatmill.toml").write_text(EVERYTHING.replace("= 7", "= 8").replace("100", "60"))
    code, _, err = run("train", "--model_name", "mine", "--resume", "auto", "--max_iters", "5")
    assert (code, "chatmill.toml" in err) == (0, False), err
    assert json.loads(Path("checkpoints/mine/config.json").read_text())["block_size"] == 100


def test_building_and_training_have_their_documented_defaults_without_the_file(run, runs):
    assert run("build-sft-primer")[0] == 0
    config = config_of(runs)
    assert (config.dataset_dir, config.mix_sft, config.seed, config.block_size) == ("data/cache/sft", None, 1337, 512)
    assert MIX_SFT == {"primer": 0.10, "oasst1": 0.70, "dolly15k": 0.20}


def test_a_run_without_data_says_where_to_set_it(runs):
    with pytest.raises(UsageError) as error:
        config_of(runs)
    assert str(error.value) == (
        "dataset_dir is missing; pass --dataset_dir, set data.caches.sft_token_cache in chatmill.toml, "
        "or build a cache in data/cache/sft"
    )


def test_a_long_context_raises_max_positions_of_a_new_model(runs):
    Path("chatmill.toml").write_text("model.T = 9000\n")
    config = config_of(runs, "--dataset_dir", "x")
    assert (config.block_size, config.max_positions) == (9000, 9000)
    Path("chatmill.toml").write_text("model.T = 90\n")
    assert config_of(runs, "--dataset_dir", "x").max_positions == TrainConfig().max_positions


def test_mix_sft_applies_only_to_folders_of_caches(run, runs):
    Path("chatmill.toml").write_text(EVERYTHING)
    assert run("build-sft-primer")[0] == 0
    assert config_of(runs, "--dataset_dir", "caches/primer").mix_sft is None
    assert config_of(runs, "--dataset_dir", "caches").mix_sft == {"primer": 1, "dolly15k": 3}


def test_building_a_cache_that_the_mix_leaves_out_prints_a_note(run):
    Path("chatmill.toml").write_text("data.mix_sft = {oasst1 = 1}\n")
    code, _, err = run("build-sft-primer")
    assert (code, err) == (0, "chatmill.toml: data.mix_sft names oasst1; training will not use primer\n")


# Who wins.

LAYERS = ("chatmill.toml", "config file", "flag")
VALUES = st.fixed_dictionaries(
    {},
    optional={
        "training.seed": st.integers(0, 2**31),
        "model.T": st.integers(2, 4000),
        "data.caches.sft_token_cache": st.sampled_from(["one", "two", "three"]),
        "data.mix_sft": st.dictionaries(st.sampled_from(["a", "b"]), st.integers(1, 9), min_size=1),
    },
)
AS_KEYS = {
    "training.seed": ("seed", "epoch_seed"),
    "model.T": ("block_size",),
    "data.caches.sft_token_cache": ("dataset_dir",),
    "data.mix_sft": ("mix_sft",),
}
AS_BUILD_FLAGS = {"training.seed": "seed", "model.T": "t_max", "data.caches.sft_token_cache": "out_dir"}


def toml(values: dict[str, object]) -> str:
    def written(value: object) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{name} = {each}" for name, each in value.items()) + "}"
        return json.dumps(value)

    return "".join(f"{name} = {written(value)}\n" for name, value in values.items())


@in_this_folder
@given(st.tuples(VALUES, VALUES, VALUES))
def test_the_highest_layer_that_sets_a_key_wins(runs, layers):
    (stated, in_file, in_flags) = layers
    Path("chatmill.toml").write_text(toml(stated))
    of_file = {key: value for name, value in in_file.items() for key in AS_KEYS[name]}
    of_flags = {key: value for name, value in in_flags.items() for key in AS_KEYS[name]}
    Path("config.json").write_text(json.dumps({"n_layer": 1, **of_file}))
    flags = [part for key, value in of_flags.items() for part in (f"--{key}", json.dumps(value).strip('"'))]
    if not any("dataset_dir" in keys for keys in (of_file, of_flags)) and "data.caches.sft_token_cache" not in stated:
        flags += ["--dataset_dir", "somewhere"]
    config = config_of(runs, "--config_file", "config.json", *flags)
    for name, keys in AS_KEYS.items():
        for key in keys:
            default = "somewhere" if key == "dataset_dir" else getattr(TrainConfig(), key)
            winner = [default, *(each[name] for each in layers if name in each)][-1]
            assert getattr(config, key) == winner, (key, layers)


@in_this_folder
@given(
    st.tuples(VALUES, VALUES), st.sampled_from(["bytes", "t.json", None]), st.sampled_from(["bytes", "u.json", None])
)
def test_building_uses_the_same_layers(place, layers, tokenizer, flag):
    stated, in_flags = layers
    named = {} if tokenizer is None else {"tokenizer.path": tokenizer}
    Path("chatmill.toml").write_text(toml({**stated, **named}))
    flags = {key: in_flags.get(name) for name, key in AS_BUILD_FLAGS.items()}
    config = cache_config("primer", {**flags, "tokenizer": flag}, input_flag="--primer-jsonl")
    defaults = {"seed": 42, "t_max": 1024, "out_dir": "data/cache/sft"}
    for name, key in AS_BUILD_FLAGS.items():
        assert getattr(config, key) == [defaults[key], *(each[name] for each in layers if name in each)][-1]
    assert config.tokenizer == next(each for each in (flag, tokenizer, "bytes") if each is not None)


# Invalid files.


@in_this_folder
@given(st.data())
def test_an_unknown_key_is_refused_by_building_and_training(runs, data):
    tables = sorted({name.rpartition(".")[0] for name in KEYS} | {"", "data", "data.caches.sub", "other.table"})
    where = data.draw(st.sampled_from(tables))
    name = data.draw(st.sampled_from(["sed", "T_max", "x y", "a.b", "seed.", "ä", "Seed"]))
    quoted = name if name.isascii() and name.replace("_", "").isalnum() else f"'{name}'"
    key = f"{where}.{quoted}" if where else quoted
    value = data.draw(st.sampled_from(["1", '"x"', "[]", "{}", "[[1]]", "2026-01-01"]))
    lines = [f"{key} = {value}", "training.seed = 5", 'data.primer.path = "p"']
    random.Random(data.draw(st.integers(0, 5))).shuffle(lines)
    Path("chatmill.toml").write_text("\n".join(lines))
    refusals = []
    for refused in (
        lambda: config_of(runs, "--dataset_dir", "x"),
        lambda: cache_config("primer", {}, input_flag="--primer-jsonl"),
    ):
        with pytest.raises(UsageError) as error:
            refused()
        refusals.append(str(error.value))
    known = ", ".join(sorted(KEYS))
    assert refusals == [f'chatmill.toml: unknown key "{key}" (known: {known})'] * 2


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("training.seed = -1", "training.seed is -1; expected an integer from 0 to 2147483648"),
        ("training.seed = 1.5", "training.seed is 1.5; expected an integer from 0 to 2147483648"),
        ("model.T = 1", "model.T is 1; expected an integer from 2 to 2147483648"),
        ("data.mix_sft = {}", "data.mix_sft is empty; expected at least one source with its weight"),
        ("data.mix_sft = 3", "data.mix_sft is 3; expected an object that maps sources to weights"),
        ("data.mix_sft.primer = 0", "data.mix_sft: the weight of primer is 0; expected a number above 0"),
        ("data.mix_sft.primer = nan", "data.mix_sft: the weight of primer is nan; expected a finite number above 0"),
        ('tokenizer.path = ""', "tokenizer.path is ''; expected the name of a tokenizer"),
        ('"training.seed" = 1', "unknown key \"'training.seed'\" (known: "),
        ("training = [{seed = 1}]", 'unknown key "training" (known: '),
    ],
)
def test_an_invalid_value_is_the_same_one_line_error_in_both(run, line, fault):
    Path("chatmill.toml").write_text(line)
    for args in (["build-sft-primer"], ["train", "--model_name", "x", "--dataset_dir", "y"]):
        code, out, err = run(*args)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"chatmill: chatmill.toml: {fault}")
    assert sorted(path.name for path in Path().iterdir()) == ["chatmill.toml", "data", "dolly.jsonl"]


@pytest.mark.parametrize(
    "content", ["model.T = " + "9" * 5000, "model.T = 0x" + "f" * 5000, "a." * 5000 + "b = 1", "x = " + "[" * 3000]
)
def test_invalid_toml_is_a_one_line_error(run, content):
    Path("chatmill.toml").write_text(content)
    for args in (["build-sft-primer"], ["train", "--model_name", "x", "--dataset_dir", "y"]):
        code, out, err = run(*args)
        assert (code, out, err.count("\n")) == (2, "", 1)
        # Some Python versions can parse the deeply nested key, which is then reported as unknown.
        assert err.startswith(
            ("chatmill: chatmill.toml: not valid TOML: ", 'chatmill: chatmill.toml: unknown key "a.a.a.')
        )
        assert len(err) < 1000


@pytest.mark.parametrize(
    ("block_size", "effect"),
    [
        (
            40,
            "104 of 108 rows lose 5,253 tokens at the start; set block_size to 100, or build the cache with --t-max 40",
        ),
        (99, "no row is truncated"),
        (200, "no row is truncated"),
    ],
)
def test_a_block_size_other_than_t_max_is_reported_with_what_it_cuts(run, block_size, effect):
    Path("chatmill.toml").write_text(EVERYTHING.replace(", dolly15k = 3", ""))
    assert run("build-sft-primer")[0] == 0
    lengths = open_cache("caches/primer")["train"].lengths
    assert (int((lengths > 41).sum()), int((lengths - 41)[lengths > 41].sum())) == (104, 5253)
    args = ("--use_loss_mask", "--max_iters", "1", "--block_size", str(block_size))
    code, _, err = run("train", "--model_name", "mine", *SMALL, *args)
    assert code == 0
    assert err.splitlines()[0] == f"block_size is {block_size}, but caches/primer has T_max 100: {effect}"


def test_a_block_size_equal_to_t_max_prints_no_note(run):
    Path("chatmill.toml").write_text(EVERYTHING.replace(", dolly15k = 3", ""))
    run("build-sft-primer")
    _, _, err = run("train", "--model_name", "mine", *SMALL, "--use_loss_mask", "--max_iters", "1")
    assert "T_max" not in err


def test_a_cache_with_a_different_tokenizer_is_refused_in_one_line(run):
    Path("chatmill.toml").write_text(EVERYTHING.replace(", dolly15k = 3", ""))
    assert run("build-sft-primer")[0] == 0
    vocabulary = ["--vocab-size", "400", "-o", "tokenizer.json", "--format", "primer"]
    assert run("tokenizer", "train", "data/primer.jsonl", *vocabulary)[0] == 0
    Path("chatmill.toml").write_text(EVERYTHING.replace(", dolly15k = 3", "").replace('"bytes"', '"tokenizer.json"'))
    args = ("train", "--model_name", "mine", *SMALL, "--use_loss_mask", "--max_iters", "1")
    code, out, err = run(*args)
    mine, theirs = tokenizer_sha256("bytes")[:12], tokenizer_sha256("tokenizer.json")[:12]
    assert (code, out) == (1, "")
    assert err == (
        f"chatmill: caches/primer: was built with tokenizer {mine}…; "
        f"chatmill.toml: tokenizer.path is tokenizer.json ({theirs}…); "
        "rebuild the cache with chatmill build-sft-primer --overwrite, or change tokenizer.path\n"
    )
    assert not Path("checkpoints").exists()
    assert not Path("logs").exists()
    assert run(*args, "--check_tokenizer", "false")[0] == 0
    assert run("build-sft-primer", "--overwrite")[0] == 0
    assert run(*args[:2], "other", *args[3:])[0] == 0


def test_a_tokenizer_that_cannot_be_compared_is_noted(run):
    Path("chatmill.toml").write_text(EVERYTHING.replace('"bytes"', '"away.json"'))
    assert run("build-sft-primer", "--tokenizer", "bytes")[0] == 0
    config = replace(TrainConfig(), dataset_dir="caches/primer")
    left = "it is not compared with the tokenizer of the caches"
    notes = list(compare_tokenizer({"tokenizer.path": "away.json"}, config, tokenizer_sha256))
    assert notes == [f"chatmill.toml: tokenizer.path is away.json, which does not exist, so {left}"]
    # Simulate a container image without the packages that open tokenizers.
    notes = list(compare_tokenizer({"tokenizer.path": "bytes"}, config, lambda path: None))
    assert notes == [f"chatmill.toml: tokenizer.path is bytes, which cannot be opened here, so {left}"]
    with pytest.raises(DataError, match="was built with tokenizer"):
        list(compare_tokenizer({"tokenizer.path": "bytes"}, config, lambda path: "0" * 64))
