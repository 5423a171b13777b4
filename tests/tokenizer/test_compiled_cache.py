from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from test_byte_bpe import KINDS, as_kind
from tokenizer_fixtures import PRIMER, mixed_texts

import chatmill
from chatmill.tokenizer import Tokenizer, compiled_cache, open_tokenizer, tokenizer_json
from chatmill.tokenizer.control_encoder import ControlEncoder
from chatmill.tokenizer.reference import Reference

pytest.importorskip("chatmill._native._bpe")

LEFT = ["x" * 600, "b \U000f0000", "e\u0301 \u1100\u1161", "Å"]
"""Texts that the C engine leaves to `tokenizers`, or that NFC changes."""
TEXTS = [*mixed_texts(1, 20_000), *LEFT, ""]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CHATMILL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv(compiled_cache.SWITCH, raising=False)
    return tmp_path / "cache" / "tokenizers"


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    loaded: list[str] = []

    class Counted(Reference):
        def __init__(self, place, stripped, control):
            loaded.append(place)
            super().__init__(place, stripped, control)

    monkeypatch.setattr(tokenizer_json, "Reference", Counted)
    return loaded


@pytest.fixture(params=KINDS)
def path(request: pytest.FixtureRequest, trained: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(as_kind(trained, request.param))
    return path


def peer_ids(path: Path, texts: list[str]) -> list[list[int]]:
    peer = tokenizers.Tokenizer.from_file(str(path))
    return [encoding.ids for encoding in peer.encode_batch(texts, add_special_tokens=False)]


def ids_of(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    ids, offsets = tokenizer.encode_batch(texts)
    return [ids[a:b].tolist() for a, b in pairwise(offsets.tolist())]


def test_a_cached_tokenizer_gives_the_same_ids(path, folder, loads):
    first = open_tokenizer(path)
    assert len(loads) == 1 and len(list(folder.iterdir())) == 1
    second = open_tokenizer(path)
    assert len(loads) == 1 and second.engine == first.engine == "compiled"
    assert (second.sha256, second.vocab_size, second.control_ids) == (first.sha256, first.vocab_size, first.control_ids)
    assert ids_of(second, TEXTS) == ids_of(first, TEXTS) == peer_ids(path, TEXTS)


def test_the_file_is_loaded_only_for_a_skipped_text(path, folder, loads):
    open_tokenizer(path)
    cached = open_tokenizer(path)
    cached.encode_batch(["Hello, world", "Å e\u0301"])
    assert len(loads) == 1
    cached.encode_batch(["x" * 600])
    cached.encode_batch(["y" * 600])
    assert len(loads) == 2


def test_a_cached_tokenizer_decodes_the_same(path, folder, loads):
    open_tokenizer(path)
    cached, peer, rng = open_tokenizer(path), tokenizers.Tokenizer.from_file(str(path)), random.Random(0)
    reference = Reference("peer", json.loads(path.read_bytes()), {})
    for size in [0, 1, *range(2, 60)] * 5:
        # The bytes of most random ids are not UTF-8 and are decoded with replacement characters.
        ids = rng.choices(range(cached.vocab_size), k=size)
        assert cached.decode(ids) == peer.decode(ids, skip_special_tokens=False)
    assert [cached.piece(id) for id in range(cached.vocab_size)] == [
        reference.piece(id) for id in range(cached.vocab_size)
    ]
    assert len(loads) == 1


def test_a_tokenizer_with_another_decoder_decodes_the_same(trained, tmp_path, folder):
    content = json.loads(as_kind(trained, "llama3"))
    # ByteLevel joins all tokens into one text, so Strip removes only an H at its start.
    decoders = [tokenizers.decoders.ByteLevel(), tokenizers.decoders.Strip("H", 1, 0)]
    made = tokenizers.Tokenizer.from_str(json.dumps(content))
    made.decoder = tokenizers.decoders.Sequence(decoders)
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    peer = tokenizers.Tokenizer.from_file(str(path))
    for _ in range(2):
        opened = open_tokenizer(path)
        assert opened.decode(opened.encode("Hello")) == peer.decode(opened.encode("Hello")) == "ello"


def test_each_set_of_control_tokens_has_its_own_file(trained_json, folder, loads):
    text = "".join(PRIMER.values()) + " in"
    assert len(open_tokenizer(trained_json).encode("in")) == 1
    for control in ({}, PRIMER, {"word": "in"}) * 2:
        tokenizer = open_tokenizer(trained_json, control=control)
        assert tokenizer.control_ids.keys() >= {*control.values()}
        assert not {*tokenizer.encode(text)} & {*tokenizer.control_ids.values()}
    assert len(loads) == len(list(folder.iterdir())) == 3


def test_other_code_and_other_libraries_do_not_use_the_file(trained_json, folder, loads, monkeypatch):
    open_tokenizer(trained_json)
    monkeypatch.setattr(tokenizers, "__version__", "0.0")
    open_tokenizer(trained_json)
    assert len(loads) == 2
    monkeypatch.setattr(compiled_cache, "_code", lambda engine: "other")
    open_tokenizer(trained_json)
    assert len(loads) == len(list(folder.iterdir())) == 3


def test_the_cache_can_be_turned_off(trained_json, folder, loads, monkeypatch):
    monkeypatch.setenv(compiled_cache.SWITCH, "0")
    for _ in range(2):
        open_tokenizer(trained_json)
    assert len(loads) == 2 and not folder.exists()


def assert_made_again(path: Path, file: Path, whole: bytes, loads: list[str]) -> None:
    before = len(loads)
    assert ids_of(open_tokenizer(path), TEXTS[:5]) == peer_ids(path, TEXTS[:5])
    assert len(loads) == before + 1
    assert not file.is_symlink() and file.read_bytes() == whole
    open_tokenizer(path)
    assert len(loads) == before + 1


@pytest.fixture
def cached(trained_json: Path, folder: Path, loads: list[str]) -> tuple[Path, Path, bytes]:
    path = trained_json.with_name("gpt2.json")
    path.write_bytes(as_kind(trained_json.read_bytes(), "gpt2"))
    open_tokenizer(path)
    [file] = folder.iterdir()
    return path, file, file.read_bytes()


def test_a_flipped_bit_is_detected_at_any_position(cached, loads):
    path, file, whole = cached
    regions = {*range(48), *np.linspace(48, len(whole) - 1, 80, dtype=int).tolist()}
    for at in sorted(regions):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        file.write_bytes(damaged)
        assert_made_again(path, file, whole, loads)


def test_a_truncated_or_extended_file_is_created_again(cached, loads):
    path, file, whole = cached
    for content in (*(whole[:size] for size in (0, 1, 31, 32, 39, 40, 500, len(whole) - 1)), whole + b"\0", b"\0" * 64):
        file.write_bytes(content)
        assert_made_again(path, file, whole, loads)


def test_the_file_of_another_tokenizer_is_not_used(cached, trained, loads, tmp_path):
    path, file, whole = cached
    (tmp_path / "tokenizer.json").write_bytes(as_kind(trained, "llama3"))
    open_tokenizer(tmp_path / "tokenizer.json")
    [other] = {*file.parent.iterdir()} - {file}
    other.replace(file)
    assert_made_again(path, file, whole, loads)


def to_link(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


def to_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


@pytest.mark.parametrize(
    "change",
    [
        to_link,
        to_fifo,
        lambda file: file.chmod(0o620),
        lambda file: file.chmod(0o602),
        lambda file: os.chown(file, 1, 1),
    ],
    ids=["link", "fifo", "group", "others", "owner"],
)
def test_a_file_that_others_could_have_written_is_not_used(cached, loads, change: Callable[[Path], None]):
    path, file, whole = cached
    try:
        change(file)
    except PermissionError:
        pytest.skip("only root can change the owner of a file")
    assert_made_again(path, file, whole, loads)
    assert file.stat().st_mode & 0o777 == 0o600 and file.stat().st_uid == os.geteuid()


def test_a_folder_with_the_name_of_a_file_only_costs_time(cached, loads):
    path, file, _ = cached
    file.unlink()
    file.mkdir()
    for _ in range(2):
        assert ids_of(open_tokenizer(path), TEXTS) == peer_ids(path, TEXTS)
    assert len(loads) == 3 and [each.name for each in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize("place", ["cache", "tokenizers"])
@pytest.mark.parametrize("change", ["link", "file", "others"])
def test_a_cache_that_cannot_be_trusted_or_created_is_not_used(trained_json, folder, loads, tmp_path, place, change):
    where = folder if place == "tokenizers" else folder.parent
    where.parent.mkdir(exist_ok=True)
    (tmp_path / "target").mkdir()
    if change == "link":
        where.symlink_to(tmp_path / "target")
    elif change == "file":
        where.write_text("")
    else:
        where.mkdir()
        where.chmod(0o777)
    for _ in range(2):
        assert ids_of(open_tokenizer(trained_json), ["Hello"]) == peer_ids(trained_json, ["Hello"])
    assert len(loads) == 2 and not [*tmp_path.rglob("*[0-9a-f]" * 8)]


def test_a_full_disk_leaves_no_file(trained_json, folder, loads):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        assert ids_of(open_tokenizer(trained_json), ["Hello"]) == peer_ids(trained_json, ["Hello"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [*folder.iterdir()] == []
    open_tokenizer(trained_json)
    open_tokenizer(trained_json)
    assert len(loads) == 2


def test_the_most_recently_used_files_are_kept(trained, folder, loads, tmp_path, monkeypatch):
    monkeypatch.setattr(compiled_cache, "MOST_FILES", 2)
    paths = [tmp_path / f"{kind}.json" for kind in KINDS]
    for kind, path in zip(KINDS, paths, strict=True):
        path.write_bytes(as_kind(trained, kind))
    open_tokenizer(paths[0])
    [first] = folder.iterdir()
    open_tokenizer(paths[1])
    [second] = {*folder.iterdir()} - {first}
    for file, age in ((first, 200), (second, 100)):
        os.utime(file, (time.time() - age, time.time() - age))
    # Opening the first file makes the second one the least recently used.
    open_tokenizer(paths[0])
    open_tokenizer(paths[2])
    assert len([*folder.iterdir()]) == 2 and first.exists() and not second.exists()
    assert len(loads) == 3


AT_ONCE = """
import sys
from chatmill.tokenizer import open_tokenizer
sys.stdin.readline()
print(open_tokenizer(sys.argv[1]).encode_batch(["Hello, world", "x" * 600])[0].tolist())
"""


def test_processes_that_compile_at_the_same_time_all_get_the_right_ids(trained_json, folder):
    source = str(Path(chatmill.__file__).parents[1])
    command = [sys.executable, "-c", AT_ONCE, str(trained_json)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with_source = os.environ | {"PYTHONPATH": source}
    processes = [subprocess.Popen(command, env=with_source, **pipes) for _ in range(4)]
    # The processes wait for a line, so that all of them compile at the same time.
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    printed = {process.communicate(timeout=120)[0] for process in processes}
    right = [id for ids in peer_ids(trained_json, ["Hello, world", "x" * 600]) for id in ids]
    assert printed == {f"{right}\n"}
    assert len([*folder.iterdir()]) == 1


# Remembered results.


def test_a_result_is_computed_once_and_again_if_its_file_is_damaged(folder):
    asked = []

    def find(value: bool) -> bool:
        asked.append(value)
        return value

    for key, value in (("a" * 64, True), ("b" * 64, False)):
        for _ in range(2):
            assert compiled_cache.remembered(key, lambda value=value: find(value)) is value
    assert asked == [True, False]
    file, other = folder / ("a" * 64), folder / ("b" * 64)
    whole = file.read_bytes()
    damages = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(whole))]
    for damaged in (*damages, b"", whole[:-1], whole + b" ", other.read_bytes()):
        file.write_bytes(damaged)
        assert compiled_cache.remembered("a" * 64, lambda: find(True)) is True
        assert asked.pop() is True and file.read_bytes() == whole
    assert asked == [True, False]
    assert compiled_cache.remembered(None, lambda: find(True)) and compiled_cache.remembered(None, lambda: find(True))
    assert len(asked) == 4


def test_a_control_encoder_is_probed_once(trained_json, folder, monkeypatch):
    raw, probed = trained_json.read_bytes(), []
    original = ControlEncoder._sections_agree
    monkeypatch.setattr(ControlEncoder, "_sections_agree", lambda self: (probed.append(1), original(self))[1])
    encoders = [ControlEncoder(open_tokenizer(trained_json), raw) for _ in range(2)]
    assert len(probed) == 1 and {encoder.by_sections for encoder in encoders} == {True}
    ControlEncoder(open_tokenizer(trained_json, control={"word": "in"}), raw)
    assert len(probed) == 2
