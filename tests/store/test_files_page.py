"""Read real files using only the tables in docs/reference/files.md.

Types and offsets are parsed from the page, so the tests fail if a table is wrong.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from store_fixtures import some_rows

from chatmill.audit import Audit
from chatmill.ledger import Ledger
from chatmill.load.loader import EpisodeLoader
from chatmill.rows import Part, Role, Rows, Rule
from chatmill.store import CacheMeta, open_cache, write_cache
from chatmill.store.metadata import Metadata, write_metadata
from chatmill.store.read import open_dataset
from chatmill.store.write import SplitWriter

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "files.md").read_text("utf-8")
TYPES = {
    "uint8": "u1",
    "uint32": "<u4",
    "uint64": "<u8",
    "float32": "<f4",
    "2 × uint64": ("<u8", (2,)),
    "8 bytes": "S8",
}
NONE = 4_294_967_295


def table(heading: str) -> np.dtype:
    below = PAGE[PAGE.index(f"\n{heading}\n") :]
    lines = re.findall(
        r"^\| (\d+) \| `(\w+)` \| ([\w× ]+?) \|", below[: below.index("\n\n", below.index("|---"))], re.M
    )
    found = np.dtype(
        [(name, *([TYPES[kind]] if isinstance(TYPES[kind], str) else TYPES[kind])) for _, name, kind in lines]
    )
    assert [found.fields[name][1] for _, name, _ in lines] == [int(at) for at, _, _ in lines]
    return found


def codes(column: int) -> dict[str, int]:
    """Map each name in one column (1: roles, 2: parts, 3: rules) of the table of codes to its number."""
    below = PAGE[PAGE.index("| number |") :]
    lines = re.findall(r"^\| (\d+) \| *(\S*) *\| *(\S*) *\| *(\S*) *\|$", below[: below.index("\n\n")], re.M)
    return {line[column].strip("`"): int(line[0]) for line in lines if line[column].startswith("`")}


def canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


@pytest.fixture(scope="module", params=[1000, 100_000], ids=["uint16", "uint32"])
def dataset(request, tmp_path_factory) -> tuple[Path, Rows]:
    folder = tmp_path_factory.mktemp("dataset")
    rows = some_rows(5, count=60)
    with SplitWriter(folder / "train", vocab_size=request.param, shard_tokens=200) as writer:
        writer.append(rows)
        info = writer.close()
    write_metadata(
        folder,
        Metadata(
            vocab_size=request.param,
            format={"name": "made"},
            tokenizer={"name": "made", "sha256": "0" * 64},
            special_token_ids={"eot": 7},
            pad_token_id=7,
            splits={"train": info},
            ledger=Ledger(),
            config={},
        ),
        tokenizer_state={"name": "made"},
    )
    return folder, rows


def test_the_codes_on_the_page_equal_those_in_the_code():
    for column, kind in ((1, Role), (2, Part), (3, Rule)):
        assert codes(column) == {member.name.lower(): int(member) for member in kind}


def test_reading_a_dataset_by_the_page_equals_reading_it_with_the_library(dataset):
    folder, _ = dataset
    metadata = json.loads((folder / "dataset_metadata.json").read_bytes())
    train = open_dataset(folder)["train"]
    width = np.dtype(metadata["dtype"]).newbyteorder("<")
    split = metadata["splits"]["train"]
    assert len(split["shards"]) > 3
    number = 0
    for shard in split["shards"]:
        place = folder / "train" / shard["name"]
        read = {
            "tokens.bin": np.fromfile(place / "tokens.bin", dtype=width),
            "mask.bin": np.fromfile(place / "mask.bin", dtype="u1"),
            **{
                name: np.fromfile(place / name, dtype=table(f"### {name}"))
                for name in ("episodes.idx", "spans.bin", "origins.bin")
            },
        }
        spans, origins, index = read["spans.bin"], read["origins.bin"], read["episodes.idx"]
        targets = np.full(len(spans), -1)
        if (place / "targets.bin").exists():
            other = np.fromfile(place / "targets.bin", dtype=table("### targets.bin"))
            assert np.all(np.diff(other["span"].astype(np.int64)) > 0)
            targets[other["span"]] = other["target"]
        # The mask is derived from the spans.
        assert np.array_equal(read["mask.bin"], np.repeat(spans["weight"] > 0, spans["length"]))
        assert np.array_equal(index["start"], np.append(0, np.cumsum(index["length"])[:-1]))
        ends = np.append(origins["first_span"][1:], len(spans))
        span_at = np.append(0, np.cumsum(spans["length"]))
        for row, (start, length) in enumerate(index.tolist()):
            rows = train.rows([number])
            number += 1
            mine = np.flatnonzero(origins["row"] == row)
            if not len(mine):
                assert length == len(rows.ids) == 0
                continue
            first, stop = int(origins["first_span"][mine[0]]), int(ends[mine[-1]])
            assert (int(span_at[first]), int(span_at[stop])) == (start, start + length)
            assert np.array_equal(rows.ids, read["tokens.bin"][start : start + length])
            for name in ("length", "message", "weight", "role", "part", "rule"):
                assert np.array_equal(rows.spans[name], spans[name][first:stop])
            assert np.array_equal(rows.spans["target"], targets[first:stop])
            for name in ("file", "line", "key"):
                assert np.array_equal(rows.origins[name], origins[name][mine])
            assert np.array_equal(rows.first_span[:-1], origins["first_span"][mine] - first)
            named = [split["files"][file] for file in origins["file"][mine] if file != NONE]
            assert named == [list(rows.files[file]) for file in rows.origins["file"] if file != NONE]
    assert number == len(train) == split["num_episodes"]


def test_metadata_contains_the_hash_of_every_file_and_its_own(dataset):
    folder, _ = dataset
    raw = (folder / "dataset_metadata.json").read_bytes()
    metadata = json.loads(raw)
    lines = [f"{json.dumps(key)}: {canonical(metadata[key]).decode()}" for key in sorted(metadata)]
    assert raw.decode() == "{\n" + ",\n".join(lines) + "\n}\n"
    assert metadata.pop("sha256") == hashlib.sha256(canonical(metadata)).hexdigest() == open_dataset(folder).sha256
    said = {"tokenizer_state.json": metadata["tokenizer_state"]}
    for shard in metadata["splits"]["train"]["shards"]:
        said |= {f"train/{shard['name']}/{name}": info for name, info in shard["files"].items()}
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert there == {*said, "dataset_metadata.json"}
    for name, info in said.items():
        data = (folder / name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (info["size"], info["sha256"])


@pytest.mark.parametrize(("vocab_size", "width"), [(1000, 2), (100_000, 4)])
def test_reading_a_cache_by_the_page_equals_reading_it_with_the_library(tmp_path, vocab_size, width):
    rows = some_rows(1, count=30, targets=False)
    ledger = Ledger()
    ledger.add("read", rows=len(rows))
    ledger.add("rendered", rows=len(rows), tokens=len(rows.ids))
    ledger.add("stored", rows=len(rows), tokens=len(rows.ids), trained=int(rows.mask().sum()))
    write_cache(
        tmp_path,
        CacheMeta(
            source="primer",
            format="primer",
            tokenizer_sha256="0" * 64,
            vocab_size=vocab_size,
            special_token_ids={"sys": 0, "usr": 1, "asst": 2, "eot": 3},
            val_frac=0.1,
            seed=42,
            T_max=1024,
            ledger=ledger,
        ),
        {"train": [rows]},
        shard_tokens=150,
    )
    header = table("## A cache")
    train = open_cache(tmp_path / "primer")["train"]
    meta = json.loads((tmp_path / "primer" / "meta.json").read_bytes())
    assert meta["splits"]["train"]["num_shards"] > 2
    number = 0
    for shard in meta["splits"]["train"]["shards"]:
        data = (tmp_path / "primer" / "train" / shard["name"]).read_bytes()
        said = np.frombuffer(data[: header.itemsize], dtype=header)[0]
        assert (said["magic"], said["version"], said["width"]) == (b"cm-cache", 1, width)
        examples, tokens = int(said["examples"]), int(said["tokens"])
        labels = 40 + 16 * examples + width * tokens
        assert len(data) == labels + tokens == shard["size"]
        assert data[labels:].count(1) == said["label_tokens"] == shard["num_label_tokens"]
        assert hashlib.sha256(data).hexdigest() == shard["sha256"]
        for each in range(examples):
            start, length = struct.unpack_from("<QQ", data, 40 + 16 * each)
            at = 40 + 16 * examples + width * start
            ids = struct.unpack_from(f"<{length}{'H' if width == 2 else 'I'}", data, at)
            assert list(ids) == train.tokens(number).tolist()
            assert list(data[labels + start : labels + start + length]) == train.mask(number).tolist()
            number += 1
    assert number == len(train) == len(rows)
    assert meta.pop("sha256") == hashlib.sha256(canonical(meta)).hexdigest()


def test_an_audit_log_read_by_the_page_has_the_digests_of_the_batches(dataset, tmp_path):
    folder, _ = dataset
    config = {"batch_size": 4, "block_size": 16, "epoch_seed": 3, "use_loss_mask": True}
    audit = Audit(tmp_path, every=3)
    loader = EpisodeLoader(folder, config, listener=audit, tensors=False)
    sums: dict[int, list[int]] = {}
    for step in range(10):
        batch = loader.get_batch()
        sums[step] = [0, 0]
        for place in range(4):
            x, y, weights = (column[place].tolist() for column in (batch.x, batch.y, batch.weights))
            episodes = [int(number) for number in batch.episode_ids[place] if number >= 0]
            following = [*x[1:], None]
            labels = [(at, label) for at, label in enumerate(y) if label not in (-100, following[at])]
            others = [(at, weight) for at, weight in enumerate(weights) if weight != (y[at] != -100)]
            bits = [(at, struct.unpack("<I", struct.pack("<f", weight))[0]) for at, weight in others]
            numbers = [len(x), len(episodes), 2 * len(labels), 2 * len(bits), step, place, *episodes]
            numbers += [number for pair in labels + bits for number in pair]
            marks = "".join("01"[label != -100] for label in y).ljust(-(-len(y) // 8) * 8, "0")
            content = struct.pack(f"<{len(numbers)}q", *numbers)
            content += bytes(int(marks[at : at + 8], 2) for at in range(0, len(marks), 8))
            content += struct.pack(f"<{len(x)}I", *x)
            for half, value in enumerate(struct.unpack("<QQ", hashlib.sha256(content).digest()[:16])):
                sums[step][half] = (sums[step][half] + value) % 2**64
    state = audit.checkpoint()
    audit.close()
    loader.close()

    [path] = tmp_path.glob("audit_*.log")
    raw = path.read_bytes()
    assert raw.endswith(b"\n")
    previous, covered = "0" * 64, 0
    for line in raw[:-1].decode("ascii").split("\n"):
        time, category, level, *pairs = line.split(" | ")
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", time)
        assert (category, level) == ("TRAINING", "INFO")
        fields = dict(pair.split("=", 1) for pair in pairs)
        values = {name: json.loads(text) if text.startswith('"') else text for name, text in fields.items()}
        assert (*values,)[0] == "action" and (*values,)[-1] == "previous"
        assert values["previous"] == previous
        if values["action"] == "steps":
            first, stop = int(values["first_step"]), int(values["stop_step"])
            assert first == covered
            covered = stop
            total = [sum(sums[step][half] for step in range(first, stop)) % 2**64 for half in range(2)]
            assert values["digest"] == struct.pack("<QQ", *total).hex()
        if values["action"] == "epoch_start":
            assert len(json.loads(values["first_episode_ids"])) == 10
        previous = hashlib.sha256(line.encode()).hexdigest()
    assert covered == 10
    assert (state["log"], state["head"]) == (path.name, previous)
