from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import plain_rows
import pytest
from chat_datasets import chat, chats, rows_of, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from store_fixtures import write_dataset

from chatmill.fit import stream_blocks
from chatmill.ledger import Ledger
from chatmill.rows import Role, Rule
from chatmill.store import diff as module
from chatmill.store.diff import Cause, ConversationOrigin, Difference, diff_datasets
from chatmill.store.reweigh import reweigh_dataset

TEN = [chat(f"question {n}", f"answer {n}", line=n + 1) for n in range(10)]


def counts(found) -> dict[str, int]:
    return {"equal": found.equal} | {name: kind.count for name, kind in found.kinds.items() if kind.count}


def pair(tmp_path: Path, one, other, **options) -> tuple[Path, Path]:
    write_rows(tmp_path / "a", one if isinstance(one, dict) else {"train": one})
    write_rows(tmp_path / "b", other if isinstance(other, dict) else {"train": other}, **options)
    return tmp_path / "a", tmp_path / "b"


def test_a_dataset_equals_itself_and_its_copy(tmp_path):
    write_rows(tmp_path / "a", {"train": rows_of(TEN)})
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    found = diff_datasets(tmp_path / "a", tmp_path / "b")
    assert (found.identical, found.same, counts(found), found.causes) == (True, True, {"equal": 10}, ())


def test_added_and_removed_conversations_are_named_by_file_and_line(tmp_path):
    new = [chat("new", "one", line=40, file="more.jsonl"), chat("new", "two", line=41, file="more.jsonl")]
    found = diff_datasets(*pair(tmp_path, rows_of(TEN), rows_of([*TEN[5:], *new])))
    assert counts(found) == {"equal": 5, "added": 2, "removed": 5}
    assert found.added == Difference(
        2, (ConversationOrigin("train", "more.jsonl", 40), ConversationOrigin("train", "more.jsonl", 41))
    )
    assert found.removed.examples == tuple(ConversationOrigin("train", "chat.jsonl", line) for line in (1, 2, 3))
    assert found.causes == (
        Cause("input", "files", ["chat.jsonl"], ["chat.jsonl", "more.jsonl"]),
        Cause("input", "records read", 10, 7),
    )


def test_an_edited_text_is_a_different_conversation_caused_by_the_input(tmp_path):
    edited = [*TEN[:9], chat("question 9", "a better answer", line=10)]
    found = diff_datasets(*pair(tmp_path, rows_of(TEN), rows_of(edited)))
    assert counts(found) == {"equal": 9, "added": 1, "removed": 1}
    assert found.causes == (Cause("input", "conversations", 1, 1),)


def test_another_format_changes_every_conversation_and_is_the_cause(tmp_path):
    found = diff_datasets(*pair(tmp_path, rows_of(TEN), rows_of(TEN, format="primer"), format="primer"))
    assert counts(found) == {"equal": 0, "changed": 10}
    assert found.changed.examples == tuple(ConversationOrigin("train", "chat.jsonl", line) for line in (1, 2, 3))
    assert {cause.part for cause in found.causes} == {"format"}
    assert Cause("format", "name", "chatml", "primer") in found.causes


def test_the_tokenizer_and_the_fit_are_named_when_they_differ(tmp_path):
    found = diff_datasets(*pair(tmp_path, rows_of(TEN), rows_of(TEN), tokenizer="other", config={"max_tokens": 64}))
    assert [(cause.part, cause.what) for cause in found.causes] == [("tokenizer", "sha256"), ("fit", "max_tokens")]
    assert (found.identical, found.same) == (False, True)


def test_after_reweigh_only_masks_differ_and_train_on_is_the_cause(tmp_path):
    write_rows(tmp_path / "a", {"train": rows_of([chat("hi", "yo", "so", "what", line=1), *TEN[1:]])})
    reweigh_dataset(tmp_path / "a", tmp_path / "b", train_on="last")
    found = diff_datasets(tmp_path / "a", tmp_path / "b")
    assert counts(found) == {"equal": 9, "mask": 1}
    assert found.mask.examples == (ConversationOrigin("train", "chat.jsonl", 1),)
    assert found.causes == (Cause("fit", "train_on", "assistant", "last"),)


def test_packing_order_and_shards_make_no_difference(tmp_path):
    records = chats(0, 60)
    shuffled = [records[n] for n in np.random.default_rng(0).permutation(60)]
    paths = pair(tmp_path, rows_of(records), rows_of(shuffled, pack=700), shard_tokens=3000)
    found = diff_datasets(*paths)
    assert (found.identical, found.same, found.equal) == (False, True, 60)


def test_a_conversation_in_the_other_split_has_moved(tmp_path):
    one = {"train": rows_of(TEN[:8]), "val": rows_of(TEN[8:])}
    other = {"train": rows_of(TEN[:7]), "val": rows_of(TEN[7:])}
    found = diff_datasets(*pair(tmp_path, one, other))
    assert counts(found) == {"equal": 9, "moved": 1}
    assert found.moved.examples == (ConversationOrigin("val", "chat.jsonl", 8),)


def test_each_copy_of_a_conversation_is_matched_at_most_once(tmp_path):
    found = diff_datasets(*pair(tmp_path, rows_of([TEN[0]] * 5), rows_of([TEN[0]] * 3)))
    assert counts(found) == {"equal": 3, "removed": 2}


def test_padding_does_not_count_as_a_conversation(tmp_path):
    whole = rows_of(chats(0, 5), format="post-training")
    blocks = list(stream_blocks([whole], 512, ledger=Ledger()))
    write_rows(tmp_path / "a", {"train": blocks[0]}, format="post-training")
    write_rows(tmp_path / "b", {"train": blocks[0]}, format="post-training", shard_tokens=10**6)
    assert any(len(block.origins) > 5 for block in blocks)
    found = diff_datasets(tmp_path / "a", tmp_path / "b")
    assert found.same


def test_without_keys_conversations_are_matched_by_their_ids(tmp_path):
    write_rows(tmp_path / "a", {"train": rows_of(TEN)}, shard_tokens=10**6)
    for name in ("tokens.bin", "mask.bin", "episodes.idx"):
        path = tmp_path / "b" / "train" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tmp_path / "a/train/shard_00000" / name, path)
    found = diff_datasets(tmp_path / "a", tmp_path / "b")
    assert (found.by_key, found.same, found.equal, found.causes) == (False, True, 10, ())
    mask = tmp_path / "b/train/mask.bin"
    mask.write_bytes(b"\1" + mask.read_bytes()[1:])
    found = diff_datasets(tmp_path / "a", tmp_path / "b")
    assert (counts(found), found.mask.examples) == ({"equal": 9, "mask": 1}, (ConversationOrigin("train", None, 0),))


conversations_ = st.tuples(
    st.integers(1, 3), st.sampled_from([(5,), (5, 5), (5, 6), (6, 5)]), st.sampled_from([(0, 0), (0, 1), (1, 1)])
)
splits_ = st.lists(st.lists(conversations_, max_size=3), max_size=4)


def as_rows(plain, *, one_span: bool):
    """Build rows with one span per token.

    With `one_span`, a conversation gets a single span if all its tokens have the same weight.
    """

    def segment(who, ids, mask):
        spans = [((id,), trained) for id, trained in zip(ids, mask, strict=False)]
        if one_span and len({trained for _, trained in spans}) == 1:
            spans = [(ids, mask[0])]
        return ("a", who), [(ids, Role.USER, 0, float(trained), Rule.GIVEN, -1) for ids, trained in spans]

    return plain_rows.build([[segment(*conversation) for conversation in row] for row in plain])


def expected(one, other) -> dict[str, int]:
    left, right = (
        [
            {"split": split, "who": who, "ids": ids, "mask": mask[: len(ids)]}
            for split, rows in splits.items()
            for row in rows
            for who, ids, mask in row
        ]
        for splits in (one, other)
    )
    found = Counter()
    for name, same in (
        ("equal", ("who", "ids", "mask", "split")),
        ("moved", ("who", "ids", "mask")),
        ("mask", ("who", "ids")),
        ("changed", ("who",)),
    ):
        for conversation in list(left):
            match = next((c for c in right if all(c[key] == conversation[key] for key in same)), None)
            if match is not None:
                left.remove(conversation)
                right.remove(match)
                found[name] += 1
    found["removed"], found["added"] = len(left), len(right)
    return {"equal": 0} | {name: count for name, count in found.items() if count}


@settings(max_examples=60)
@given(one=st.tuples(splits_, splits_), other=st.tuples(splits_, splits_), tokens=st.integers(1, 20))
def test_the_diff_equals_matching_one_conversation_at_a_time(tmp_path_factory, one, other, tokens):
    folder = tmp_path_factory.mktemp("diff")
    one, other = ({"train": train, "val": val} for train, val in (one, other))
    for name, splits, one_span in (("a", one, True), ("b", other, False)):
        rows = {split: as_rows(plain, one_span=one_span) for split, plain in splits.items()}
        write_dataset(folder / name, rows, shard_tokens=7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TOKENS", tokens)
        assert counts(diff_datasets(folder / "a", folder / "b")) == expected(one, other)


def test_ten_thousand_conversations_of_a_few_ids_have_distinct_hashes():
    rng = np.random.default_rng(1)
    different = sorted({tuple(rng.integers(0, 3, rng.integers(1, 12)).tolist()) for _ in range(10_000)})
    masks = [(1,) * len(ids) for ids in different]
    rows = as_rows([[(1, ids, mask)] for ids, mask in zip(different, masks, strict=True)], one_span=False)
    ids, mask = module._hashes(rows)
    assert len(np.unique(ids)) == len(different)
    lengths = {}
    for one, other in zip(mask.tolist(), different, strict=True):
        assert lengths.setdefault(len(other), one) == one
    assert len(set(lengths.values())) == len(lengths)


def test_the_train_on_of_a_source_is_a_difference_of_fit_and_not_of_input(tmp_path):
    def config(*train_on: str) -> dict:
        sources = [{"file": f"{n}.jsonl", "source": "chat", "train_on": choice} for n, choice in enumerate(train_on)]
        return {"sources": sources}

    for name, train_on in (("a", ("assistant", "assistant")), ("b", ("assistant", "last")), ("c", ("last", "last"))):
        write_rows(tmp_path / name, {"train": rows_of(TEN)}, config=config(*train_on))
    assert diff_datasets(tmp_path / "a", tmp_path / "c").causes == (Cause("fit", "train_on", "assistant", "last"),)
    two = {"0.jsonl": "assistant", "1.jsonl": "last"}
    assert diff_datasets(tmp_path / "a", tmp_path / "b").causes == (Cause("fit", "train_on", "assistant", two),)
    reweigh_dataset(tmp_path / "a", tmp_path / "d", train_on="last")
    assert diff_datasets(tmp_path / "c", tmp_path / "d").causes == ()
