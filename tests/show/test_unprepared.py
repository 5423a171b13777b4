from __future__ import annotations

import json
import re
from urllib.request import urlopen

import pytest
from show_fixtures import line, make
from viewing import viewer

from chatmill.cli.viewed import PreviewOptions, open_data
from chatmill.errors import DataError, UsageError
from chatmill.prepare.job import InputSource, Job
from chatmill.prepare.preview import prepare_preview
from chatmill.prepare.recipe import load_recipe
from chatmill.show.dataset import open_view
from chatmill.tokenizer import train_bpe

LINES = [line(f"question {n}", f"answer {n}") for n in range(30)]


def places(view) -> list[tuple[str, int]]:
    rows = view.dataset["train"].rows(range(len(view.dataset["train"])))
    return [(rows.files[origin["file"]].path, int(origin["line"])) for origin in rows.origins]


def test_a_preview_has_the_rows_of_a_dataset_of_all_records(tmp_path):
    prepared = make(tmp_path, LINES, format="chatml")
    with open_data(tmp_path / "chat.jsonl", None, PreviewOptions()) as opened:
        view = opened.view
        assert (
            view.dataset["train"].rows(range(30)).ids.tolist() == prepared.dataset["train"].rows(range(30)).ids.tolist()
        )
        assert places(view) == places(prepared)
        assert view.preview.note == (
            "Not prepared yet: all 30 records, rendered with the format chatml and the tokenizer bytes; choose others "
            "with --tokenizer and --format."
        )
        assert (view.title, view.text.tokenizer.name) == (tmp_path / "chat.jsonl", "bytes")
        assert (opened.record_folders[-1] / "chat.jsonl").is_file()
        folder = opened.folder
        assert folder.is_dir()
    assert not folder.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chat.jsonl", "v0"]


def test_the_first_records_of_each_source_are_read_and_faulty_ones_listed(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(["{\n", *LINES]))
    (tmp_path / "b.jsonl").write_text("".join(LINES[:3]))
    (tmp_path / "recipe.toml").write_text(
        f'val_split = 0.001\nformat = "primer"\n'
        f'[[sources]]\ninputs = ["{tmp_path}/a.jsonl"]\n[[sources]]\ninputs = ["{tmp_path}/b.jsonl"]\n'
    )
    with open_data(tmp_path / "recipe.toml", None, PreviewOptions(first=5)) as opened:
        assert places(opened.view) == [("a.jsonl", n) for n in range(2, 6)] + [("b.jsonl", n) for n in (1, 2, 3)]
        note, faults = opened.view.preview.note, opened.view.preview.faults
    assert note == (
        "Not prepared yet: the first 8 records, of which 1 cannot be read, rendered with the format primer and the "
        "tokenizer bytes."
    )
    assert [re.sub("^.*/", "", fault)[:9] for fault in faults] == ["a.jsonl:1"]


def test_if_no_record_can_be_read_the_first_error_is_reported(tmp_path):
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "bot", "content": "hi"}]}\n' * 2)
    with pytest.raises(DataError) as refused, open_data(tmp_path / "chat.jsonl", None, PreviewOptions()):
        pass
    assert str(refused.value) == (
        "the split train would be empty; no records are left to train on (2 role); first error: "
        f'{tmp_path}/chat.jsonl:1: message 0 has role "bot"; expected system, user, assistant or tool; --columns '
        "assistant=bot maps this role"
    )


@pytest.mark.parametrize("records", [1, 7, 30, 31])
def test_a_preview_equals_the_dataset_of_that_many_records(tmp_path, records):
    (tmp_path / "chat.jsonl").write_text("".join(LINES))
    (tmp_path / "first.jsonl").write_text("".join(LINES[:records]))
    job = Job((InputSource((str(tmp_path / "chat.jsonl"),)),), max_tokens=40, dedupe=True, val_split=0.5)
    made = prepare_preview(job, tmp_path / "preview", records=records)
    assert made.read_whole == (records >= 30)
    assert made.metadata.ledger.total("read").rows == min(records, 30)
    whole = make(tmp_path, LINES[:records], file="first.jsonl", max_tokens=40, dedupe=True, format="chatml")
    shown = open_view(tmp_path / "preview")
    assert len(shown.dataset["train"]) == len(whole.dataset["train"]) > 0
    rows, right = (each.dataset["train"].rows(range(len(whole.dataset["train"]))) for each in (shown, whole))
    assert rows.ids.tolist() == right.ids.tolist()
    assert rows.spans.tolist() == right.spans.tolist()


def test_a_tokenizer_and_a_format_are_chosen(tmp_path):
    (tmp_path / "chat.jsonl").write_text("".join(LINES))
    (tmp_path / "tokenizer.json").write_bytes(train_bpe(["question answer"] * 9, vocab_size=300, control=["<|eot|>"]))
    with open_data(
        tmp_path / "chat.jsonl", str(tmp_path / "tokenizer.json"), PreviewOptions(format="primer")
    ) as opened:
        assert f"the format primer and the tokenizer {tmp_path}/tokenizer.json" in opened.view.preview.note
        row = opened.view.row("train", 2)
        assert opened.view.text.text(row.ids.tolist()) == "<|usr|>question 2<|eot|><|asst|>answer 2<|eot|>"
        assert len(row.ids) < 20


def test_input_that_cannot_be_shown_is_one_error_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepared = make(tmp_path, LINES)
    for data, tokenizer, options, words in [
        (prepared.path, None, PreviewOptions(first=3), "v0 is already prepared"),
        (
            tmp_path / "recipe.toml",
            "bytes",
            PreviewOptions(),
            "--tokenizer and --format cannot be used with a recipe; set them in",
        ),
        (tmp_path / "none.jsonl", None, PreviewOptions(), "none.jsonl"),
        (tmp_path / "none", None, PreviewOptions(), "none: no such folder; expected a dataset"),
    ]:
        with pytest.raises((DataError, UsageError), match=re.escape(words)), open_data(data, tokenizer, options):
            pass
    (tmp_path / "empty.jsonl").write_text("")
    with (
        pytest.raises(DataError, match=r"empty|no records"),
        open_data(tmp_path / "empty.jsonl", None, PreviewOptions()),
    ):
        pass


def test_a_recipe_that_removes_duplicates_and_filters_is_previewed_as_it_would_be_built(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join([*LINES, *LINES]))
    (tmp_path / "recipe.toml").write_text(
        f'dedupe = true\n[[sources]]\ninputs = ["{tmp_path}/a.jsonl"]\nfilters = {{no_match = "question 2"}}\n'
    )
    assert load_recipe(str(tmp_path / "recipe.toml")).dedupe
    with open_data(tmp_path / "recipe.toml", None, PreviewOptions()) as opened:
        ledger = opened.view.ledger
    assert ledger.total("filtered").rows == 22
    assert ledger.total("dropped").rows == ledger.total("stored").rows == 19


def test_the_viewer_serves_records_and_shows_the_record_of_each(tmp_path):
    (tmp_path / "chat.jsonl").write_text("".join([*LINES, "{\n"]))
    with viewer("chat.jsonl", tmp_path) as url:
        about = json.load(urlopen(f"{url}api/about"))
        record = json.load(urlopen(f"{url}api/train/episode/4/record/0"))
    assert about["name"] == "chat.jsonl"
    assert about["preview"]["note"].startswith("Not prepared yet: all 31 records, of which 1 cannot be read")
    assert len(about["preview"]["faults"]) == 1
    assert (record["place"], record["same"], "question 4" in record["text"]) == ("chat.jsonl:5", True, True)
