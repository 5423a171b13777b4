"""The index: what it finds is what a look at every episode finds, whole or growing, made or opened."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from show_fixtures import line, make

from chatmill.errors import DataError, UsageError
from chatmill.rows import Role, Rule
from chatmill.show import index as index_module
from chatmill.show import index_build
from chatmill.show.dataset import open_view
from chatmill.show.index import Filter
from chatmill.show.index_build import IndexBuilder
from chatmill.show.search import find, locate, needle_of
from chatmill.show.text import TokenText

WORDS = ["Mill", "stone", "grain", "Wässer", "ÄÖÜ", "straße", "ΣΑΣ", "wheel", "<|eot|>", "👩\u200d👧", "x"]


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Three hundred episodes of a few words, in several shards."""
    rng = np.random.default_rng(3)
    lines = [line(*(" ".join(rng.choice(WORDS, rng.integers(1, 9))) for _ in range(2))) for _ in range(300)]
    return make(tmp_path_factory.mktemp("many"), lines, shard_tokens=4000)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks and slabs so small that borders are everywhere."""
    for module in (index_module, index_build):
        monkeypatch.setattr(module, "BLOCK", 64)
    monkeypatch.setattr(index_module, "RUN", 192)
    monkeypatch.setattr(index_build, "SLAB", 700)


def built(shown, folder):
    builder = IndexBuilder(shown, folder)
    builder.start()
    builder.wait()
    assert builder.indexes["train"].error is None
    return builder.indexes["train"]


def naive(shown, text: str) -> list[int]:
    """Episodes whose text, folded character by character, holds the folded query."""
    found = []
    for number in range(len(shown.dataset["train"])):
        said = b"".join(shown.text.piece(int(id)) for id in shown.row("train", number).ids).decode()
        if text.casefold() in said.casefold():
            found.append(number)
    return found


QUERIES = [
    "mill",
    "STONE grain",
    "wässer",
    "strasse",
    "σας",
    "<|eot|><|asst|>",
    "👩\u200d👧",
    "x",
    "zz",
    "el x",
    "nowhere at all",
]


def test_the_index_finds_what_a_look_at_every_episode_finds(many, tmp_path, small_blocks):
    index = built(many, tmp_path)
    assert index.blocks > 100
    for query in QUERIES:
        right = naive(many, query)
        assert index.search(needle_of(query), 0, 1000, seconds=60).episodes == right, query
        assert list(find(many, "train", query)) == right, query
    assert any(naive(many, query) for query in QUERIES[:6])


@pytest.mark.parametrize("length", [270, 290, 310])
def test_a_text_is_found_across_every_border_of_blocks(tmp_path, small_blocks, length):
    said = "".join(chr(ord("a") + int(n)) for n in np.random.default_rng(1).integers(0, 26, length))
    shown = make(tmp_path, [line("q", said)])
    index = built(shown, tmp_path / "index")
    for start in range(len(said) - 12):
        assert index.search(needle_of(said[start : start + 12]), 0, 10).episodes == [0]


@settings(max_examples=40)
@given(st.text(st.sampled_from("Milston grawäÄß"), min_size=1, max_size=9), st.integers(0, 299), st.integers(1, 5))
def test_pages_of_a_search_one_after_the_other_are_all_of_it(many, shared_index, query, start, limit):
    right = [number for number in naive_cached(many, query) if number >= start]
    found, at, ended = [], start, False
    while not ended:
        part = shared_index.search(needle_of(query), at, limit, seconds=0.0)
        assert len(part.episodes) <= limit
        assert part.after > at or part.ended
        found += part.episodes
        at, ended = part.after, part.ended
    assert found == right


@pytest.fixture(scope="module")
def shared_index(many, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for module in (index_module, index_build):
            patch.setattr(module, "BLOCK", 64)
        patch.setattr(index_module, "RUN", 192)
        yield built(many, tmp_path_factory.mktemp("index"))


TEXTS: list[str] = []


def naive_cached(shown, text: str) -> list[int]:
    if not TEXTS:
        for number in range(len(shown.dataset["train"])):
            ids = shown.row("train", number).ids.tolist()
            TEXTS.append(b"".join(map(shown.text.piece, ids)).decode().casefold())
    return [number for number, said in enumerate(TEXTS) if text.casefold() in said]


def test_filters_keep_what_a_look_at_every_episode_keeps(tmp_path):
    rng = np.random.default_rng(7)
    lines = []
    for number in range(60):
        turns = [{"role": "user", "content": "q" * int(rng.integers(1, 30))}]
        turns.append({"role": "assistant", "content": "a" * int(rng.integers(1, 30))})
        if number % 3 == 0:
            turns.insert(0, {"role": "system", "content": "s"})
        if number % 5 == 0:
            turns[-1]["weight"] = 0.5
        lines.append(json.dumps({"messages": turns}) + "\n")
    shown = make(tmp_path, lines, shard_tokens=600)
    index = built(shown, tmp_path / "index")
    rows = [shown.row("train", number) for number in range(60)]
    lengths, shares = [len(row.ids) for row in rows], [float(row.mask().mean()) for row in rows]
    system, flag = 1 << Role.SYSTEM, 1 << Rule.FLAG

    def kept(wanted: Filter) -> list[int]:
        return np.flatnonzero(index.mask(wanted)).tolist()

    assert kept(Filter(roles=system)) == [n for n in range(60) if n % 3 == 0]
    assert kept(Filter(rules=flag, roles=system)) == [n for n in range(60) if n % 15 == 0]
    assert kept(Filter(least=20, most=40)) == [n for n, length in enumerate(lengths) if 20 <= length <= 40]
    assert kept(Filter(share_from=0.3, share_to=0.5)) == [n for n, share in enumerate(shares) if 0.3 <= share <= 0.5]
    assert kept(Filter(source=0)) == list(range(60))
    assert kept(Filter()) == list(range(60))
    mask = index.mask(Filter(least=30))
    assert index.search(needle_of("aaaaa"), 0, 100, kept=mask).episodes == [
        n for n in naive(shown, "aaaaa") if lengths[n] >= 30
    ]


def test_sources_past_the_sixty_fourth_share_the_last_bit(tmp_path):
    for number in range(70):
        (tmp_path / f"s{number:02d}.jsonl").write_text(line("a", "b"))
    shown = make_of_files(tmp_path)
    index = built(shown, tmp_path / "index")
    assert np.flatnonzero(index.mask(Filter(source=5))).tolist() == [5]
    assert np.flatnonzero(index.mask(Filter(source=63))).tolist() == list(range(63, 70))


def make_of_files(folder):
    from chatmill.prepare.engine import LocalEngine
    from chatmill.prepare.job import InputSource, Job
    from chatmill.prepare.pipeline import prepare_dataset

    prepare_dataset(
        Job((InputSource((str(folder / "s*.jsonl"),)),), format="primer"), folder / "v0", engine=LocalEngine(workers=1)
    )
    return open_view(folder / "v0")


def test_an_index_is_opened_again_and_not_made_again(many, tmp_path, monkeypatch):
    first = built(many, tmp_path)
    monkeypatch.setattr(IndexBuilder, "_fill", None)
    again = built(many, tmp_path)
    assert again.is_complete
    for query in QUERIES:
        one, other = (each.search(needle_of(query), 0, 1000, seconds=60) for each in (first, again))
        assert one == other


def test_another_tokenizer_has_another_index_and_none_has_no_text(many, tmp_path):
    blind = replace(many, text=TokenText(None), without_text="not here")
    assert IndexBuilder(many, tmp_path).folder("train") != IndexBuilder(blind, tmp_path).folder("train")
    index = built(blind, tmp_path)
    assert (index.filtered, index.searched) == (300, 0)
    assert index.search(b"mill", 0, 10).episodes == []


def test_a_growing_index_knows_what_stands_before_and_is_left_whole_or_not_at_all(many, tmp_path, small_blocks):
    builder = IndexBuilder(many, tmp_path)
    index, seen = builder.indexes["train"], []
    right = naive(many, "mill")
    add = index_build._TextWriter.add

    def watched(writer, text, edges):
        add(writer, text, edges)
        found = index.search(needle_of("mill"), 0, 1000, seconds=60)
        assert found.episodes == [number for number in right if number < index.searched]
        assert index.filtered == 300
        seen.append(index.searched)
        if len(seen) == 3:
            builder._stop.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_build._TextWriter, "add", watched)
        builder.start()
        builder.wait()
    assert len(seen) == 3 and seen[-1] < 300
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
    assert built(many, tmp_path).is_complete


def test_leftovers_of_a_killed_viewer_are_replaced(many, tmp_path):
    building = IndexBuilder(many, tmp_path).folder("train").with_suffix(".building")
    building.mkdir(parents=True)
    (building / "text.bin").write_bytes(b"half")
    assert built(many, tmp_path).search(needle_of("mill"), 0, 1000, seconds=60).episodes == naive(many, "mill")
    assert not building.exists()


def test_two_viewers_at_once_make_one_index(many, tmp_path, monkeypatch):
    made = []
    fill = IndexBuilder._fill
    monkeypatch.setattr(IndexBuilder, "_fill", lambda *args: made.append(1) or fill(*args))
    builders = [IndexBuilder(many, tmp_path) for _ in range(3)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.wait()
    assert made == [1]
    assert all(builder.indexes["train"].is_complete for builder in builders)


def test_a_damaged_index_is_named_and_can_be_removed(many, tmp_path):
    built(many, tmp_path)
    folder = IndexBuilder(many, tmp_path).folder("train")
    np.save(folder / "tokens.npy", np.zeros(3))
    builder = IndexBuilder(many, tmp_path)
    builder.start()
    builder.wait()
    assert "remove" in builder.indexes["train"].error


def test_a_place_is_named_by_its_tokens_whatever_folding_does_to_lengths(chats):
    ids = chats.row("train", 2).ids.tolist()  # <|usr|>ä Ö<|eot|><|asst|>ß é<|eot|>
    for query, start, found in (("ä ö", 1, "ä Ö"), ("SS É", 8, "ß é"), ("s", 0, "s"), ("ö<", 4, "Ö<")):
        place = locate(ids, chats.text, query)
        assert (place.start, place.found) == (start, found), query
        covered = b"".join(chats.text.piece(id) for id in ids[place.start : place.stop]).decode()
        assert query.casefold() in covered.casefold()
    assert locate(ids, chats.text, "none of it") is None


def test_nothing_cannot_be_searched_for():
    with pytest.raises(UsageError, match="nothing to search for"):
        needle_of("")


def test_without_its_tokenizer_a_dataset_cannot_be_searched(many):
    with pytest.raises(DataError, match="--tokenizer"):
        next(find(replace(many, text=TokenText(None)), "train", "mill"))
