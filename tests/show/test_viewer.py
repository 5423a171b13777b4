from __future__ import annotations

import json
from dataclasses import replace
from urllib.request import urlopen

import numpy as np
import pytest
from show_fixtures import line, make
from viewing import viewer as running

from chatmill.errors import DataError, UsageError
from chatmill.load.config import LoadConfig
from chatmill.show.text import TokenText
from chatmill.show.viewer import STRIP, TOKENS, Viewer, strip


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    return make(tmp_path_factory.mktemp("viewer"), [line(f"question {n}", "a" * (n + 1)) for n in range(30)])


def test_before_the_index_exists_the_list_is_available_and_searches_wait(shown, tmp_path):
    viewer = Viewer(shown, cache=tmp_path)
    plain = viewer.episodes("train", limit=10)
    assert ([each["episode"] for each in plain["episodes"]], plain["next"], plain["matching"]) == (
        list(range(10)),
        10,
        30,
    )
    for wanted in ({"least": 20}, {"q": "question"}):
        page = viewer.episodes("train", **wanted, limit=10)
        assert (page["episodes"], page["next"], page["waiting"]) == ([], 0, True)
    assert viewer.about()["index"]["train"]["roles"] is None
    viewer.builder.start()
    viewer.builder.wait()
    assert viewer.about()["index"]["train"]["roles"] == ["user", "assistant"]
    page = viewer.episodes("train", least=30, limit=5)
    lengths = [len(shown.row("train", n).ids) for n in range(30)]
    right = [n for n, length in enumerate(lengths) if length >= 30]
    assert [each["episode"] for each in page["episodes"]] == right[:5]
    assert (page["matching"], page["waiting"], page["next"]) == (len(right), False, right[5])
    page = viewer.episodes("train", least=30, q="Question 2", limit=200)
    assert [each["episode"] for each in page["episodes"]] == [
        n for n in right if f"question {n}".startswith("question 2")
    ]
    assert {each["found"] for each in page["episodes"]} == {"question 2"}


def test_a_search_while_the_index_completes_misses_no_episode(shown, tmp_path, monkeypatch):
    viewer = Viewer(shown, cache=tmp_path)
    viewer.builder.start()
    viewer.builder.wait()
    index = viewer.builder.indexes["train"]
    index.searched, search = 10, index.search

    def completed(*args, **options):
        hits = search(*args, **options)
        index.searched = 30
        return hits

    monkeypatch.setattr(index, "search", completed)
    first = viewer.episodes("train", q="question")
    assert [each["episode"] for each in first["episodes"]] == list(range(10))
    assert (first["next"], first["waiting"]) == (10, True)
    second = viewer.episodes("train", q="question", start=first["next"])
    assert [each["episode"] for each in second["episodes"]] == list(range(10, 30))
    assert (second["next"], second["waiting"]) == (None, False)


def test_an_index_that_cannot_be_built_and_unreadable_text_are_reported(shown, tmp_path):
    (tmp_path / "file").write_text("")
    viewer = Viewer(shown, cache=tmp_path / "file")
    viewer.builder.start()
    viewer.builder.wait()
    with pytest.raises(DataError, match="the index could not be built"):
        viewer.episodes("train", least=1)
    assert len(viewer.episodes("train")["episodes"]) == 30
    blind = Viewer(replace(shown, text=TokenText(None), without_text="not here"), cache=tmp_path / "index")
    with pytest.raises(DataError, match="no text to search: not here"):
        blind.episodes("train", q="question")


def test_tokens_are_sent_in_pieces_that_make_up_the_episode(tmp_path):
    viewer = Viewer(make(tmp_path, [line("q", "b" * 5000)]), cache=tmp_path)
    start, ids, spans, turns = 0, [], [], []
    while True:
        part = viewer.episode("train", 0, start, "")
        assert part["stop"] - part["start"] <= TOKENS
        ids += part["ids"]
        spans += [(each["start"], each["stop"]) for each in part["spans"]]
        turns += [each["message"] for each in part["turns"]]
        if part["stop"] == part["tokens"]:
            break
        start = part["stop"]
    assert ids == viewer._view.row("train", 0).ids.tolist()
    assert sorted(set(spans)) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5004), (5004, 5005)]
    assert turns == [0, 1, 1, 1]


def test_the_conversations_of_a_packed_row_are_listed_with_their_origins(tmp_path):
    viewer = Viewer(
        make(tmp_path, [line("a", "b"), line("c", "d")], pack=20), cache=tmp_path, record_folders=[tmp_path]
    )
    found = viewer.episode("train", 0, 0, "")
    assert [(each["file"], each["line"], each["start"], each["stop"]) for each in found["segments"]] == [
        ("chat.jsonl", 1, 0, 6),
        ("chat.jsonl", 2, 6, 12),
    ]
    assert '"c"' in viewer.record("train", 0, 1)["text"]


def test_a_strip_covers_its_row_and_shows_the_roles(tmp_path):
    many = make(tmp_path, [line(*(f"{n}" for n in range(200)))])
    row = many.row("train", 0)
    assert len(row.spans) > STRIP
    runs = strip(row)
    assert sum(size for *_, size in runs) == len(row.ids)
    assert {(role, on) for role, on, _ in runs} == {("user", False), ("assistant", False), ("assistant", True)}
    few = make(tmp_path, [line("hi", "yo")], file="few.jsonl").row("train", 0)
    assert strip(few) == [["user", False, 4], ["assistant", False, 1], ["assistant", True, 3]]


def test_with_packing_an_episode_has_neighbours(shown, tmp_path):
    config = LoadConfig(packing="bins", block_size=64, batch_size=2, epoch_seed=5)
    viewer = Viewer(shown, cache=tmp_path, config=config)
    assert viewer.about()["order"] == {"mode": "epoch", "seed": 5, "packing": "bins"}
    together = {n: viewer.whereabouts("train", n, 5, 0)["shares_row_with"] for n in range(30)}
    assert any(together.values())
    assert all(n in together[other] for n, others in together.items() for other in others)
    lengths = [len(shown.row("train", n).ids) for n in range(30)]
    assert all(lengths[n] + sum(lengths[each] for each in others) <= 65 for n, others in together.items())


def test_a_sorted_list_waits_for_the_index_and_then_has_pages_in_that_order(shown, tmp_path):
    viewer = Viewer(shown, cache=tmp_path)
    page = viewer.episodes("train", sort="longest", limit=5)
    assert (page["episodes"], page["next"], page["waiting"]) == ([], 0, True)
    viewer.builder.start()
    viewer.builder.wait()
    lengths = [len(shown.row("train", n).ids) for n in range(30)]
    for options, right in [
        ({}, sorted(range(30), key=lambda n: -lengths[n])),
        ({"least": 30}, sorted((n for n in range(30) if lengths[n] >= 30), key=lambda n: -lengths[n])),
        ({"q": "question 2"}, [n for n in range(29, -1, -1) if f"question {n}".startswith("question 2")]),
    ]:
        numbers, start = [], 0
        while start is not None:
            page = viewer.episodes("train", sort="longest", start=start, limit=4, **options)
            assert page["matching"] in (None, len(right))
            numbers += [each["episode"] for each in page["episodes"]]
            start = page["next"]
        assert numbers == right
    for wrong in ("random", "highest_loss"):
        with pytest.raises(UsageError, match=f"unknown sort order {wrong}; expected longest, shortest"):
            viewer.episodes("train", sort=wrong)


def test_a_filter_with_unknown_names_is_a_usage_error(shown, tmp_path):
    viewer = Viewer(shown, cache=tmp_path)
    viewer.builder.start()
    viewer.builder.wait()
    assert viewer.episodes("train", role=["user", "user"], rule=["role"], source="chat")["matching"] == 30
    assert viewer.episodes("train", rule=["flag"])["matching"] == 0
    for wrong in ({"role": ["bot"]}, {"rule": ["luck"]}, {"source": "c"}):
        with pytest.raises(UsageError, match="unknown role, rule or source"):
            viewer.episodes("train", **wrong)


def test_the_order_is_read_from_the_config_of_a_run_and_other_keys_are_ignored(shown, tmp_path):
    run = {"n_layer": 2, "learning_rate": 0.1, "epoch_seed": 9, "batch_sampling_mode": "feistel"}
    (tmp_path / "run.json").write_text(json.dumps(run))
    with running(shown.path, tmp_path, "--config", "run.json") as url:
        with urlopen(f"{url}api/about") as answer:
            assert json.load(answer)["order"] == {"mode": "feistel", "seed": 9, "packing": "none"}
        with urlopen(f"{url}api/train/order?seed=9") as answer:
            page = json.load(answer)
    assert page["order"] == "feistel/1"
    assert sorted(each["episode"] for each in page["episodes"]) == np.arange(30).tolist()
