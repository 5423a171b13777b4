from __future__ import annotations

import pytest
from train_fixtures import prepare, ranks, run_chatmill, sums, trained, weights, write_files

from chatmill.errors import ChatmillError, DataError, UsageError


def test_ids_outside_the_models_vocabulary_are_refused(sums_data, tmp_path):
    with pytest.raises(
        DataError,
        match=r"has token ids up to \d+, but the model's vocabulary size is 100; use the tokenizer of the model",
    ):
        trained(sums_data, tmp_path, vocab_size=100)
    foreign = write_files(tmp_path / "data", [[1, 2, 99, 4]] * 8, [[0, 1, 1, 1]] * 8)
    with pytest.raises(DataError, match="has token ids up to 99, but the model's vocabulary size is 99"):
        trained(foreign, tmp_path, vocab_size=99, pad_token_id=0)
    assert trained(foreign, tmp_path, pad_token_id=0, max_iters=1).step == 1


def test_the_padding_token_for_data_of_other_programs_must_be_in_the_vocabulary(tmp_path):
    foreign = write_files(tmp_path / "data", [[1, 2, 5, 4]] * 8, [[0, 1, 1, 1]] * 8)
    result = trained(foreign, tmp_path, pad_token_id=7, max_iters=1)
    assert len(weights(result.checkpoint)["embedding.weight"]) == 8
    with pytest.raises(
        DataError, match=r"^rows are padded with token 7, but the model's vocabulary size is 7; set pad_token_id$"
    ):
        trained(foreign, tmp_path, name="small", pad_token_id=7, vocab_size=7)
    with pytest.raises(DataError, match=r"^pad_token_id is 65536; expected an id below 65536, as in .*data$"):
        trained(foreign, tmp_path, name="wide", pad_token_id=65536)
    (foreign / "dataset_metadata.json").write_text("{}")
    (foreign / "tokenizer_state.json").write_text('{"eot_token_id": 100000}')
    right = "its ids must be below 65536; set pad_token_id"
    with pytest.raises(DataError, match=rf"data: the id of its end-of-turn token is 100000, but {right}$"):
        trained(foreign, tmp_path, name="wide")


def test_rows_longer_than_the_models_positions_are_refused(sums_data, tmp_path):
    with pytest.raises(DataError, match="block_size is 65, but the model has 64 positions; lower block_size"):
        trained(sums_data, tmp_path, block_size=65)


def test_a_model_with_a_different_tokenizer_is_refused(sums_data, tmp_path):
    first = trained(sums_data, tmp_path, max_iters=1)
    (tmp_path / "words.jsonl").write_text(sums(200))
    own = str(tmp_path / "tokenizer.json")
    run_chatmill("tokenizer", "train", str(tmp_path / "words.jsonl"), "--vocab-size", "264", "-o", own)
    marked = prepare(tmp_path, "marked", "--tokenizer", own, "--add-tokens")
    start = {"init_from_model": str(first.folder), "name": "second", "max_iters": 1}
    with pytest.raises(
        DataError, match=r"was prepared with tokenizer [0-9a-f]{12}…, but the model was trained with [0-9a-f]{12}…"
    ):
        trained(marked, tmp_path, **start)
    with pytest.raises(DataError, match="was prepared with tokenizer"):
        trained(marked, tmp_path, resume="auto", max_iters=1)
    assert trained(marked, tmp_path, **start, check_tokenizer=False).step == 1


def test_a_missing_dataset_is_a_one_line_error(tmp_path):
    with pytest.raises(DataError) as error:
        trained(tmp_path / "none", tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a\udcff", "a\nb"])
def test_a_model_name_that_is_not_a_folder_name_is_refused(sums_data, tmp_path, name):
    with pytest.raises(UsageError, match="model_name is"):
        trained(sums_data, tmp_path, name=name)


def test_all_ranks_raise_if_a_batch_cannot_be_divided_among_them(sums_data, tmp_path):
    def run(rank: int) -> str:
        try:
            trained(sums_data, tmp_path, batch_size=3)
        except ChatmillError as error:
            return str(error)
        return "trained"

    for said in ranks(2, run):
        assert said.startswith("batch_size 3 cannot be split across 2 ranks")
