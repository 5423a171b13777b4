from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from chatmill.cli.main import main
from chatmill.prepare import LocalEngine, load_recipe, prepare_dataset
from chatmill.prepare.recipe_check import check_recipe
from chatmill.remote import objects
from chatmill.remote.urls import Url

RECIPE = """
max_tokens: 300
dedupe: true
filters: {min_tokens: 40}
sources:
- inputs: [chat.jsonl, more.jsonl]
  name: chat
  filters: {min_turns: 2, no_match: "secret"}
- inputs: qa.jsonl
  name: qa
  shape: alpaca
  train_on: last
  max_samples: 3
"""


def chat(*texts: str) -> dict[str, object]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]}


def write(path: str, records: list[dict[str, object]]) -> None:
    Path(path).write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def recipe(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    answer = "an answer that is long enough"
    write(
        "chat.jsonl",
        [
            chat("first", answer, "again", answer + "!"),
            chat("hi", "yo"),
            chat("no answer"),
            chat("the secret", answer),
            chat("q 1", answer),
        ],
    )
    write("more.jsonl", [chat(f"q {n}", answer) for n in range(12)])
    write("qa.jsonl", [{"instruction": f"q {n}", "output": answer} for n in range(10, 20)])
    Path("recipe.yaml").write_text(RECIPE)
    return "recipe.yaml"


def run(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["chatmill", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def checked(monkeypatch, capsys, *words: str) -> dict[str, dict]:
    code, out, err = run(monkeypatch, capsys, "recipe", "check", *words, "--json")
    assert (code, err) == (0, "")
    return {source["name"]: source for source in json.loads(out)["sources"]}


@pytest.mark.parametrize("unroll", [False, True])
def test_a_check_of_all_records_removes_what_a_build_removes(recipe, unroll):
    Path(recipe).write_text(RECIPE + f"unroll: {str(unroll).lower()}\n")
    job = load_recipe(recipe)
    samples = {sample.name: sample for sample in check_recipe(job)}
    metadata = prepare_dataset(job, "x", engine=LocalEngine(1))
    removed = [json.loads(line) for line in Path("x/removed.jsonl").read_text().splitlines()]
    of_build = Counter((each["source"], each["reason"]) for each in removed)
    assert of_build == {
        (name, reason): count for name, sample in samples.items() for reason, count in sample.removed.items()
    }
    assert {reason for _, reason in of_build} == {
        "filter min_tokens",
        "filter min_turns",
        "filter no_match",
        "duplicate",
        "max_samples",
    }
    for sample in samples.values():
        for reason, examples in sample.examples.items():
            own = [each for each in removed if (each["source"], each["reason"]) == (sample.name, reason)]
            places = [{"file": each["file"], "line": each["line"], "twin": each.get("twin")} for each in own[:3]]
            assert [{"file": each.file, "line": each.line, "twin": each.twin} for each in examples] == places
    split = metadata.splits["train"]
    kept = samples.values()
    assert sum(sample.rows for sample in kept) == split.num_episodes
    assert sum(sample.tokens for sample in kept) == split.num_tokens
    assert sum(sample.trained_tokens for sample in kept) == split.num_trained_tokens


def test_the_output_of_a_check(recipe, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    code, out, err = run(monkeypatch, capsys, "recipe", "check", recipe)
    assert (code, err) == (0, "")
    assert out.splitlines()[:20] == [
        f"chat: 2 files, {sum(Path(name).stat().st_size for name in ('chat.jsonl', 'more.jsonl')):,} bytes",
        '  shape:    messages: the records have "messages"',
        "  read:     17 records, the whole source",
        "  first:    chat.jsonl:1",
        '    user      "first"',
        '    assistant "an answer that is long enough" (trained)',
        '    user      "again"',
        '    assistant "an answer that is long enough!" (trained)',
        "  removed:  1 record, filter min_tokens",
        '    chat.jsonl:2 "hi"',
        "  removed:  1 record, filter min_turns",
        '    chat.jsonl:3 "no answer"',
        "  removed:  1 record, filter no_match",
        '    chat.jsonl:4 "the secret"',
        "  removed:  1 record, duplicate",
        '    more.jsonl:2 "q 1" (as chat.jsonl:5)',
        out.splitlines()[16],
        f"qa: 1 file, {Path('qa.jsonl').stat().st_size:,} bytes",
        "  shape:    alpaca: as given",
        "  read:     10 records, the whole source",
    ]
    assert out.splitlines()[16].startswith("  kept:     13 rows, ")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != "tmp"} == {
        path: time for path, time in before.items() if path.name != "tmp"
    }


def test_a_check_reads_at_most_the_given_number_of_records(recipe, monkeypatch, capsys):
    Path("more.jsonl").write_text(Path("more.jsonl").read_text() + "{broken\n")
    Path("qa.jsonl").write_text("{broken\n" + Path("qa.jsonl").read_text())
    sources = checked(monkeypatch, capsys, recipe, "--records", "6")
    assert {name: (source["records"], source["read_whole"]) for name, source in sources.items()} == {
        "chat": (6, False),
        "qa": (6, False),
    }
    assert sources["chat"]["faulty"]["records"] == 0
    assert sources["qa"]["faulty"]["records"] == 1 and sources["qa"]["faulty"]["examples"][0].startswith("qa.jsonl:1: ")
    assert [message["trained"] for message in sources["qa"]["first"]["messages"]] == [False, True]
    whole = checked(monkeypatch, capsys, recipe, "--records", "18")
    assert whole["chat"]["read_whole"] and whole["chat"]["faulty"]["records"] == 1
    assert not checked(monkeypatch, capsys, recipe, "--records", "17")["chat"]["read_whole"]


def test_a_recipe_and_its_sources_may_be_at_urls(recipe, monkeypatch, capsys):
    here = checked(monkeypatch, capsys, recipe)
    for name in ("chat", "more", "qa"):
        objects.write(Url(f"memory://checked/{name}.jsonl"), Path(f"{name}.jsonl").read_bytes())
    text = RECIPE
    for name in ("chat", "more", "qa"):
        text = text.replace(f"{name}.jsonl", f"memory://checked/{name}.jsonl")
    objects.write(Url("memory://checked/recipe.yaml"), text.encode())
    there = checked(monkeypatch, capsys, "memory://checked/recipe.yaml")
    for name, source in there.items():
        assert source["removed"] == here[name]["removed"]
        assert source["tokens"] == here[name]["tokens"]


def test_a_bad_recipe_is_reported_in_one_line(recipe, monkeypatch, capsys):
    def fault(text: str, *flags: str) -> tuple[int, str]:
        Path("bad.yaml").write_text(text)
        code, out, err = run(monkeypatch, capsys, "recipe", "check", "bad.yaml", *flags)
        assert (out, err.count("\n")) == ("", 1)
        return code, err

    code, line = fault("sources: [{inputs: chat.jsonl, wait: 3}]")
    assert code == 1 and line.startswith('chatmill: bad.yaml: source 0 has unknown key "wait"')
    code, line = fault("sources: [{inputs: none.jsonl}]")
    assert code == 1 and "none.jsonl" in line
    code, line = fault("sources: [{inputs: chat.jsonl, filters: {predicate: 'os:abort'}}]")
    assert code == 2 and line.rstrip().endswith("allow it with --allow-code os:abort")
    Path("empty.jsonl").write_text("\n")
    assert fault("sources: [{inputs: empty.jsonl, shape: messages}]") == (
        1,
        "chatmill: the input has no records; expected at least one\n",
    )


def test_a_predicate_runs_if_it_is_allowed(recipe, monkeypatch, capsys):
    Path("own_filter_of_check.py").write_text("def keep(record): return len(record['messages']) == 4\n")
    Path("own.yaml").write_text("sources: [{inputs: chat.jsonl, filters: {predicate: 'own_filter_of_check:keep'}}]")
    [source] = checked(monkeypatch, capsys, "own.yaml", "--allow-code", "own_filter_of_check:keep").values()
    assert source["removed"]["filter predicate"]["records"] == 4
