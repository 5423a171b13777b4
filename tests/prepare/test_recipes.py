"""Test a recipe with five sources of five shapes, filters of every kind, near-duplicates, weights and a val split.

The expected records are computed here independently of chatmill.
"""

from __future__ import annotations

import json
import random
import re
import unicodedata
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from chatmill.prepare import LocalEngine, load_recipe, prepare_dataset

UNIT_BYTES = 4000
PREDICATE = "predicate_of_the_recipe_test:keep"
TEXT = """
river garden morning window teacher mountain letter winter market village holiday music story number island bridge
paper summer kitchen station doctor weather picture animal country history language machine minute nature office
people planet problem reason school season second sister street student system travel valley yellow bottle camera
castle circle corner cotton danger dinner engine family finger flower forest friend ground health honest jacket leader
little member middle mirror moment mother museum nation needle orange parent pencil person pocket police potato prince
public rabbit record remote ribbon rocket sample shadow silver simple spring square stable sugar supper
"""
WORDS = TEXT.split()
GERMAN = "Das ist eine Antwort in deutscher Sprache, und sie ist lang genug, damit man das auch sicher erkennen kann."
RECIPE = f"""
near_dedupe: 0.8
precedence: [dolly, chat]
filters: {{min_tokens: 120, max_tokens: 2000, languages: [en], no_match: "pass ?word"}}
sources:
- {{name: chat, inputs: chat.jsonl, weight: 3, val_split: 0.3, filters: {{min_turns: 3}}}}
- {{name: share, inputs: [share_1.jsonl, share_2.jsonl], weight: 1, filters: {{max_turns: 4}}}}
- {{name: alpaca, inputs: alpaca.jsonl, weight: 1, max_samples: 12, filters: {{match: "(?i)please"}}}}
- {{name: dolly, inputs: dolly.jsonl, weight: 2, filters: {{min_trained_share: 0.2, max_trained_share: 0.8}}}}
- {{name: tree, inputs: tree.jsonl, weight: 0.5, filters: {{predicate: "{PREDICATE}"}}}}
"""
NAMES = ("chat", "share", "alpaca", "dolly", "tree")


@dataclass
class Conversation:
    source: str
    file: str
    line: int
    turns: list[tuple[str, str]]

    @property
    def place(self) -> dict[str, Any]:
        return {"source": self.source, "file": self.file, "line": self.line}

    @property
    def tokens(self) -> int:
        """Number of tokens in ChatML with one token per byte: <|im_start|>role\\ncontent<|im_end|>\\n."""
        return sum(len(role) + len(text.encode()) + 4 for role, text in self.turns)

    @property
    def trained(self) -> int:
        """Number of trained tokens: the text of each answer and its end token."""
        return sum(len(text.encode()) + 1 for role, text in self.turns if role == "assistant")


# The files.


def corpus(seed: int) -> list[Conversation]:
    rng = random.Random(seed)

    def text(count: int) -> str:
        return "Please tell the " + " and the ".join(rng.sample(WORDS, count)) + "."

    plain = {"chat": 4, "share": 4, "alpaca": 2, "dolly": 2, "tree": 2}
    out = []
    for name in NAMES:
        for number in range(24):
            turns = plain[name]
            lengths = (12, 12)
            kind = number % 12
            if kind == 1:
                lengths = (1, 1)  # min_tokens
            if kind == 2:
                turns = {"chat": 2, "share": 6}.get(name, turns)
            if kind == 3:
                lengths = {"dolly": (40, 2), "tree": (30, 4)}.get(name, lengths)
            if kind == 4 and name == "dolly":
                lengths = (2, 40)
            said = [text(lengths[turn % 2]) for turn in range(turns)]
            if kind == 5:
                said[-1] = GERMAN
            if kind == 6:
                said[0] += " The password is 1234."
            if kind == 7:
                said = [each.replace("Please", "Kindly") for each in said]  # match
            if kind == 8 and number > 12:
                said[-1] += " More" * 2000  # max_tokens
            if kind == 9:
                said[-1] += " Indeed!"
            roles = ("user", "assistant")
            out.append(Conversation(name, "", 0, [(roles[turn % 2], each) for turn, each in enumerate(said)]))
    by_name = {name: [each for each in out if each.source == name] for name in NAMES}
    for number, (one, other) in enumerate(
        [
            ("chat", "share"),
            ("alpaca", "dolly"),
            ("tree", "alpaca"),
            ("share", "chat"),
            ("dolly", "tree"),
            ("tree", "tree"),
        ]
    ):
        for at in (0, 10):
            copied = by_name[one][at].turns
            if number % 2 or at:
                copied = [*copied[:-1], (copied[-1][0], copied[-1][1][:-1] + f", or {number}.")]
            else:
                copied = [(role, f"  {words.upper()}\n".replace(" ", "  ")) for role, words in copied]
            out.append(Conversation(other, "", 0, copied))
    rng.shuffle(out)
    return out


def write(conversations: list[Conversation]) -> list[Conversation]:
    lines: dict[str, list[str]] = defaultdict(list)
    for number, each in enumerate(conversations):
        each.file = f"{each.source}_{1 + number % 2}.jsonl" if each.source == "share" else f"{each.source}.jsonl"
        each.line = len(lines[each.file]) + 1
        texts = [text for _, text in each.turns]
        if each.source == "chat":
            records: list[Any] = [{"messages": [{"role": role, "content": text} for role, text in each.turns]}]
        elif each.source == "share":
            names = {"user": "human", "assistant": "gpt"}
            records = [{"conversations": [{"from": names[role], "value": text} for role, text in each.turns]}]
        elif each.source == "alpaca":
            # A nonempty input would be appended to the instruction after a blank line.
            records = [{"instruction": texts[0], "input": "", "output": texts[1]}]
        elif each.source == "dolly":
            records = [{"instruction": texts[0], "context": "", "response": texts[1], "category": "qa"}]
        else:
            tree = f"tree-{number}"
            records = [
                {
                    "message_id": f"{tree}-{turn}",
                    "message_tree_id": tree,
                    "parent_id": f"{tree}-{turn - 1}" if turn else None,
                    "role": "assistant" if role == "assistant" else "prompter",
                    "text": text,
                }
                for turn, (role, text) in enumerate(each.turns)
            ]
        lines[each.file] += [json.dumps(record) for record in records]
    for file, of_file in lines.items():
        Path(file).write_text("".join(f"{line}\n" for line in of_file))
    files = ["chat.jsonl", "share_1.jsonl", "share_2.jsonl", "alpaca.jsonl", "dolly.jsonl", "tree.jsonl"]
    return sorted(conversations, key=lambda each: (files.index(each.file), each.line))


def failed_filter(each: Conversation, identify: Any) -> str | None:
    texts = [text for _, text in each.turns]
    answers = "\n".join(text for role, text in each.turns if role == "assistant")
    share = each.trained / each.tokens
    tests = {
        "min_turns": each.source == "chat" and len(texts) < 3,
        "max_turns": each.source == "share" and len(texts) > 4,
        "match": each.source == "alpaca" and not any(re.search("(?i)please", text) for text in texts),
        "no_match": any(re.search("pass ?word", text) for text in texts),
        "languages": identify(answers[:2000])[0] != "en",
        "predicate": each.source == "tree" and len(texts[0]) > 3 * len(texts[1]),
        "min_tokens": each.tokens < 120,
        "max_tokens": each.tokens > 2000,
        "min_trained_share": each.source == "dolly" and share < 0.2,
        "max_trained_share": each.source == "dolly" and share > 0.8,
    }
    return next((name for name, fails in tests.items() if fails), None)


def normalized(each: Conversation) -> tuple[tuple[str, str], ...]:
    return tuple((role, " ".join(unicodedata.normalize("NFKC", text).lower().split())) for role, text in each.turns)


def shingles(each: Conversation) -> set[bytes]:
    data = [text.encode() for _, text in each.turns]
    return {text[at : at + 5] for text in data for at in range(len(text) - 4)}


def expected(conversations: list[Conversation]) -> tuple[list[Conversation], list[dict[str, Any]]]:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identify = LanguageIdentifier.from_model_file(MODEL_FILE).classify
    reasons: dict[int, dict[str, Any]] = {}
    for at, each in enumerate(conversations):
        if (name := failed_filter(each, identify)) is not None:
            reasons[at] = {"reason": f"filter {name}"}
    rank = {"dolly": 0, "chat": 1, "share": 2, "alpaca": 3, "tree": 4}
    order = sorted(
        (at for at in range(len(conversations)) if at not in reasons),
        key=lambda at: (rank[conversations[at].source], at),
    )
    first: dict[Any, int] = {}
    for at in order:
        twin = first.setdefault(normalized(conversations[at]), at)
        if twin != at:
            reasons[at] = {"reason": "duplicate", "twin": conversations[twin].place}
    order = [at for at in order if at not in reasons]
    sets = {at: shingles(conversations[at]) for at in order}
    group: dict[int, int] = {}
    for number, at in enumerate(order):
        group[at] = at
        for other in order[:number]:
            alike = len(sets[at] & sets[other]) / len(sets[at] | sets[other])
            # No similarity may be close to the threshold, because chatmill only estimates similarities.
            assert alike > 0.93 or alike < 0.67
            if alike > 0.93 and group[at] == at:
                group[at] = group[other]
    for at in order:
        if group[at] != at:
            reasons[at] = {"reason": "near_duplicate", "twin": conversations[group[at]].place}
    alpaca = [at for at, each in enumerate(conversations) if each.source == "alpaca" and at not in reasons]
    reasons |= {at: {"reason": "max_samples"} for at in alpaca[12:]}
    removed = [conversations[at].place | reasons[at] for at in sorted(reasons)]
    return [each for at, each in enumerate(conversations) if at not in reasons], removed


def totals(conversations: list[Conversation]) -> dict[str, int]:
    return {
        "rows": len(conversations),
        "tokens": sum(each.tokens for each in conversations),
        "trained": sum(each.trained for each in conversations),
    }


# The test.


@pytest.fixture
def conversations(tmp_path, monkeypatch) -> list[Conversation]:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(RECIPE)
    Path("predicate_of_the_recipe_test.py").write_text(
        "def keep(record):\n"
        "    first, second = record['messages'][:2]\n"
        "    return len(first['content']) <= 3 * len(second['content'])\n"
    )
    return write(corpus(7))


def build(target: str, **options: Any) -> None:
    prepare_dataset(load_recipe("recipe.yaml"), target, unit_bytes=UNIT_BYTES, allow_code=(PREDICATE,), **options)


def contents(folder: str) -> dict[str, bytes]:
    paths = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(paths)}


def test_a_recipe_of_five_shapes_matches_an_independent_implementation(conversations):
    build("x", engine=LocalEngine(1))
    kept, removed = expected(conversations)
    assert [json.loads(line) for line in Path("x/removed.jsonl").read_text().splitlines()] == removed
    reasons = Counter(each["reason"] for each in removed)
    filters = ("min_turns", "max_turns", "match", "no_match", "languages", "predicate")
    of_rows = ("min_tokens", "max_tokens", "min_trained_share", "max_trained_share")
    assert set(reasons) == {
        *(f"filter {name}" for name in (*filters, *of_rows)),
        "duplicate",
        "near_duplicate",
        "max_samples",
    }
    places = {(each.file, each.line): each for each in conversations}
    gone: dict[str, list[Conversation]] = defaultdict(list)
    for each in removed:
        gone[each["reason"]].append(places[each["file"], each["line"]])
    metadata = json.loads(Path("x/dataset_metadata.json").read_text())
    before = [f"filter {name}" for name in filters]
    rendered = [each for each in conversations if each not in [one for reason in before for one in gone[reason]]]
    no_tokens = {"tokens": 0, "trained": 0}
    assert {name: metadata["ledger"][name] for name in ("read", "filtered", "rendered", "dropped", "stored")} == {
        "read": {"": {"rows": len(conversations), **no_tokens}},
        "filtered": {reason: {"rows": len(gone[reason]), **no_tokens} for reason in before},
        "rendered": {"": totals(rendered)},
        "dropped": {reason: totals(each) for reason, each in gone.items() if reason not in before},
        "stored": {"": totals(kept)},
    }
    stored = {name: Counter[str]() for name in ("train", "val")}
    for name, split in metadata["splits"].items():
        for shard in split["shards"]:
            stored[name][shard["source"]] += shard["num_episodes"]
    assert set(stored["val"]) == {"chat"} and set(stored["train"]) == set(NAMES)
    assert stored["train"] + stored["val"] == Counter(each.source for each in kept)


def test_the_bytes_of_a_recipe_do_not_depend_on_workers_or_interruptions(conversations):
    build("one", engine=LocalEngine(1))
    build("three", engine=LocalEngine(3))
    seen = 0

    def stop(progress: Any) -> None:
        nonlocal seen
        seen += progress.step == "render"
        if seen == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build("resumed", engine=LocalEngine(1), on_progress=stop)
    steps: list[Any] = []
    build("resumed", engine=LocalEngine(2), resume=True, on_progress=steps.append)
    assert any(each.resumed for each in steps)
    assert contents("one") == contents("three") == contents("resumed")
