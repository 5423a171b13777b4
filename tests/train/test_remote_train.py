from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest
from remote.fault_proxy import fault_proxy
from train_fixtures import SMALL, config, curve, prepare, ranks, trained, weights

from chatmill.audit.verify import verify_log
from chatmill.cli.main import main
from chatmill.errors import ChatmillError, UsageError
from chatmill.remote import download, objects
from chatmill.remote.urls import Url
from chatmill.store.metadata import listed_files, read_metadata
from chatmill.train.command import run
from chatmill.train.loop import train_model
from chatmill.train.progress import TrainProgress

ROOT = Url("memory://train-tests")
STEPS = 6


def copied(folder: Path, url: Url) -> Url:
    for name, info in listed_files(read_metadata(folder)):
        objects.write(url / f"objects/{info.sha256}", (folder / name).read_bytes())
    objects.write(url / "dataset_metadata.json", (folder / "dataset_metadata.json").read_bytes())
    return url


@pytest.fixture(scope="module")
def local(tmp_path_factory) -> Path:
    return prepare(tmp_path_factory.mktemp("data"), "sums", "--val-split", "0.2")


@pytest.fixture(autouse=True)
def settings(tmp_path, monkeypatch):
    # Runs change these environment variables, and `monkeypatch` restores their values.
    monkeypatch.setenv("CHATMILL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CHATMILL_CACHE_SIZE", "1GB")
    monkeypatch.setattr(objects, "FIRST_DELAY", 0.001)
    monkeypatch.chdir(tmp_path)


def in_cache(folder: Path) -> set[str]:
    return {path.name for path in (folder / "objects").iterdir()}


@pytest.mark.parametrize("wrong", ["CHATMILL_CACHE_DIR", "CHATMILL_CACHE_SIZE"])
def test_an_unusable_cache_is_reported_before_the_dataset_is_opened(wrong, tmp_path, monkeypatch):
    Path("file").write_text("")
    monkeypatch.setenv(wrong, str(tmp_path / "file"))
    with pytest.raises(UsageError, match=wrong):
        trained(ROOT / "nothing", tmp_path / "run")
    assert not Path("run").exists()


def test_a_run_from_a_url_equals_the_run_from_the_local_dataset(local, tmp_path):
    url = copied(local, ROOT / "same")
    changes = {"max_iters": STEPS, "save_interval": 3, "eval_interval": 3, "audit_dir": "logs", "log_rows": True}
    one = trained(local, tmp_path / "local", **changes)
    for log in Path("logs").iterdir():
        log.unlink()
    other = trained(url, tmp_path / "remote", cache_dir=str(tmp_path / "own"), cache_size="5MB", **changes)
    assert curve(one.folder) == curve(other.folder)
    assert (one.val_loss, one.loss) == (other.val_loss, other.loss)
    mine, theirs = weights(one.checkpoint), weights(other.checkpoint)
    assert all((mine[name] == theirs[name]).all() for name in mine)
    assert in_cache(tmp_path / "own")
    (log,) = Path("logs").iterdir()
    assert f"dataset={url}" in log.read_text()
    for dataset in (None, local, url):
        result = verify_log(log, dataset)
        assert (result.fault, result.steps) == (None, STEPS)
    assert json.loads((other.folder / "config.json").read_text())["dataset_dir"] == str(url)
    assert (other.checkpoint / "model" / "tokenizer_state.json").read_bytes() == (
        local / "tokenizer_state.json"
    ).read_bytes()


@pytest.mark.parametrize("first_is_local", [True, False])
def test_a_stopped_run_continues_after_the_dataset_has_moved(local, tmp_path, first_is_local):
    url = copied(local, ROOT / "moved")
    first, second = (local, url) if first_is_local else (url, local)
    whole = trained(local, tmp_path / "whole", max_iters=STEPS)

    def stop(step):
        if step.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    part = train_model(
        config(max_iters=STEPS, audit_dir="logs"),
        model_name="run",
        dataset_dir=first,
        out_dir=tmp_path,
        watch=stop,
        quiet=True,
    )
    assert part.step < STEPS
    resumed = trained(second, tmp_path, resume="auto", max_iters=STEPS, audit_dir="logs")
    assert curve(resumed.folder) == curve(whole.folder)
    mine, theirs = weights(whole.checkpoint), weights(resumed.checkpoint)
    assert all((mine[name] == theirs[name]).all() for name in mine)
    (log,) = Path("logs").iterdir()
    for dataset in (local, url):
        assert verify_log(log, dataset).fault is None


def test_ranks_share_the_cache_and_each_object_is_downloaded_once(local, tmp_path, s3_server, monkeypatch):
    with s3_server.in_environment():
        url = copied(local, s3_server.bucket() / "v1")
        with fault_proxy(s3_server.port) as proxy:
            monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
            ranks(2, lambda rank: trained(url, tmp_path / "two", max_iters=STEPS, eval_interval=3).step)
            asked = [path.rpartition("/")[2] for method, path, _ in proxy.requests() if method == "GET"]
    fetched = sorted(name.partition("?")[0] for name in asked if "dataset_metadata" not in name)
    assert fetched == sorted(in_cache(tmp_path / "cache"))
    one = trained(local, tmp_path / "one", max_iters=STEPS, eval_interval=3)
    two = curve(tmp_path / "two" / "run")
    assert [step for step, _ in two] == [step for step, _ in curve(one.folder)]


@pytest.mark.parametrize("count", [1, 2])
def test_a_missing_object_ends_the_run_with_one_line_and_the_run_can_be_resumed(local, tmp_path, s3, count):
    url = copied(local, s3.bucket() / "v1")
    whole = trained(url, tmp_path / "whole", max_iters=STEPS, eval_interval=2)
    (tokens,) = [
        info for name, info in listed_files(read_metadata(local)) if name.startswith("val/") and "tokens" in name
    ]
    shutil.rmtree(tmp_path / "cache")
    objects.remove([url / f"objects/{tokens.sha256}"])

    def work(rank: int) -> list:
        try:
            trained(url, tmp_path, max_iters=STEPS, eval_interval=2, save_interval=1)
        except ChatmillError as error:
            return [error.exit_code, str(error)]
        return [0, ""]

    outcomes = [work(0)] if count == 1 else ranks(count, work)
    for code, line in outcomes:
        assert code == 1
        assert f"{url}/objects/{tokens.sha256}: no such object" in line
    objects.write(url / f"objects/{tokens.sha256}", (local / "val/shard_00000/tokens.bin").read_bytes())
    if count == 1:
        resumed = trained(url, tmp_path, resume="auto", max_iters=STEPS, eval_interval=2)
        assert curve(resumed.folder) == curve(whole.folder)


def test_a_cache_that_is_too_small_is_reported_once_and_does_not_change_the_run(local, tmp_path, capsys):
    url = copied(local, ROOT / "small")
    whole = trained(local, tmp_path / "whole", max_iters=2)
    settings = config(max_iters=2, cache_size=100)
    result = train_model(settings, model_name="run", dataset_dir=url, out_dir=tmp_path)
    assert curve(result.folder) == curve(whole.folder)
    lines = [line for line in capsys.readouterr().err.splitlines() if "the cache size is" in line]
    assert len(lines) == 1
    assert lines[0].startswith("warning: the cache size is 100 bytes, but ")
    assert "set CHATMILL_CACHE_SIZE or cache_size to " in lines[0]


def test_the_progress_of_downloads_is_shown_while_the_first_batch_waits(local, tmp_path, monkeypatch):
    url = copied(local, ROOT / "progress")
    shown, lines, read = threading.Event(), [], download.read

    def say(progress, text):
        lines.append(text)
        if text.startswith("downloading: "):
            shown.set()

    def slow(url, *range_of_bytes):
        # The run needs only the index before it starts, so delay all other files until the download is reported.
        assert range_of_bytes[1] == index.size or shown.wait(60)
        return read(url, *range_of_bytes)

    (index,) = [
        info for name, info in listed_files(read_metadata(local)) if name.startswith("train/") and "idx" in name
    ]
    monkeypatch.setattr("chatmill.train.remote.SECONDS", 0.01)
    monkeypatch.setattr(TrainProgress, "say", say)
    monkeypatch.setattr(download, "read", slow)
    train_model(config(max_iters=1), model_name="run", dataset_dir=url, out_dir=tmp_path)
    told = next(line for line in lines if line.startswith("downloading: "))
    # The first line may be printed before or after the index is downloaded.
    assert re.fullmatch(r"downloading: [01] of 4 files, 0 of 0 MB, \d+ MB/s", told)


def test_a_model_and_a_config_file_at_urls_are_copied(local, tmp_path):
    first = trained(local, tmp_path, max_iters=2)
    for path in sorted((first.checkpoint / "model").iterdir()):
        objects.write(ROOT / "model" / path.name, path.read_bytes())
    shape = ("n_layer", "n_embd", "n_head", "n_ffn", "max_positions")
    values = {name: value for name, value in SMALL.items() if name not in shape}
    objects.write(ROOT / "train.json", json.dumps({**values, "max_iters": 2}).encode())
    outcomes = []
    for name, model in (("a", str(first.checkpoint / "model")), ("b", str(ROOT / "model"))):
        flags = {"model_name": name, "init_from_model": model, "dataset_dir": str(local)}
        outcomes.append(run({**flags, "config_file": str(ROOT / "train.json"), "out_dir": str(tmp_path / "runs")}))
    assert curve(outcomes[0].folder) == curve(outcomes[1].folder)
    again = run({"model_name": "b", "resume": "auto", "out_dir": str(tmp_path / "runs"), "max_iters": "4"})
    assert again.step == 4


def test_credentials_in_urls_are_not_stored(local, tmp_path, web):
    shutil.copytree(local, web.folder / "v1", dirs_exist_ok=True)
    address = f"http://user:pass%20word@127.0.0.1:{web.port}/locked/v1?signature=abc"
    result = trained(Url(address), tmp_path, max_iters=2, save_interval=2, audit_dir="logs", log_rows=True)
    texts = [path.read_bytes() for path in [*result.folder.rglob("*"), *Path("logs").iterdir()] if path.is_file()]
    assert any(f"http://127.0.0.1:{web.port}/locked/v1".encode() in text for text in texts)
    assert not any(secret in text for text in texts for secret in (b"pass%20word", b"pass word", b"signature"))
    with pytest.raises(UsageError, match=r"^https://example.org/model: init_from_model is a URL with credentials"):
        trained(local, tmp_path, init_from_model="https://a:b@example.org/model")


@pytest.mark.parametrize("key", ["audit_dir", "cache_dir"])
def test_folders_that_a_run_writes_are_local(local, tmp_path, key):
    with pytest.raises(UsageError, match="s3://bucket/x: is a URL"):
        trained(local, tmp_path, **{key: "s3://bucket/x"})


def test_a_model_at_a_url_is_scored_on_a_dataset_at_a_url(local, tmp_path, monkeypatch, capsys):
    model = trained(local, tmp_path, max_iters=2).checkpoint / "model"
    for path in sorted(model.iterdir()):
        objects.write(ROOT / "scored" / path.name, path.read_bytes())
    scores = []
    for place, dataset in ((model, local), (ROOT / "scored", copied(local, ROOT / "questions"))):
        monkeypatch.setattr(sys, "argv", ["chatmill", "eval", str(place), str(dataset), "--json", "--device", "cpu"])
        with pytest.raises(SystemExit):
            main()
        score = json.loads(capsys.readouterr().out)
        scores.append({name: value for name, value in score.items() if name not in ("model", "dataset")})
    assert scores[0] == scores[1]


def test_verify_finds_a_flipped_bit_in_the_cache(local, tmp_path):
    url = copied(local, ROOT / "verified")
    whole = trained(url, tmp_path / "whole", max_iters=2, verify=True)
    assert curve(whole.folder) == curve(trained(local, tmp_path / "local", max_iters=2).folder)
    (tokens,) = [
        info for name, info in listed_files(read_metadata(local)) if name.startswith("train/") and "tok" in name
    ]
    path = tmp_path / "cache" / "objects" / tokens.sha256
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    # A disk error does not change the modification time.
    os.utime(path, ns=times)
    with pytest.raises(
        ChatmillError, match=rf"{tokens.sha256}: sha256 .*; the file has changed; remove the file from the cache"
    ):
        trained(url, tmp_path / "again", max_iters=2, verify=True)
