from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
from prepare_fixtures import build, conversations, digests, job_of, lines

from chatmill.cli.main import main
from chatmill.errors import DataError
from chatmill.prepare.job import InputSource, Job
from chatmill.prepare.pipeline import relative_names
from chatmill.prepare.recipe import load_recipe
from chatmill.remote import objects
from chatmill.remote.urls import Url
from chatmill.tokenizer import train_bpe

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def files() -> dict[str, bytes]:
    table = pyarrow.Table.from_pylist([{"messages": each["messages"]} for each in conversations(60, 4)])
    out = pyarrow.BufferOutputStream()
    parquet.write_table(table, out, row_group_size=9)
    return {
        "a.jsonl": lines(conversations(150, 1)),
        "sub/b.jsonl.gz": gzip.compress(lines(conversations(40, 2))),
        "sub/c.json": json.dumps(conversations(30, 3)).encode(),
        "d.parquet": out.getvalue().to_pybytes(),
    }


@pytest.fixture
def here(tmp_path) -> Path:
    for name, data in files().items():
        path = tmp_path / "chat" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "chat"


@pytest.fixture
def in_memory():
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    for name, data in files().items():
        fs.pipe_file(f"/b/chat/{name}", data)
    yield "memory://b/chat"
    fs.store.clear()


def test_a_folder_in_memory_gives_the_same_bytes_as_a_local_one_for_any_unit_size(tmp_path, here, in_memory):
    options = {"dedupe": True, "val_split": 0.1}
    build(job_of((str(here),), **options), tmp_path / "local")
    expected = digests(tmp_path / "local")
    # In-memory objects exist in one process only. Another test below reads a bucket with several processes.
    for number, (folder, unit_bytes, workers) in enumerate(
        [(in_memory, 1 << 22, 1), (in_memory, 1500, 1), (here, 1500, 1), (here, 4000, 2)]
    ):
        build(job_of((str(folder),), **options), tmp_path / f"{number}", unit_bytes=unit_bytes, workers=workers)
        assert digests(tmp_path / f"{number}") == expected
    stored = json.loads((tmp_path / "local" / "dataset_metadata.json").read_bytes())
    assert [each["file"] for each in stored["config"]["sources"]] == [
        "a.jsonl",
        "d.parquet",
        *("sub/b.jsonl.gz", "sub/c.json"),
    ]


def test_an_object_that_changes_during_a_build_is_detected_and_nothing_is_published(tmp_path, in_memory):
    fs = fsspec.filesystem("memory")
    job = job_of((f"{in_memory}/a.jsonl",))

    def change(progress):
        if progress.done:
            fs.pipe_file("/b/chat/a.jsonl", files()["a.jsonl"].swapcase())

    with pytest.raises(DataError, match=r"^memory://b/chat/a\.jsonl: was changed while it was being read; build again"):
        build(job, tmp_path / "out", on_progress=change, unit_bytes=4000)
    assert not (tmp_path / "out").exists()


def test_stdin_gives_the_same_bytes_as_a_file_and_its_copy_is_removed(tmp_path, here):
    program = "import sys; from chatmill.cli.main import main; sys.argv[0] = 'chatmill'; main()"

    def prepare(*words: str, stdin: bytes = b"") -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", program, "prepare", "-o", str(tmp_path / "out"), "--overwrite", *words]
        environment = {"TMPDIR": str(tmp_path / "scratch"), "PYTHONPATH": ":".join(sys.path), "PATH": ""}
        (tmp_path / "scratch").mkdir(exist_ok=True)
        return subprocess.run(command, input=stdin, capture_output=True, env=environment, cwd=tmp_path)

    data = files()["a.jsonl"] * 30
    made = prepare("-", "--workers", "2", stdin=gzip.compress(data))
    assert made.returncode == 0, made.stderr
    stored = json.loads((tmp_path / "out" / "dataset_metadata.json").read_bytes())
    assert [(each["file"], each["source"]) for each in stored["config"]["sources"]] == [("-", "stdin")]
    (tmp_path / "-").write_bytes(data)
    (tmp_path / "stdin.jsonl").write_bytes(data)
    build(Job((InputSource((str(tmp_path / "stdin.jsonl"),)),)), tmp_path / "file")
    for name in ("tokens.bin", "mask.bin", "episodes.idx"):
        [one], [other] = ([*(tmp_path / each).rglob(name)] for each in ("out", "file"))
        assert one.read_bytes() == other.read_bytes()
    broken = prepare("-", stdin=b'{"messages": []}\n' + data)
    assert (broken.returncode, broken.stdout) == (1, b"")
    assert broken.stderr.startswith(b"chatmill: -:1: ") and broken.stderr.count(b"\n") == 1
    assert [*(tmp_path / "scratch").iterdir()] == []


def test_stdin_is_refused_on_a_cluster(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["chatmill", "prepare", "-", "-o", "out", "--engine", "ray"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "chatmill: -: Ray workers cannot read standard input; with --engine ray, pass files or URLs\n"
    )


TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
FORMAT = """
name = "mine"
[tokens]
start = "<|im_start|>"
eot = "<|im_end|>"
[user]
open = "<|im_start|>user:"
close = "<|im_end|>"
[assistant]
open = "<|im_start|>assistant:"
close = "<|im_end|>"
[system]
open = "<|im_start|>system:"
close = "<|im_end|>"
"""


@pytest.fixture
def named(tmp_path, monkeypatch, in_memory):
    monkeypatch.setenv("CHATMILL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("chatmill.remote.named_files._copies", {})
    texts = [message["content"] for each in conversations(20) for message in each["messages"]]
    contents = {
        "tok/tokenizer.json": train_bpe(texts, vocab_size=300, control=["<|im_start|>", "<|im_end|>"]),
        "tok/tokenizer_config.json": json.dumps({"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}).encode(),
        "tok/model.safetensors": bytes(100),
        "mine.toml": FORMAT.encode(),
        "own.jinja": TEMPLATE.replace("\n{{", "\n\n{{").encode(),
    }
    for name, data in contents.items():
        path = tmp_path / "named" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(data)
        fsspec.filesystem("memory").pipe_file(f"/named/{name}", data)
    return tmp_path / "named"


def test_a_bucket_gives_the_same_bytes_as_a_local_folder_with_several_processes(tmp_path, here, named, s3):
    bucket = s3.bucket()
    for name, data in files().items():
        objects.write(bucket / f"chat/{name}", data)
    for path in (named / "tok").iterdir():
        objects.write(bucket / f"tok/{path.name}", path.read_bytes())
    glob = ("*.jsonl", "sub/*", "*.parquet")
    job = job_of(tuple(f"{here}/{name}" for name in glob), tokenizer=str(named / "tok"), format="chatml")
    build(job, tmp_path / "local")
    job = job_of(tuple(f"{bucket}/chat/{name}" for name in glob), tokenizer=f"{bucket}/tok", format="chatml")
    build(job, tmp_path / "remote", unit_bytes=9000, workers=2)
    assert digests(tmp_path / "remote") == digests(tmp_path / "local")


@pytest.mark.parametrize(
    "options",
    [
        {"tokenizer": "tok", "format": "mine.toml"},
        {"tokenizer": "tok/tokenizer.json", "format": "chatml"},
        {"tokenizer": "tok", "format": "template", "chat_template": "own.jinja"},
    ],
    ids=str,
)
def test_tokenizers_formats_and_templates_at_urls_give_the_same_bytes(tmp_path, named, in_memory, options):
    def at(place: str) -> dict[str, str]:
        paths = ("chatml", "template")
        return {key: name if name in paths else f"{place}/{name}" for key, name in options.items()}

    build(job_of((f"{in_memory}/a.jsonl",), **at(str(named))), tmp_path / "here")
    build(job_of((f"{in_memory}/a.jsonl",), **at("memory://named")), tmp_path / "there", unit_bytes=9000)
    assert digests(tmp_path / "there") == digests(tmp_path / "here")
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_a_recipe_at_a_url_describes_the_same_job_as_a_local_one(tmp_path, named, monkeypatch):
    recipe = """
    tokenizer = "memory://named/tok"
    [[source]]
    inputs = ["memory://b/chat/a.jsonl", "chat/d.jsonl"]
    """
    (tmp_path / "recipe.toml").write_text(recipe)
    fsspec.filesystem("memory").pipe_file("/named/recipe.toml", recipe.encode())
    assert load_recipe("memory://named/recipe.toml") == load_recipe(tmp_path / "recipe.toml")
    fsspec.filesystem("memory").pipe_file("/named/broken.toml", b"tokenizer = 3")
    with pytest.raises(DataError, match=r"^memory://named/broken\.toml: no sources; "):
        load_recipe("memory://named/broken.toml")


def test_faults_of_files_at_urls_name_the_url(named):
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/named/bad/tokenizer.json", b"{}")
    fs.pipe_file("/named/bad/tokenizer_config.json", b"[]")
    fs.pipe_file("/named/bad.toml", b"[")
    for options, line in [
        ({"tokenizer": "memory://named/bad/tokenizer.json", "format": "chatml"}, "memory://named/bad/tokenizer.json: "),
        ({"tokenizer": "memory://named/bad"}, "memory://named/bad/tokenizer_config.json: expected a JSON object"),
        ({"format": "memory://named/bad.toml"}, "memory://named/bad.toml: not valid TOML: "),
        ({"chat_template": "memory://named/none.jinja"}, "memory://named/none.jinja: no such object; "),
    ]:
        with pytest.raises(DataError) as caught:
            build(job_of(("memory://b/chat/a.jsonl",), **options), named / "out")
        assert str(caught.value).startswith(line)


def test_a_job_stores_no_password_and_no_signature():
    url = "https://me:secret@host/x.jsonl?signature=secret"
    job = Job((InputSource((url, "a.jsonl")),), tokenizer=url, format=url, chat_template=url)
    assert "secret" not in json.dumps(job.to_json())
    assert job.to_json()["sources"][0]["inputs"] == ("https://host/x.jsonl", "a.jsonl")


def test_stored_names_of_urls_contain_no_secrets():
    urls = [Url("https://me:secret@host/data/chat/a.jsonl?sig=secret"), Url("https://me:secret@host/data/b.jsonl?x")]
    assert relative_names(urls) == ["chat/a.jsonl", "b.jsonl"]
    assert relative_names(urls[:1]) == ["a.jsonl"]
    assert relative_names([Url("s3://one/x/a.jsonl"), Url("s3://two/a.jsonl")]) == ["one/x/a.jsonl", "two/a.jsonl"]
    mixed = [Path("chat/c.jsonl"), *urls]
    assert relative_names(mixed) == ["chat/c.jsonl", "https://host/data/chat/a.jsonl", "https://host/data/b.jsonl"]
