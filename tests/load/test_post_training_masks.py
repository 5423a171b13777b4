"""Compare loading for post-training, token by token, with a plain Python implementation of the specification.

The Python implementation works on lists of tokens, and shares no code with chatmill.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from load_fixtures import write_source

from chatmill.errors import DataError
from chatmill.format import load_format
from chatmill.load import EpisodeLoader
from chatmill.prepare import InputSource, Job, prepare_dataset
from chatmill.rows import rows_from_mask
from chatmill.store import open_dataset
from chatmill.store.reweigh import reweigh_dataset
from chatmill.tokenizer import open_tokenizer
from chatmill.train.config import TrainConfig

SYSTEM, USER, ASSISTANT, END, EOS = MARKERS = ("<|SYSTEM|>", "<|USER|>", "<|ASSISTANT|>", "<|END|>", "<|EOS|>")
IDS = open_tokenizer("bytes", control=load_format("post-training").tokens).special_token_ids()
ID = dict(zip(MARKERS, (IDS[key] for key in ("sys", "usr", "asst", "eot", "eos")), strict=True))


# The oracle.


def tokens_of(text: str) -> list:
    pieces = re.split(r"(<\|(?:SYSTEM|USER|ASSISTANT|END|EOS)\|>)", text)
    return [token for piece in pieces for token in ([piece] if piece in MARKERS else piece.encode())]


def spans_of(tokens: list) -> list[tuple[str, int, int, bool]]:
    """Return (marker, start, stop, is_closed) of each span. Another marker or EOS ends a span without closing it."""
    spans: list[tuple[str, int, int, bool]] = []
    opener, start = None, 0
    for at, token in enumerate([*tokens, EOS]):
        if token not in MARKERS:
            continue
        if opener is not None:
            spans.append((opener, start, at + (token == END), token == END))
        opener, start = (token, at) if token in (SYSTEM, USER, ASSISTANT) else (None, 0)
    return spans


def mask_of(block: list) -> list[bool]:
    mask, at = [False] * len(block), 0
    while at < len(block):
        stop = block.index(EOS, at) if EOS in block[at:] else len(block)
        user_is_complete = False
        for opener, first, last, closed in spans_of(block[at:stop]):
            if opener == USER:
                user_is_complete = closed
            elif opener == ASSISTANT and not closed:
                break
            elif opener == ASSISTANT and user_is_complete:
                mask[at + first : at + last] = [True] * (last - first)
        at = stop + 1
    return mask


def blocks_of(documents: list[list], size: int) -> list[list]:
    blocks: list[list] = [[]]
    for document in documents:
        spans, at = spans_of(document), 0
        while at <= len(document):
            inside_user = any(opener == USER and first < at < last for opener, first, last, _ in spans)
            if not blocks[-1] and inside_user:
                before = [span for span in spans if span[0] == SYSTEM and span[2] <= at and span[3]]
                system = document[before[-1][1] : before[-1][2]] if before else []
                blocks[-1] = [*(system if len(system) + 2 <= size else []), USER]
                user_stop = next(last for opener, first, last, _ in spans if opener == USER and first < at < last)
                if user_stop - at > size - len(blocks[-1]):
                    blocks[-1] += document[at : at + size - len(blocks[-1])]
                    blocks.append([])
                    break
            blocks[-1].append([*document, EOS][at])
            at += 1
            if len(blocks[-1]) == size:
                blocks.append([])
    return [block + [EOS] * (size - len(block)) for block in blocks if block]


PARTS = [*MARKERS, END, END, USER, ASSISTANT, " ", "\n", "a", "bcd", f"{USER}q{END}", f"{ASSISTANT}yes{END}"]
EXCHANGE = f"{USER}q{END}{ASSISTANT}a{END}"
soups = st.lists(st.sampled_from(PARTS), max_size=16).map("".join).filter(lambda text: text.replace(EOS, "").strip())
systems = st.builds("{}{}".format, st.sampled_from(["", f"{SYSTEM}s{END}"]), soups)
files = st.lists(systems | st.just(EXCHANGE * 3), min_size=1, max_size=8)


def conversations(texts: list[str]) -> list[list]:
    return [tokens_of(piece) for text in texts for piece in text.split(EOS) if piece.strip()]


def build(folder: Path, texts: list[str], **options) -> Path:
    (folder / "in.txt").write_text("".join(json.dumps(text) + "\n" for text in [*texts, EXCHANGE]))
    source = InputSource((str(folder / "in.txt"),), shape="transcript-lines")
    prepare_dataset(Job((source,), format="post-training", **options), folder / "data", overwrite=True)
    return folder / "data"


def post_training(block_size: int, **changes) -> TrainConfig:
    return TrainConfig.from_mapping({"post_training": True, "block_size": block_size, "batch_size": 1, **changes})


LEFT_OPEN = f"{USER}q{END}{ASSISTANT}no{USER}q{END}{ASSISTANT}a{END}"


@settings(max_examples=15)
@given(files, st.integers(3, 24))
@example([LEFT_OPEN], 6)
def test_loaded_blocks_follow_the_specification(tmp_path_factory, texts, size):
    data = build(tmp_path_factory.mktemp("blocks"), texts, fit="blocks", max_tokens=size)
    loader = EpisodeLoader(data, post_training(size - 1), tensors=False)
    batches = list(loader.one_pass("train"))
    expected = blocks_of(conversations([*texts, EXCHANGE]), size)
    x = [[ID.get(token, token) for token in block[:-1]] for block in expected]
    y = [
        [
            ID.get(token, token) if trained else -100
            for token, trained in zip(block[1:], mask_of(block)[1:], strict=True)
        ]
        for block in expected
    ]
    assert np.concatenate([batch.x for batch in batches]).tolist() == x
    assert np.concatenate([batch.y for batch in batches]).tolist() == y
    loader.close()


@settings(max_examples=15)
@given(
    files,
    st.integers(4, 24),
    st.sampled_from(["exchanges", "turns", "tail", "windows", "drop"]),
    st.sampled_from([None, 40]),
)
@example([LEFT_OPEN], 8, "tail", None)
def test_rows_that_are_not_blocks_follow_the_same_rules(tmp_path_factory, texts, size, fit, pack):
    data = build(tmp_path_factory.mktemp("rows"), texts, fit=fit, max_tokens=max(size, 8), pack=pack)
    names = {id: marker for marker, id in ID.items()}
    rows = open_dataset(data)["train"].rows(range(len(open_dataset(data)["train"])))
    rows.check()
    # The rules apply to each conversation of a packed row separately.
    for start, stop in zip(rows.segment_start[:-1].tolist(), rows.segment_start[1:].tolist(), strict=True):
        row = [names.get(id, id) for id in rows.ids[start:stop].tolist()]
        mask, right = rows.mask()[start:stop].tolist(), mask_of(row)
        if fit == "windows":
            # Windows overlap. Tokens in the mask of an earlier window are not trained on again.
            assert not any(trained and not may for trained, may in zip(mask, right, strict=True))
        else:
            assert mask == right
        assert any(mask)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"fit": "blocks", "max_tokens": 33}, "is made of blocks of 33 tokens (block_size 32)"),
        ({"fit": "turns"}, "was made with --fit turns"),
        ({"fit": "tail", "max_tokens": 17}, "was made with --fit tail"),
        ({"fit": "drop", "pack": 17}, "was made with --fit drop --pack 17"),
        (
            {"fit": "blocks", "max_tokens": 17, "train_on": "all"},
            "its loss mask includes more than answers (--train-on all)",
        ),
    ],
)
def test_other_datasets_are_refused_with_the_command_that_makes_blocks(tmp_path, options, what):
    data = build(tmp_path, [], **options)
    with pytest.raises(DataError) as refused:
        EpisodeLoader(data, post_training(16))
    assert str(refused.value) == (
        f"{data}: {what}, but post_training requires blocks of block_size + 1 = 17 tokens; build them with "
        "chatmill prepare … --format post-training --fit blocks --max-tokens 17"
    )
    EpisodeLoader(data, post_training(16, post_training=False, use_loss_mask=True)).close()


def test_reweighed_blocks_are_accepted_unless_they_train_more_than_answers(tmp_path):
    data = build(tmp_path, [], fit="blocks", max_tokens=17)
    for train_on in ("assistant", "all"):
        reweigh_dataset(data, tmp_path / train_on, train_on=train_on)
    EpisodeLoader(tmp_path / "assistant", post_training(16)).close()
    right = "but post_training requires"
    with pytest.raises(DataError, match=rf"all: its loss mask includes more than answers \(--train-on all\), {right}"):
        EpisodeLoader(tmp_path / "all", post_training(16))


def test_a_folder_without_metadata_is_refused(tmp_path):
    data = build(tmp_path, [], fit="blocks", max_tokens=17)
    for path in [*data.rglob("*.json"), *data.rglob("spans.bin"), *data.rglob("origins.bin")]:
        path.unlink()
    with pytest.raises(
        DataError, match=r"data: does not record how its rows were made .*--fit blocks --max-tokens 17$"
    ):
        EpisodeLoader(data, post_training(16, pad_token_id=0))


def test_a_primer_cache_is_refused(tmp_path):
    rows = rows_from_mask(np.arange(34, dtype=np.uint32), np.ones(34), [17, 17])
    cache = write_source(tmp_path, "primer", {"train": rows, "val": rows})
    with pytest.raises(
        DataError, match=r"primer: is a cache with one conversation per row, but post_training requires"
    ):
        EpisodeLoader(cache, post_training(16))


def test_every_source_of_a_mix_is_checked(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    for name, fit in (("one", "blocks"), ("two", "turns")):
        (tmp_path / name).mkdir()
        build(tmp_path / name, [], fit=fit, max_tokens=17).rename(root / name)
    with pytest.raises(DataError, match=r"root/two: was made with --fit turns, but post_training requires"):
        EpisodeLoader(root, post_training(16, mix_sft={"one": 1, "two": 1}))
