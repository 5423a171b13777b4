from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest
from show_fixtures import line, make

from chatmill.rows import Part, Role, Rule
from chatmill.show.stats import SHARES, split_stats


def by_hand(episodes, split: str) -> dict:
    roles, parts, rules, sources = (defaultdict(lambda: [0, 0]) for _ in range(4))
    lengths, shares, segments, untrained = [], Counter(), Counter(), 0
    for number in range(len(episodes)):
        row = episodes.rows([number])
        trained = 0
        for segment in range(len(row.origins)):
            spans = row.spans[row.first_span[segment] : row.first_span[segment + 1]]
            file = int(row.origins[segment]["file"])
            source = row.files[file].source if file < len(row.files) else "(unknown)"
            padding = len(spans) and spans[0]["part"] == Part.PAD
            if len(spans) and not padding:
                segments[source] += 1
            for span in spans:
                for _ in range(int(span["length"])):
                    on = int(span["weight"] > 0)
                    trained += on
                    for table, name in (
                        (roles, Role(span["role"]).name),
                        (parts, Part(span["part"]).name),
                        (rules, Rule(span["rule"]).name),
                    ):
                        table[name.lower()][0] += 1
                        table[name.lower()][1] += on
                    if not padding:
                        sources[source][0] += 1
                        sources[source][1] += on
        lengths.append(len(row.ids))
        shares[min(SHARES - 1, trained * SHARES // len(row.ids))] += 1
        untrained += trained == 0
    return {
        "roles": dict(roles),
        "parts": dict(parts),
        "rules": dict(rules),
        "sources": dict(sources),
        "segments": dict(segments),
        "lengths": lengths,
        "shares": [shares[at] for at in range(SHARES)],
        "untrained": untrained,
    }


@pytest.mark.parametrize(
    "options",
    [
        {"shard_tokens": 100},
        {"pack": 64},
        {"max_tokens": 30, "fit": "blocks", "format": "post-training"},
        {"max_tokens": 20, "fit": "windows"},
    ],
)
def test_every_count_equals_that_of_a_loop_over_all_tokens(tmp_path, options):
    rng = np.random.default_rng(5)
    lines = [line(*("w" * int(n) for n in rng.integers(1, 30, 2 * int(rng.integers(1, 4))))) for _ in range(40)]
    shown = make(tmp_path, lines, **options)
    episodes = shown.dataset["train"]
    found, right = split_stats(episodes, "train", block_sizes=(16, 64)), by_hand(episodes, "train")
    for name in ("roles", "parts", "rules", "sources"):
        assert {key: [count.tokens, count.trained] for key, count in getattr(found, name).items()} == right[name]
    assert {name: count.segments for name, count in found.sources.items()} == right["segments"]
    assert (found.rows, found.tokens) == (len(right["lengths"]), sum(right["lengths"]))
    assert found.trained == sum(on for _, on in right["roles"].values())
    assert found.share_counts.tolist() == right["shares"]
    assert found.untrained_rows == right["untrained"]
    assert [found.quantile(q) for q in (0, 0.1, 0.5, 0.9, 1)] == [
        sorted(right["lengths"])[max(1, -int(-q * len(right["lengths"]) // 1)) - 1] for q in (0, 0.1, 0.5, 0.9, 1)
    ]
    longest = sorted(enumerate(right["lengths"]), key=lambda each: (-each[1], each[0]))[:10]
    assert [(row.episode, row.tokens) for row in found.longest] == longest
    assert all(row.file == "chat.jsonl" for row in found.longest)


def test_the_fill_is_the_share_of_a_packed_row_without_padding(tmp_path):
    # With block size 23, a packed row has 24 tokens: exactly four episodes of 6 tokens.
    shown = make(tmp_path, [line("a", "b") for _ in range(8)])
    fill, tight, short = split_stats(shown.dataset["train"], "train", block_sizes=(23, 8, 4)).fills
    assert (fill.packed, fill.alone, fill.rows, fill.cut) == (1.0, 0.25, 2, 0)
    assert (tight.packed, tight.alone, tight.rows, tight.cut) == (6 / 9, 6 / 9, 8, 0)
    assert (short.packed, short.rows, short.cut) == (1.0, 8, 8)


def test_progress_is_reported_for_every_row(chats):
    told = []
    split_stats(chats.dataset["train"], "train", progress=told.append)
    assert sum(told) == 6
