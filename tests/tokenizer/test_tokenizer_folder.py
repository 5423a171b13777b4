from __future__ import annotations

import json
import shutil

import pytest
from tokenizer_fixtures import MISTRAL_V1, OLD_TEKKEN, PRIMER

from chatmill.errors import DataError, UsageError
from chatmill.tokenizer import open_tokenizer


def write_config(folder, tokens: dict[int, tuple[str, bool]]) -> None:
    listed = {str(id): {"content": content, "special": special} for id, (content, special) in tokens.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))


def test_tokenizer_json_is_preferred_to_the_other_files(trained, trained_json, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(trained)
    shutil.copy(MISTRAL_V1, tmp_path / "tokenizer.model")
    tokenizer = open_tokenizer(tmp_path, control=PRIMER)
    assert tokenizer.sha256 == open_tokenizer(trained_json).sha256
    assert tokenizer.name == tmp_path.name


def test_a_sentencepiece_model_is_preferred_to_tekken(tmp_path):
    shutil.copy(OLD_TEKKEN, tmp_path / "tekken.json")
    assert open_tokenizer(tmp_path).sha256 == open_tokenizer(OLD_TEKKEN).sha256
    shutil.copy(MISTRAL_V1, tmp_path / "tokenizer.model")
    assert open_tokenizer(tmp_path).sha256 == open_tokenizer(MISTRAL_V1).sha256


def test_tokens_declared_above_the_vocabulary_are_added_to_it(tmp_path):
    shutil.copy(MISTRAL_V1, tmp_path / "tokenizer.model")
    declared = {0: ("<unk>", True), 1: ("<s>", True), 32001: ("<|im_end|>", True), 32000: ("<|im_start|>", False)}
    write_config(tmp_path, declared)
    tokenizer = open_tokenizer(tmp_path, control={"start": "<|im_start|>", "eot": "<|im_end|>", "bos": "<s>"})
    assert tokenizer.special_token_ids() == {"start": 32000, "eot": 32001, "bos": 1}
    assert tokenizer.vocab_size == 32002
    assert tokenizer.sha256 != open_tokenizer(MISTRAL_V1).sha256
    assert tokenizer.decode([32000, *tokenizer.encode("<|im_end|>"), 32001]) == "<|im_start|><|im_end|><|im_end|>"


def test_a_piece_that_is_declared_special_no_longer_matches_text(tmp_path):
    shutil.copy(MISTRAL_V1, tmp_path / "tokenizer.model")
    (the,) = open_tokenizer(MISTRAL_V1).encode("the")
    write_config(tmp_path, {the: ("▁the", True)})
    tokenizer = open_tokenizer(tmp_path, control={"article": "▁the"})
    assert tokenizer.special_token_ids() == {"article": the}
    assert the not in tokenizer.encode("the")
    assert tokenizer.decode(tokenizer.encode("the")) == "the"


def test_a_declared_token_with_the_id_of_another_is_an_error(tmp_path):
    shutil.copy(MISTRAL_V1, tmp_path / "tokenizer.model")
    write_config(tmp_path, {500: ("<|eot|>", True)})
    with pytest.raises(DataError) as caught:
        open_tokenizer(tmp_path)
    what = 'tokenizer_config.json gives "<|eot|>" the id 500, but the tokenizer does not'
    assert str(caught.value) == f"{tmp_path}: {what}; both files must come from the same tokenizer"


def test_plain_tokens_that_only_the_config_lists_are_named_in_a_warning(tmp_path):
    shutil.copy(MISTRAL_V1, tmp_path / "tokenizer.model")
    write_config(tmp_path, {32000: ("\n\n\n", False)})
    with pytest.warns(UserWarning, match=r"that only tokenizer_config\.json lists: '\\n\\n\\n'$"):
        tokenizer = open_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 32000


def test_the_error_for_missing_tokens_names_the_folder(folder):
    with pytest.raises(UsageError, match="lacks the control tokens <\\|x\\|>; add them with --add-tokens") as caught:
        open_tokenizer(folder, control={"x": "<|x|>"})
    assert str(caught.value).startswith(f"{folder}: ")
