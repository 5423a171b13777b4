from __future__ import annotations

import inspect
import json
import re
import shlex
from pathlib import Path

import pytest
import typer.main

from chatmill.cli.app import app_of
from chatmill.errors import UsageError
from chatmill.plain_file import local_path

CHAT = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}\n'
TRUTH = '{"id": "a", "messages": [{"role": "user", "content": "hi"}], "objects": []}\n'
PATHS = """

order v1 --config URL
report v1 -o URL.html
view v1 --audit URL
view v1 --config URL
view v1 --records URL
view v1 --index URL
view v1 --run URL
doctor --shared URL
train --model_name m --dataset_dir v1 --out_dir URL
train --model_name m --config_file heir.json
train --model_name m --dataset_dir v1 --audit_dir URL
train --model_name m --dataset_dir v1 --resume URL
rows URL --step 1
build-sft-primer --primer-jsonl chat.jsonl --out-dir URL
audit verify URL
audit verify some.log --checkpoint URL
audit replay URL --step 0
tokenizer train chat.jsonl --vocab-size 300 -o URL
export transcripts chat.jsonl -o URL --context-length 99
export parquet v1 -o URL
rollout build rollouts.jsonl truth.jsonl -o URL --add-tokens
rollout answers truth.jsonl -o URL --add-tokens
rollout train URL -o out
merge v1 -o URL
import axolotl config.yml -o URL
import llamafactory dataset_info.json -o URL
import trl sft.yaml -o URL
rollout train stage2.json -o URL
"""
LINES = [line for line in PATHS.splitlines() if line]
RECORDS = """
check URL.jsonl
render URL.jsonl
certify URL.jsonl --tokenizer bytes --chat-template plain.jinja
compare URL.jsonl bytes --chat-template plain.jinja
prepare URL.jsonl -o out
prepare chat.jsonl -o out --val-file URL.jsonl
prepare recipe.toml -o out
recipe check recipe.toml
build-sft-primer --primer-jsonl URL.jsonl
build-sft-oasst1 --input URL.jsonl
build-sft-dolly15k --input URL.jsonl
tokenizer train URL.jsonl --vocab-size 300 -o out
export transcripts URL.jsonl -o out --context-length 99
rollout build URL.jsonl truth.jsonl -o out --add-tokens
rollout build rollouts.jsonl URL.jsonl -o out --add-tokens
rollout answers URL.jsonl -o out --add-tokens
"""
"""Commands that read records from URLs."""
NAMED = """
render chat.jsonl --tokenizer URL
render chat.jsonl --format URL.toml
render chat.jsonl --format template --chat-template URL
certify --tokenizer URL
certify --tokenizer bytes --chat-template URL
compare chat.jsonl URL
compare chat.jsonl bytes --chat-template URL
prepare URL.toml -o out
recipe check URL.toml
prepare chat.jsonl -o out --tokenizer URL
prepare chat.jsonl -o out --format URL.toml
prepare chat.jsonl -o out --format template --chat-template URL
show v1 --tokenizer URL
explain v1 0:0 --tokenizer URL
report v1 --tokenizer URL
view v1 --tokenizer URL
build-sft-primer --primer-jsonl chat.jsonl --tokenizer URL
tokenizer train chat.jsonl --vocab-size 300 -o out --format URL.toml
tokenizer info URL
import axolotl URL.yml -o out
import llamafactory URL.json -o out
import trl URL.yaml -o out
"""
"""Commands that read tokenizers, chat templates, formats, recipes and configs of other trainers from URLs."""


@pytest.fixture
def folder(run, tmp_path):
    Path("chat.jsonl").write_text(CHAT * 2)
    Path("truth.jsonl").write_text(TRUTH)
    Path("rollouts.jsonl").write_text("")
    Path("plain.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    Path("heir.json").write_text(json.dumps({"inherits": "gs://bucket/base.json"}))
    Path("recipe.toml").write_text('[[source]]\ninputs = ["memory://bucket/x.jsonl"]\n')
    Path("stage2.json").write_text(json.dumps({"truth": "truth.jsonl", "init_from_model": "hf://org/model"}))
    assert run("prepare", "chat.jsonl", "-o", "v1")[0] == 0
    return tmp_path


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_options_for_local_paths_refuse_urls_in_one_line_and_write_nothing(run, folder):
    before = names(folder)
    for line in LINES:
        code, out, err = run(*shlex.split(line.replace("URL", "s3://bucket/x")))
        told = re.fullmatch(
            r"chatmill: [^\n]*(s3|gs|abfs)://bucket/\S*: is a URL, but a local path is required; .+\n", err
        )
        assert (code, out, told is not None) == (2, "", True), f"{line}\n{code}\n{out}\n{err}"
        assert names(folder) == before, line


@pytest.mark.parametrize("lines", [RECORDS, NAMED], ids=["records", "named files"])
def test_files_are_read_from_urls_and_a_missing_one_is_reported_in_one_line(run, folder, lines):
    before = names(folder)
    for line in filter(None, lines.splitlines()):
        code, out, err = run(*shlex.split(line.replace("URL", "memory://bucket/x")))
        assert (code, out) == (1, ""), f"{line}\n{err}"
        expected = r"chatmill: memory://bucket/x(\.jsonl|\.toml|\.json|\.ya?ml)?: no such object; check the name\n"
        assert re.fullmatch(expected, err), f"{line}\n{err}"
        assert names(folder) == before, line


def test_these_tests_cover_every_path_option_of_every_command():
    def leaves(group, path=()):
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                yield from leaves(command, (*path, name))
            else:
                yield " ".join((*path, name)), command

    for name, command in leaves(typer.main.get_command(app_of())):
        tried = [line for line in LINES if line.startswith(f"{name} ")]
        for each in command.params:
            annotation = inspect.signature(command.callback).parameters.get(each.name)
            if annotation is None or "Path" not in str(annotation.annotation):
                continue
            flags = [f"{flag} URL" in line for flag in each.opts for line in tried if flag.startswith("-")]
            assert any(flags) or (each.opts == [each.name] and "URL" in " ".join(tried)), f"{name}: {each.name}"


@pytest.mark.parametrize(
    "url", ["s3://b/x", "gs://b/x", "az://b/x", "hf://o/m", "https://h/x", "file:///t/x", "memory://x", "S3A://b/x"]
)
def test_any_scheme_makes_a_url_as_string_and_as_path(url):
    for given in (url, Path(url)):
        with pytest.raises(UsageError, match="is a URL, but a local path"):
            local_path(given)


@pytest.mark.parametrize("name", ["a:b", "a:b/c", "c:/x", "s3:", "./s3:/x", "/tmp/s3:/x", "x/s3://y", "2024-01:/x", ""])
def test_other_names_with_a_colon_are_local(name):
    assert local_path(name) == Path(name)


def test_a_folder_with_a_colon_in_its_name_is_written_and_read(run, folder):
    assert run("prepare", "chat.jsonl", "-o", "a:b/v:1")[0] == 0
    assert run("verify", "a:b/v:1", "--full")[0] == 0


def test_values_that_are_not_paths_may_be_urls(run, folder):
    Path("ask.jsonl").write_text(CHAT.replace("hi", "see https://example.org"))
    assert run("prepare", "ask.jsonl", "-o", "v2")[0] == 0
    assert "URL" not in run("prepare", "chat.jsonl", "-o", "v3", "--address", "ray://head:10001")[2]


def test_a_truth_with_a_password_or_signature_is_refused_since_runs_store_it(run, folder):
    truth = "https://me:secret@host/truth.jsonl?signature=secret"
    config = {"truth": truth, "init_from_model": "v1", "add_tokens": True}
    Path("signed.json").write_text(json.dumps(config))
    code, out, err = run("rollout", "train", "signed.json", "-o", "run")
    assert (code, out) == (2, "")
    assert err.startswith("chatmill: https://host/truth.jsonl: the run would store the password or query of the URL; ")
    assert "secret" not in err
