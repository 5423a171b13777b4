from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from chatmill.prepare.recipe import load_recipe
from chatmill.prepare.snippets import known_sets, snippet
from chatmill.records import read_records
from chatmill.store.read import open_dataset

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def oasst_message(name: str, text: str, role: str, rank: int | None, replies: list) -> dict:
    return {
        "message_id": name,
        "parent_id": None,
        "text": text,
        "role": role,
        "lang": "en",
        "review_count": 3,
        "review_result": True,
        "deleted": False,
        "rank": rank,
        "synthetic": False,
        "emojis": {"+1": 2},
        "labels": {"spam": {"value": 0.0, "count": 3}},
        "replies": replies,
    }


def oasst(path: Path) -> None:
    replies = [
        oasst_message("b", "Second.", "assistant", 1, []),
        oasst_message("c", "First.", "assistant", 0, [oasst_message("d", "Thanks", "prompter", None, [])]),
    ]
    prompt = oasst_message("a", "Which?", "prompter", None, replies)
    tree = {"message_tree_id": "a", "tree_state": "ready_for_export", "prompt": prompt, "origin": "x"}
    path.write_bytes(gzip.compress((json.dumps(tree) + "\n").encode()))


def dolly(path: Path) -> None:
    records = [
        {"instruction": "When?", "context": "It was 2012.", "response": "2012.", "category": "closed_qa"},
        {"instruction": "Why?", "context": "", "response": "Because.", "category": "open_qa"},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


CHAT = [{"content": "Hi", "role": "user"}, {"content": "Hello.", "role": "assistant"}]


def ultrachat(path: Path) -> None:
    parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "Hi", "prompt_id": "p1", "messages": CHAT}]), path)


def openhermes(path: Path) -> None:
    turns = [("system", "Be brief."), ("human", "Hi"), ("gpt", "Hello.")]
    record = {
        "custom_instruction": None,
        "language": None,
        "system_prompt": None,
        "idx": None,
        "source": "airoboros2.2",
        "model_name": None,
        "skip_prompt_formatting": False,
        "category": "orca",
        "conversations": [{"from": role, "value": text, "weight": None} for role, text in turns],
        "views": None,
        "title": None,
        "topic": None,
        "id": None,
        "hash": None,
        "avatarUrl": None,
        "model": None,
    }
    path.write_text(json.dumps([record], indent=2))


def tulu3(path: Path) -> None:
    record = {"id": "ai2-adapt-dev/oasst1_converted_1", "messages": CHAT, "source": "ai2-adapt-dev/oasst1_converted"}
    parquet.write_table(pyarrow.Table.from_pylist([record]), path)


def glaive(path: Path) -> None:
    tool = {"name": "rate", "description": "A rate.", "parameters": {"type": "object", "properties": {}}}
    turns = [
        ("human", "The rate?"),
        ("function_call", '{"name": "rate", "arguments": {"to": "EUR"}}'),
        ("observation", '{"rate": 0.9}'),
        ("gpt", "It is 0.9."),
    ]
    record = {
        "conversations": [{"from": role, "value": text} for role, text in turns],
        "tools": json.dumps([tool]),
    }
    path.mkdir()
    (path / "glaive.json").write_text(json.dumps([record]))


SAMPLES = {
    "oasst": (oasst, [[("user", "Which?"), ("assistant", "First."), ("user", "Thanks")]]),
    "dolly": (
        dolly,
        [[("user", "When?\n\nIt was 2012."), ("assistant", "2012.")], [("user", "Why?"), ("assistant", "Because.")]],
    ),
    "ultrachat": (ultrachat, [[("user", "Hi"), ("assistant", "Hello.")]]),
    "openhermes": (openhermes, [[("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello.")]]),
    "tulu3": (tulu3, [[("user", "Hi"), ("assistant", "Hello.")]]),
    "glaive": (
        glaive,
        [
            [
                ("user", "The rate?"),
                ("assistant", 'rate {"to":"EUR"}'),
                ("tool", '{"rate": 0.9}'),
                ("assistant", "It is 0.9."),
            ]
        ],
    ),
}


def sampled(name: str) -> str:
    text = snippet([name])
    [url] = [line.partition("inputs: ")[2] for line in text.splitlines() if "inputs: " in line]
    local = url.removeprefix("hf://datasets/").replace("*", "00000").strip("/").replace("/", "-")
    SAMPLES[name][0](Path(local))
    return text.replace(url, local)


def said(message) -> str:
    return "".join([message.content, *(f"{call.name} {call.arguments}" for call in message.tool_calls)])


def test_every_snippet_has_a_sample():
    assert [*known_sets()] == [*SAMPLES]


@pytest.mark.parametrize("name", SAMPLES)
def test_a_snippet_reads_its_data_set(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(sampled(name))
    [source] = load_recipe("recipe.yaml").sources
    records = list(read_records(source.inputs, shape=source.shape, source=source.name, options=source.options()))
    assert [[(each.role, said(each)) for each in record.messages] for record in records] == SAMPLES[name][1]
    assert {record.source for record in records} == {name}
    assert bool(records[0].tools) == (name == "glaive")


def test_the_snippets_together_are_a_recipe_that_builds(run):
    assert run("recipe", "snippet", *SAMPLES)[:2] == (0, snippet([*SAMPLES]))
    parts = [sampled(name).removeprefix("sources:\n") for name in SAMPLES]
    Path("recipe.yaml").write_text("dedupe: true\nsources:\n" + "".join(parts))
    code, _, err = run("prepare", "recipe.yaml", "-o", "x", "--workers", "1")
    assert code == 0, err
    metadata = open_dataset("x").metadata
    assert metadata is not None
    # The samples of UltraChat and Tulu 3 contain the same conversation.
    assert metadata.splits["train"].num_episodes == 6


def test_snippets_are_listed_and_an_unknown_name_is_reported_in_one_line(run):
    code, out, _ = run("recipe", "snippet")
    assert (code, [line.split()[0] for line in out.splitlines()]) == (0, [*SAMPLES])
    code, out, _ = run("recipe", "snippet", "--json")
    assert (code, json.loads(out)) == (0, known_sets())
    code, out, _ = run("recipe", "snippet", "dolly", "--json")
    assert (code, json.loads(out)) == (0, {"names": ["dolly"], "yaml": snippet(["dolly"])})
    code, out, err = run("recipe", "snippet", "alpaca")
    assert (code, out) == (2, "")
    assert err == 'chatmill: no snippet "alpaca"; expected oasst, dolly, ultrachat, openhermes, tulu3, glaive\n'
