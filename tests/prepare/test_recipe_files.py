from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatmill.errors import DataError, UsageError
from chatmill.prepare.job import Filters, InputSource, Job
from chatmill.prepare.recipe import LIMIT, load_recipe

YAML = """
tokenizer: bytes
max_tokens: 2_048
val_split: 1e-1
near_dedupe: 0.8
precedence: [tools, a]
template_date: 2024-01-31
filters:
  min_turns: 2
  languages: [no, en]
sources:
  - inputs: data/a.jsonl.gz
    weight: 3
    max_samples: 10
  - inputs: [t/*.jsonl, u.jsonl]
    name: tools
    shape: sharegpt
    weight: 0.5
    val_split: 0
    columns: {messages: conversations, role: from, content: value, user: [human, prompter]}
    filters: {match: "a|b", max_trained_share: 1}
"""
TOML = """
tokenizer = "bytes"
max_tokens = 2048
val_split = 0.1
near_dedupe = 0.8
precedence = ["tools", "a"]
template_date = "2024-01-31"
filters = {min_turns = 2, languages = ["no", "en"]}

[[sources]]
inputs = "data/a.jsonl.gz"
weight = 3.0
max_samples = 10

[[sources]]
inputs = ["t/*.jsonl", "u.jsonl"]
name = "tools"
shape = "sharegpt"
weight = 0.5
val_split = 0.0
columns = "messages=conversations,role=from,content=value,user=human,user=prompter"

[sources.filters]
match = "a|b"
max_trained_share = 1.0
"""
JOB = Job(
    (
        InputSource(("data/a.jsonl.gz",), name="a", weight=3.0, max_samples=10),
        InputSource(
            ("t/*.jsonl", "u.jsonl"),
            shape="sharegpt",
            name="tools",
            weight=0.5,
            val_split=0.0,
            columns="messages=conversations,role=from,content=value,user=human,user=prompter",
            filters=Filters(match="a|b", max_trained_share=1.0),
        ),
    ),
    max_tokens=2048,
    val_split=0.1,
    near_dedupe=0.8,
    precedence=("tools", "a"),
    template_date="2024-01-31",
    filters=Filters(min_turns=2, languages=("no", "en")),
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fault_of(text: str | bytes, name: str = "recipe.yaml") -> str:
    Path(name).write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(DataError) as refused:
        load_recipe(name)
    line = str(refused.value)
    assert line.startswith(f"{name}: ") and "\n" not in line
    return line.removeprefix(f"{name}: ")


@pytest.mark.parametrize("name", ["recipe.yaml", "recipe.yml", "recipe.YAML", "recipe.toml"])
def test_yaml_and_toml_describe_the_same_job(name):
    Path(name).write_text(TOML if name.endswith("toml") else YAML)
    job = load_recipe(name)
    assert job == JOB
    # The YAML file contains 1 where the TOML file contains 1.0, which must not change the job hash.
    assert job.sha256() == JOB.sha256()


def test_one_source_keeps_the_names_of_its_files():
    for text in ("source: [{inputs: [a.jsonl, b.jsonl]}]", "sources:\n- inputs: [a.jsonl, b.jsonl]\n"):
        Path("recipe.yaml").write_text(text)
        assert load_recipe("recipe.yaml") == Job((InputSource(("a.jsonl", "b.jsonl")),))


def test_a_source_is_named_by_its_first_input():
    inputs = ["x/chat.jsonl.gz", "x/dir", "x/dir2/", "s3://bucket/*.jsonl", "y/globs/a-*.jsonl", "y/z/*/part?.parquet"]
    inputs += ["https://host/set.jsonl?sig=1", "-"]
    sources = [{"inputs": [name, "other.jsonl"]} for name in inputs] + [{"inputs": "x/chat.jsonl", "name": "mine"}]
    # JSON is valid YAML.
    Path("recipe.yaml").write_text(json.dumps({"sources": sources}))
    names = [source.name for source in load_recipe("recipe.yaml").sources]
    assert names == ["chat", "dir", "dir2", "bucket", "globs", "z", "set", "stdin", "mine"]


SOURCE = "sources: [{inputs: a.jsonl}]\n"
FAULTS = {
    "nothing": ("", "is not a mapping; expected `sources` and the settings of the dataset"),
    "a list": ("- a", "is not a mapping"),
    "cut off": (
        "sources: [",
        "is not valid YAML: expected the node content, but found '<stream end>' (at line 1, column 11)",
    ),
    "a tab": (
        "sources:\n\t- a",
        "is not valid YAML: found character '\\t' that cannot start any token (at line 2, column 1)",
    ),
    "two documents": ("a: 1\n---\na: 2", "is not valid YAML: but found another document (at line 2, column 1)"),
    "a repeated key": (
        SOURCE + "seed: 1\nseed: 2",
        'is not valid YAML: the key "seed" is given twice (at line 3, column 1)',
    ),
    "a repeated key of a source": (
        "sources:\n- inputs: a.jsonl\n  'inputs': b.jsonl",
        'is not valid YAML: the key "inputs" is given twice (at line 3, column 3)',
    ),
    "nested too deeply": ("- " * 5000, "is not valid YAML: maximum recursion depth exceeded"),
    "no UTF-8": (b"a: \xff", "is not valid YAML: "),
    "a control character": ("a: \0", "is not valid YAML: "),
    "a Python object": (
        "!!python/object/apply:os.getcwd []",
        "is not valid YAML: could not determine a constructor for the tag",
    ),
    "a tag with a wrong value": ("seed: !!int ''", "is not valid YAML: "),
    "an unknown alias": ("a: *b", "is not valid YAML: found undefined alias 'b' (at line 1, column 4)"),
    "a table as a key": ("{{a: 1}: 2}", "is not valid YAML: found unhashable key"),
    "a merge key": ("<<: {seed: 1}\n" + SOURCE, 'the recipe has unknown key "<<" (known: add_tokens, '),
    "a number as a key": (SOURCE + "1: 2", 'the recipe has unknown key "1" (known: add_tokens, '),
    "yes": (SOURCE + "dedupe: yes", "the recipe: dedupe must be true or false"),
    "null": (SOURCE + "fit: null", 'the recipe: fit must be "exchanges", '),
    "no number": (SOURCE + "val_split: .nan", "the recipe: val_split must be a number"),
    "no sources": (
        "seed: 1",
        "no sources; expected a list of mappings ([[sources]] in TOML), each with its files as `inputs`",
    ),
    "two keys for sources": (
        SOURCE + "source: [{inputs: b.jsonl}]",
        "source and sources are the same key; use only one",
    ),
    "a text as a source": ("sources: [a.jsonl]", "source 0 must be a mapping of keys to values"),
    "an alias within itself": ("sources: &a [{inputs: *a}]", "source 0: inputs must be a list of strings"),
    "no inputs": ("sources: [{name: a}]", "source 0 has no inputs; expected a list of files, globs, folders or URLs"),
    "an empty input": ("sources: [{inputs: ''}]", "source 0: inputs must be a list of strings"),
    "an unknown scheme": (
        "sources: [{inputs: 'ftp://a/b.jsonl'}]",
        "source 0: ftp://a/b.jsonl: ftp:// is not supported",
    ),
    "an unknown shape": ("sources: [{inputs: a.jsonl, shape: x}]", 'source 0: unknown shape "x"; expected messages, '),
    "an unknown column": (
        "sources: [{inputs: a.jsonl, columns: {x: y}}]",
        'source 0: columns has the unknown name "x"',
    ),
    "a number as a column": (
        "sources: [{inputs: a.jsonl, columns: {id: 1}}]",
        "source 0: columns: id must be the name",
    ),
    "no column": ("sources: [{inputs: a.jsonl, columns: {}}]", "source 0: columns is empty; remove the key"),
    "an unknown filter": (
        SOURCE + "filters: {min_token: 1}",
        'the recipe: filters has unknown key "min_token" (known: ',
    ),
    "a list of filters": (SOURCE + "filters: [min_turns]", "the recipe: filters must be a table of filters"),
    "no filters": (SOURCE + "filters:", "the recipe: filters must be a table of filters"),
    "a wrong filter": (
        "sources: [{inputs: a.jsonl, filters: {min_turns: 0, match: 3, languages: en}}]",
        "source 0: filters: min_turns must be an integer of at least 1; "
        "source 0: filters: match must be a non-empty string; "
        "source 0: filters: languages must be a list of strings",
    ),
    "filters that no record passes": (
        SOURCE + "filters: {min_turns: 3, max_turns: 2}",
        "filters: min_turns 3 is greater than max_turns 2; expected at most 2",
    ),
    "no expression": (SOURCE + "filters: {match: '('}", "filters: match is not a regular expression (missing )"),
    "a language by its name": (SOURCE + "filters: {languages: [English]}", 'filters: "English" is not a language code'),
    "a predicate that is not a function": (
        SOURCE + "filters: {predicate: a.py}",
        'filters: predicate "a.py" is not a func',
    ),
    "a weight of zero": ("sources: [{inputs: a.jsonl, weight: 0}]", "source 0: weight must be a number over 0"),
    "a similarity of zero": (SOURCE + "near_dedupe: 0", "near_dedupe 0.0 is not between 0.5 and 1; 0.8 is common"),
    "too many samples": (
        "sources: [{inputs: a.jsonl, max_samples: 0}]",
        "source 0: max_samples must be an integer",
    ),
    "a split of all records": (
        "sources: [{inputs: a.jsonl, val_split: 1}]",
        "source 0: val_split 1.0 is not between 0 and 1; 0.1 keeps a tenth for validation",
    ),
    "a split of a validation source": (
        "sources: [{inputs: a.jsonl}, {inputs: b.jsonl, only_val: true, val_split: 0.1}]",
        "source b: val_split and only_val both select validation data; use only one",
    ),
    "a split together with validation files": (
        "val_split: 0.1\nsources: [{inputs: a.jsonl}, {inputs: b.jsonl, only_val: true}]",
        "val_split and only_val both select validation data; use only one",
    ),
    "one name for two sources": (
        "sources: [{inputs: x/a.jsonl}, {inputs: y/a.jsonl}]",
        'two sources have the name "a"; give each its own `name`',
    ),
    "no name": (
        "sources: [{inputs: '*.jsonl'}, {inputs: b.jsonl}]",
        'source 0 ("*.jsonl") has no name; give it a `name`',
    ),
    "an unknown name": (
        "dedupe: true\nprecedence: [b, c]\nsources: [{inputs: a.jsonl}, {inputs: b.jsonl}]",
        'precedence has the unknown source "c" (known: a, b)',
    ),
    "precedence without deduplication": (
        "precedence: [b]\nsources: [{inputs: a.jsonl}, {inputs: b.jsonl}]",
        "precedence requires dedupe or near_dedupe",
    ),
    "a weight for a single source": (
        "sources: [{inputs: a.jsonl, weight: 1}]",
        "weight and epochs require several sources, but there is only one; remove weight and epochs",
    ),
    "some weights": (
        "sources: [{inputs: a.jsonl, weight: 1}, {inputs: b.jsonl}, {inputs: c.jsonl, only_val: true}]",
        "only some sources have a weight; give every training source a weight, or remove all weights",
    ),
    "weights and epochs": (
        "sources: [{inputs: a.jsonl, weight: 1}, {inputs: b.jsonl, epochs: 2}]",
        "weight and epochs both set how often a source is used; use only one of them",
    ),
    "epochs for a validation source": (
        "sources: [{inputs: a.jsonl}, {inputs: b.jsonl, only_val: true, epochs: 1}]",
        "weight and epochs apply only to training; remove them from sources with only_val",
    ),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_an_error_in_a_recipe_is_reported_in_one_line(kind):
    text, expected = FAULTS[kind]
    assert fault_of(text).startswith(expected)


def test_all_faults_are_reported_together():
    text = "seed: x\ncolour: 1\nsources: [{inputs: a.jsonl, shape: x}, {}, {inputs: 2}]"
    assert [fault.partition(" (known")[0] for fault in fault_of(text).split("; ") if "expected" not in fault] == [
        'source 0: unknown shape "x"',
        "source 1 has no inputs",
        "source 2: inputs must be a list of strings",
        'the recipe has unknown key "colour"',
        "the recipe: seed must be an integer",
    ]


@pytest.mark.parametrize("text", ["seed = ", "seed = 1\nseed = 2", "a = [[[", "a = \xff"])
def test_toml_that_cannot_be_read_is_reported_in_one_line(text):
    assert fault_of(text.encode("latin-1"), "recipe.toml").startswith("not valid TOML: ")


@pytest.mark.parametrize("name", ["recipe.yaml", "recipe.toml"])
def test_a_recipe_must_be_a_small_regular_file(name):
    assert fault_of("#" * (LIMIT + 1), name) == "is 1,048,577 bytes; expected at most 1,048,576"
    Path(name).unlink()
    with pytest.raises(
        DataError, match=r"cannot be read \(No such file or directory\); a recipe is a YAML or TOML file$"
    ):
        load_recipe(name)
    os.mkfifo(name)
    with pytest.raises(DataError, match=r"cannot be read \(it is a FIFO, not a regular file\); a recipe is"):
        load_recipe(name)


def test_aliases_that_would_fill_memory_are_harmless():
    levels = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 40))
    assert 'has unknown key "a0"' in fault_of(f"a0: &a0 [x]\n{levels}filters: *a39\n{SOURCE}")
    merged = "".join(f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 40))
    assert 'has unknown key "a0"' in fault_of(f"a0: &a0 {{x: 1}}\n{merged}{SOURCE}")


def test_an_alias_is_replaced_by_its_value():
    Path("recipe.yaml").write_text(
        "sources:\n- {inputs: a.jsonl, filters: &short {max_turns: 2}}\n- {inputs: b.jsonl, filters: *short}\n"
    )
    assert [source.filters for source in load_recipe("recipe.yaml").sources] == [Filters(max_turns=2)] * 2


def test_without_pyyaml_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    monkeypatch.delitem(sys.modules, "chatmill.prepare.yaml_loader", raising=False)
    assert fault_of(SOURCE) == "YAML needs PyYAML; pip install 'chatmill[recipe]', or write the recipe as .toml"


PIECES = [
    "sources",
    "inputs",
    "filters",
    "columns",
    ":",
    " ",
    "\n",
    "- ",
    "{",
    "}",
    "[",
    "]",
    ",",
    "&a ",
    "*a",
    "!!int ",
]
PIECES += [
    "!!map ",
    "!!bool ",
    "!!float ",
    "null",
    "1",
    "-",
    "'",
    '"',
    "|",
    "<<",
    "? ",
    "a.jsonl",
    "\t",
    "%",
    "é",
    "\x07",
]


@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join), st.sampled_from(["recipe.yaml", "recipe.toml"]))
def test_any_text_gives_a_job_or_an_error(text, name):
    Path(name).write_text(text)
    with suppress(DataError):
        load_recipe(name).check()


def test_a_job_made_in_python_is_validated_like_a_recipe():
    two = (InputSource(("a.jsonl",), weight=1.0), InputSource(("b.jsonl",), weight=1.0))
    with pytest.raises(UsageError, match=r"^weight and epochs require source names; give each source a `name`$"):
        Job(two).check()
    with pytest.raises(UsageError, match=r'^precedence has the unknown source "a" \(known: none; give each'):
        Job((InputSource(("a.jsonl",)), InputSource(("b.jsonl",))), dedupe=True, precedence=("a",)).check()
