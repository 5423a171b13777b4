from __future__ import annotations

import numpy as np
import pytest
from show_fixtures import HOSTILE, HOSTILE_FILE, hostile_lines, line, make
from viewing import open_browser, watched_page

from chatmill.format import load_format
from chatmill.ledger import Ledger
from chatmill.rows import ORIGIN, SPAN, File, Part, Role, Rows, Rule
from chatmill.show.dataset import open_view
from chatmill.store.metadata import Metadata, write_metadata
from chatmill.store.write import SplitWriter
from chatmill.tokenizer import train_bpe


@pytest.fixture(scope="session")
def chats(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chats")
    texts = [
        ("hi", "yo"),
        ("Gold?", "It is Au.", "And silver?", "It is Ag."),
        ("ä Ö", "ß é"),
        ("", "nothing"),
        ("a", "b"),
    ]
    return make(folder, [*(line(*each) for each in texts), line("[x]", "y ] z")])


@pytest.fixture(scope="session")
def hostile(tmp_path_factory):
    """Return a dataset whose texts and file name contain markup, scripts and terminal escapes.

    The tokenizer is trained on these texts, so whole tags and escapes are single tokens.
    """
    folder = tmp_path_factory.mktemp("hostile")
    control = list(load_format("chatml").tokens.values())
    (folder / "tokenizer.json").write_bytes(train_bpe(HOSTILE * 20, vocab_size=1200, control=control))
    return make(folder, hostile_lines(), file=HOSTILE_FILE, format="chatml", tokenizer=str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def browser():
    with open_browser() as opened:
        yield opened


@pytest.fixture
def watched(browser):
    with watched_page(browser) as seen:
        seen.page.on("download", lambda download: seen.faults.append("download"))
        yield seen


@pytest.fixture
def rollout_target(tmp_path):
    """Return a row in which the label of one token differs from its id, as it does for rollout coordinates."""
    shown = make(tmp_path, [line("q", "a")])
    spans = np.zeros(4, dtype=SPAN)
    spans["length"], spans["message"], spans["target"] = [1, 1, 1, 2], [0, 1, 1, 1], [-1, -1, 52, -1]
    spans["role"], spans["weight"] = [Role.USER, *[Role.ASSISTANT] * 3], [0, 0, 1, 1]
    spans["part"] = [Part.CONTENT, Part.PREFIX, Part.SLOT, Part.STRUCTURE]
    spans["rule"] = [Rule.PROMPT, Rule.ROLLOUT, Rule.MATCHED, Rule.MISSED]
    origins = np.zeros(1, dtype=ORIGIN)
    ids = np.array([113, 49, 50, 53, 54], dtype=np.uint32)
    rows = Rows(ids, spans, np.array([0, 4]), origins, np.array([0, 1]), (File("made", "rollouts.jsonl"),))
    metadata = shown.dataset.metadata
    staging = tmp_path / "rollout"
    with SplitWriter(staging / "train", vocab_size=metadata.vocab_size, shard_tokens=100) as writer:
        writer.append(rows)
        info = writer.close()
    ledger = Ledger()
    ledger.add("read", rows=1)
    ledger.add("rendered", rows=1, tokens=5, trained=3)
    ledger.add("stored", rows=1, tokens=5, trained=3)
    write_metadata(
        staging,
        Metadata(
            vocab_size=metadata.vocab_size,
            format=metadata.format,
            tokenizer=metadata.tokenizer,
            special_token_ids=metadata.special_token_ids,
            pad_token_id=metadata.pad_token_id,
            splits={"train": info},
            ledger=ledger,
            config={},
        ),
        tokenizer_state=shown.dataset.tokenizer_state(),
    )
    return open_view(staging)
