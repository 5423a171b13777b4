from __future__ import annotations

import numpy as np
import pytest
from show_fixtures import line, make

from chatmill.errors import DataError
from chatmill.load.config import LoadConfig
from chatmill.load.loader import EpisodeLoader
from chatmill.show.dataset import open_view
from chatmill.show.explain import explain_token
from chatmill.show.viewer import Viewer
from chatmill.store.reweigh import reweigh_dataset

MIX = {"chat": 1.0, "tools": 3.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("mix")
    for name, count in (("tools", 7), ("chat", 5)):
        scratch = tmp_path_factory.mktemp(name)
        made = make(scratch, [line(f"{name} {n}", "a" * n) for n in range(count)], val_split=0.3)
        made.path.rename(root / name)
    (root / "notes.txt").write_text("not a dataset")
    return root


def test_rows_and_origins_equal_those_of_the_sources(folder):
    view = open_view(folder)
    assert view.sources == ("chat", "tools")
    for split in ("train", "val"):
        parts = [open_view(folder / name).dataset[split] for name in ("chat", "tools")]
        whole = view.dataset[split]
        assert len(whole) == sum(map(len, parts))
        right = [part.rows([n]) for part in parts for n in range(len(part))]
        for numbers in ([*range(len(whole))], [len(whole) - 1, 0, 0, len(whole) - 1]):
            rows = whole.rows(numbers)
            assert rows.ids.tolist() == [id for n in numbers for id in right[n].ids.tolist()]
            assert rows.files == whole.files
        assert whole.lengths_of(range(len(whole))).tolist() == [len(row.ids) for row in right]
        swept = list(whole.sweep(tokens=20))
        assert np.concatenate([rows.ids for rows in swept]).tolist() == whole.rows(range(len(whole))).ids.tolist()
        sources = [whole.files[origin["file"]].source for rows in swept for origin in rows.origins]
        assert sources == ["chat"] * len(parts[0]) + ["tools"] * len(parts[1])
    assert view.ledger.total("read").rows == 12


def test_the_order_equals_that_of_training_on_the_mix(folder, tmp_path):
    view = open_view(folder)
    config = LoadConfig(mix_sft=MIX, epoch_seed=3, batch_size=2, block_size=64)
    viewer = Viewer(view, cache=tmp_path, config=config)
    loader = EpisodeLoader(folder, {"mix_sft": MIX, "epoch_seed": 3, "batch_size": 2, "block_size": 64})
    batches = [loader.get_batch().episode_ids for _ in range(3)]
    loader.close()
    trained = [int(number) for ids in batches for number in np.asarray(ids).ravel() if number >= 0]
    page = viewer.order("train", 3, 0, 0)
    assert [each["episode"] for each in page["episodes"]][:6] == trained
    assert Viewer(view, cache=tmp_path).order("train", 3, 0, 0)["episodes"]


def test_episodes_are_filtered_by_source(folder, tmp_path):
    viewer = Viewer(open_view(folder), cache=tmp_path)
    viewer.builder.start()
    viewer.builder.wait()
    assert viewer.about()["splits"]["train"]["sources"] == ["chat", "tools"]
    count = len(open_view(folder / "tools").dataset["train"])
    assert viewer.episodes("train", source="tools")["matching"] == count
    assert viewer.episodes("train", q="tools 1")["episodes"][0]["place"] == "chat.jsonl:2"


def test_sources_are_chosen_by_name_and_must_share_their_tokenizer(folder, tmp_path):
    assert open_view(folder, sources=["tools"]).sources == ("tools",)
    with pytest.raises(DataError, match="has no source other; the folder has chat, tools"):
        open_view(folder, sources=["tools", "other"])
    make(tmp_path, [line("q", "a")], format="primer").path.rename(tmp_path / "one")
    make(tmp_path, [line("q", "a")], format="chatml").path.rename(tmp_path / "two")
    with pytest.raises(DataError, match="two and one have different tokens; view one source at a time"):
        open_view(tmp_path)


def test_explanations_use_the_train_on_of_the_dataset_that_a_row_comes_from(tmp_path):
    """All datasets are made from the same file, so its name does not identify the dataset."""
    mix = tmp_path / "mix"
    mix.mkdir()
    for train_on in ("all", "last"):
        make(tmp_path, [line("q", "one", "r", "two")], train_on=train_on).path.rename(mix / train_on)
    reweigh_dataset(mix / "all", mix / "reweighed", train_on="assistant")
    view = open_view(mix)
    for episode, name in enumerate(("all", "last", "reweighed")):
        alone = open_view(mix / name)
        for token in range(len(view.row("train", episode).ids)):
            sentence = explain_token(view, "train", episode, token).sentence
            expected = explain_token(alone, "train", 0, token).sentence
            assert sentence == expected.replace("episode 0", f"episode {episode}")
        reasons = {explain_token(view, "train", episode, token).reason for token in range(1, 9)}
        value = "assistant" if name == "reweighed" else name
        assert any(f"train_on {value} " in reason for reason in reasons)
        assert view.shape_of(str(tmp_path / "chat.jsonl"), name) == alone.shape_of(str(tmp_path / "chat.jsonl"))
    assert view.shape_of(view.dataset["train"].files[0].path, "all")[0] == "messages"
