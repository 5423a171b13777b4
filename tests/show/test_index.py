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
from chatmill.show.index import SORTS, Filter, source_bit
from chatmill.show.index_build import IndexBuilder
from chatmill.show.text import PieceTable, TokenText, find, folded_query, locate

WORDS = ["Mill", "stone", "grain", "Wässer", "ÄÖÜ", "straße", "ΣΑΣ", "wheel", "<|eot|>", "👩\u200d👧", "x"]


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    rng = np.random.default_rng(3)
    lines = [line(*(" ".join(rng.choice(WORDS, rng.integers(1, 9))) for _ in range(2))) for _ in range(300)]
    return make(tmp_path_factory.mktemp("many"), lines, shard_tokens=4000)


@pytest.fixture
def small_blocks(monkeypatch):
    """Use small blocks and chunks, so that the index consists of many blocks and chunks."""
    shrink(monkeypatch)
    monkeypatch.setattr(index_build, "CHUNK", 700)


def shrink(patch) -> None:
    for module in (index_module, index_build):
        patch.setattr(module, "BLOCK", 64)
    patch.setattr(index_module, "READ", 192)


def built(shown, folder):
    builder = IndexBuilder(shown, folder)
    builder.start()
    builder.wait()
    assert builder.indexes["train"].error is None
    return builder.indexes["train"]


def naive(shown, text: str) -> list[int]:
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


def test_the_index_finds_what_a_scan_of_every_episode_finds(many, tmp_path, small_blocks):
    index = built(many, tmp_path)
    assert len(index.grams) > 100
    for query in QUERIES:
        right = naive(many, query)
        assert index.search(folded_query(query), 0, 1000, seconds=60).episodes == right, query
        assert list(find(many.dataset["train"], many.text, query)) == right, query
    assert any(naive(many, query) for query in QUERIES[:6])


@pytest.mark.parametrize("length", [270, 290, 310])
def test_a_text_is_found_across_every_block_boundary(tmp_path, small_blocks, length):
    said = "".join(chr(ord("a") + int(n)) for n in np.random.default_rng(1).integers(0, 26, length))
    shown = make(tmp_path, [line("q", said)])
    index = built(shown, tmp_path / "index")
    for start in range(len(said) - 12):
        assert index.search(folded_query(said[start : start + 12]), 0, 10).episodes == [0]


@settings(max_examples=40)
@given(st.text(st.sampled_from("Milston grawäÄß"), min_size=1, max_size=9), st.integers(0, 299), st.integers(1, 5))
def test_consecutive_pages_of_a_search_cover_all_results(many, shared_index, query, start, limit):
    right = [number for number in naive_cached(many, query) if number >= start]
    found, at, ended = [], start, False
    while not ended:
        part = shared_index.search(folded_query(query), at, limit, seconds=0.0)
        assert len(part.episodes) <= limit
        assert part.after > at or part.ended
        found += part.episodes
        at, ended = part.after, part.ended
    assert found == right


@settings(max_examples=60)
@given(
    st.sampled_from(QUERIES),
    st.sampled_from(sorted(SORTS)),
    st.integers(0, 310),
    st.integers(1, 40),
    st.integers(0, 90),
)
def test_a_search_in_any_order_finds_what_a_scan_of_every_episode_finds(
    many, shared_index, query, sort, start, limit, least
):
    shared_index.losses = np.where(np.arange(300) % 3, np.arange(300) * 7 % 13, np.nan).astype(np.float32)
    order, kept = shared_index.order(sort), shared_index.mask(Filter(least=least))
    matching = set(naive_cached(many, query)) & set(np.flatnonzero(kept).tolist())
    found, at, ended = [], start, start >= 300
    while not ended:
        part = shared_index.search_in_order(folded_query(query), order, at, limit, kept=kept, seconds=0.0)
        assert len(part.episodes) <= limit
        assert part.after > at
        found += part.episodes
        at, ended = part.after, part.ended
    assert found == [number for number in order[start:].tolist() if number in matching]


@pytest.mark.parametrize("sort", sorted(SORTS))
def test_episodes_are_sorted_as_python_sorts_them(many, shared_index, sort):
    losses = [float("nan") if number % 5 == 0 else (number * 37) % 11 for number in range(300)]
    shared_index.losses = np.array(losses, dtype=np.float32)
    rows = [many.row("train", number) for number in range(300)]
    values = {
        "tokens": [len(row.ids) for row in rows],
        "share": [row.mask().sum() / len(row.ids) for row in rows],
        "loss": losses,
    }[SORTS[sort].column]
    sign = -1 if SORTS[sort].descending else 1
    right = sorted(
        range(300), key=lambda n: (values[n] != values[n], sign * values[n] if values[n] == values[n] else 0)
    )
    assert shared_index.order(sort).tolist() == right


def test_sorting_by_loss_needs_the_losses_of_a_run(many, shared_index):
    shared_index.losses = None
    with pytest.raises(UsageError, match="pass --run with a run that was trained with --log_rows"):
        shared_index.order("highest_loss")


@pytest.fixture(scope="module")
def shared_index(many, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        yield built(many, tmp_path_factory.mktemp("index"))


TEXTS: list[str] = []


def naive_cached(shown, text: str) -> list[int]:
    if not TEXTS:
        for number in range(len(shown.dataset["train"])):
            ids = shown.row("train", number).ids.tolist()
            TEXTS.append(b"".join(map(shown.text.piece, ids)).decode().casefold())
    return [number for number, said in enumerate(TEXTS) if text.casefold() in said]


ALPHABET = "aAbz \x00\n\"'%*_\\(-äÄßΣςσİ你👩"


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    rng = np.random.default_rng(11)
    folder, lines = tmp_path_factory.mktemp("odd"), []
    for _ in range(150):
        lines.append(line(*("".join(rng.choice([*ALPHABET], rng.integers(1, 30))) for _ in range(2))))
    shown = make(folder, lines, max_tokens=40, fit="windows", shard_tokens=3000)
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        index = built(shown, folder / "index")
        texts = []
        for number in range(len(shown.dataset["train"])):
            pieces = map(shown.text.piece, shown.row("train", number).ids.tolist())
            texts.append(b"".join(pieces).decode("utf-8", "surrogateescape").casefold())
        yield shown, index, texts


@settings(max_examples=150)
@given(st.text(st.sampled_from(ALPHABET + "\ufffd"), min_size=1, max_size=6), st.integers(0, 60), st.booleans())
def test_unusual_queries_of_any_length_find_the_decoded_texts(odd, query, least, filtered):
    shown, index, texts = odd
    right = [number for number, text in enumerate(texts) if query.casefold() in text]
    assert list(find(shown.dataset["train"], shown.text, query)) == right
    kept = index.mask(Filter(least=least)) if filtered else None
    if filtered:
        right = [number for number in right if len(shown.row("train", number).ids) >= least]
    assert index.search(folded_query(query), 0, 10**6, kept=kept, seconds=60).episodes == right


def test_filters_keep_what_a_scan_of_every_episode_keeps(tmp_path):
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
    assert kept(Filter(sources=source_bit(0))) == list(range(60))
    assert kept(Filter()) == list(range(60))
    mask = index.mask(Filter(least=30))
    assert index.search(folded_query("aaaaa"), 0, 100, kept=mask).episodes == [
        n for n in naive(shown, "aaaaa") if lengths[n] >= 30
    ]


def test_sources_past_the_sixty_fourth_share_the_last_bit(tmp_path):
    for number in range(70):
        (tmp_path / f"s{number:02d}.jsonl").write_text(line("a", "b"))
    shown = make_of_files(tmp_path)
    index = built(shown, tmp_path / "index")
    assert np.flatnonzero(index.mask(Filter(sources=source_bit(5)))).tolist() == [5]
    assert np.flatnonzero(index.mask(Filter(sources=source_bit(63)))).tolist() == list(range(63, 70))


def make_of_files(folder):
    from chatmill.prepare.engine import LocalEngine
    from chatmill.prepare.job import InputSource, Job
    from chatmill.prepare.pipeline import prepare_dataset

    prepare_dataset(
        Job((InputSource((str(folder / "s*.jsonl"),)),), format="primer"), folder / "v0", engine=LocalEngine(workers=1)
    )
    return open_view(folder / "v0")


def test_an_existing_index_is_reopened_instead_of_rebuilt(many, tmp_path, monkeypatch):
    first = built(many, tmp_path)
    monkeypatch.setattr(IndexBuilder, "_build", None)
    again = built(many, tmp_path)
    assert again.filtered == again.searched == 300
    for query in QUERIES:
        one, other = (each.search(folded_query(query), 0, 1000, seconds=60) for each in (first, again))
        assert one == other


def test_each_tokenizer_has_its_own_index_and_without_one_there_is_no_text(many, tmp_path):
    blind = replace(many, text=TokenText(None), without_text="not here")
    assert IndexBuilder(many, tmp_path).folder("train") != IndexBuilder(blind, tmp_path).folder("train")
    index = built(blind, tmp_path)
    assert (index.filtered, index.searched) == (300, 0)
    assert index.search(b"mill", 0, 10).episodes == []


def test_a_growing_index_finds_earlier_episodes_and_is_stored_completely_or_not_at_all(many, tmp_path, small_blocks):
    builder = IndexBuilder(many, tmp_path)
    index, seen = builder.indexes["train"], []
    right = naive(many, "mill")
    folded = PieceTable.folded

    def watched(table, rows):
        hits = index.search(folded_query("mill"), 0, 1000, seconds=60)
        assert hits.episodes == [number for number in right if number < index.searched]
        assert index.filtered == 300
        seen.append(index.searched)
        if len(seen) == 4:
            builder._stop.set()
        return folded(table, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PieceTable, "folded", watched)
        builder.start()
        builder.wait()
    assert len(seen) == 4 and seen[0] == 0 and 0 < seen[1] < seen[3] < index.searched < 300
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
    assert built(many, tmp_path).searched == 300


def test_leftovers_of_a_killed_viewer_are_replaced(many, tmp_path):
    building = IndexBuilder(many, tmp_path).folder("train").with_suffix(".building")
    building.mkdir(parents=True)
    (building / "text.bin").write_bytes(b"half")
    assert built(many, tmp_path).search(folded_query("mill"), 0, 1000, seconds=60).episodes == naive(many, "mill")
    assert not building.exists()


def test_two_concurrent_viewers_build_one_index(many, tmp_path, monkeypatch):
    made = []
    build = IndexBuilder._build
    monkeypatch.setattr(IndexBuilder, "_build", lambda *args: made.append(1) or build(*args))
    builders = [IndexBuilder(many, tmp_path) for _ in range(3)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.wait()
    assert made == [1]
    assert [builder.indexes["train"].searched for builder in builders] == [300] * 3


def test_a_damaged_index_is_named_and_can_be_removed(many, tmp_path):
    built(many, tmp_path)
    folder = IndexBuilder(many, tmp_path).folder("train")
    np.save(folder / "columns.npy", np.zeros(3))
    builder = IndexBuilder(many, tmp_path)
    builder.start()
    builder.wait()
    assert "remove" in builder.indexes["train"].error


def test_a_match_is_located_by_tokens_even_if_case_folding_changes_lengths(chats):
    ids = chats.row("train", 2).ids.tolist()  # <|usr|>ä Ö<|eot|><|asst|>ß é<|eot|>
    for query, start, found in (("ä ö", 1, "ä Ö"), ("SS É", 8, "ß é"), ("s", 0, "s"), ("ö<", 4, "Ö<")):
        place = locate(ids, chats.text, query)
        assert (place.start, place.match) == (start, found), query
        covered = b"".join(chats.text.piece(id) for id in ids[place.start : place.stop]).decode()
        assert query.casefold() in covered.casefold()
    assert locate(ids, chats.text, "none of it") is None


def test_an_empty_query_is_refused():
    with pytest.raises(UsageError, match="the search text is empty"):
        folded_query("")


def test_without_its_tokenizer_a_dataset_cannot_be_searched(many):
    with pytest.raises(DataError, match="--tokenizer"):
        next(find(many.dataset["train"], TokenText(None), "mill"))
