from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest

import chatmill

PACKAGES = ("audit", "fit", "format", "load", "prepare", "records", "rollout", "show", "store", "tokenizer", "train")
CONSTANTS = {"DEFAULT_SYSTEM_TEXT", "IGNORE_INDEX"}
DOCUMENTED = sorted(set(chatmill.__all__) - CONSTANTS)


NOUNS = """Batch ChatExample ChatFormat ChatMsg ChatmillError DEFAULT_SYSTEM_TEXT Dataset EpisodeLoader IGNORE_INDEX
InputSource Job LoadConfig Message Record Renderer Rows ToolCall TrainConfig build_target collate collate_sft_batch
load_format open_dataset open_renderer open_tokenizer pack_chat_blocks pack_sft_ids_and_mask prepare_dataset
read_records render_chat_sft serialize_chat_to_ids sft_loss_mask_for_ids train_model"""


def test_the_exported_names_are_these():
    assert chatmill.__all__ == NOUNS.split()


def test_dir_shows_the_exported_names_and_nothing_else():
    assert dir(chatmill) == sorted([*chatmill.__all__, "__version__"])


def test_a_name_that_is_not_exported_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = chatmill.nothing


def test_importing_chatmill_imports_no_library():
    code = "import sys, chatmill; print([m for m in ('numpy', 'torch', 'msgspec', 'tokenizers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("name", chatmill.__all__)
def test_no_export_shares_its_name_with_a_module_of_its_package(name):
    modules = {module.name for module in pkgutil.iter_modules(chatmill.__path__)}
    assert name not in modules


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_exports_documented_names_that_are_no_modules_of_it(package):
    module = importlib.import_module(f"chatmill.{package}")
    assert module.__all__
    assert inspect.getdoc(module)
    modules = {each.name for each in pkgutil.iter_modules(module.__path__)}
    assert not modules & set(module.__all__)
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), f"chatmill.{package}.{name} has no docstring"


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_export_has_a_docstring_with_an_example(name):
    """tests/test_doctests.py runs the examples."""
    assert doctest.DocTestParser().get_examples(inspect.getdoc(getattr(chatmill, name)) or "")


def test_ten_lines_go_from_message_dicts_and_a_model_folder_to_a_torch_batch(tmp_path, monkeypatch):
    from test_recorded_hashes import write_tokenizer

    monkeypatch.chdir(tmp_path)
    write_tokenizer(tmp_path / "model")
    conversations = [
        [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}],
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}],
    ]

    from chatmill import Message, Record, collate, open_renderer

    renderer = open_renderer("template", "model")
    records = [Record([Message(**message) for message in messages]) for messages in conversations]
    rows = renderer.render(records)
    batch = collate(rows, pad_token_id=renderer.tokenizer.special_token_ids()["eot"]).to_torch()

    import torch

    assert isinstance(batch.x, torch.Tensor)
    assert batch.x.shape == batch.y.shape == (2, rows.lengths.max() - 1)
    end = 259
    answers = [[ord("4"), end], [*b"Hello!", end]]
    for y, answer in zip(batch.y, answers, strict=True):
        assert y[y != chatmill.IGNORE_INDEX].tolist() == answer
