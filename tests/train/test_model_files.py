from __future__ import annotations

import json
import os
import resource
import struct
from pathlib import Path

import pytest
from model_fixtures import SIZES, save_qwen, small_gpt

from chatmill.errors import ChatmillError, DataError
from chatmill.train import memory, model_files
from chatmill.train.load_model import check_is_model, open_model
from chatmill.train.model_files import ModelFiles, TensorInfo, check_headers, check_sizes, read_header


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "model"
    place.mkdir()
    small_gpt().save(place)
    return place


def refused(folder, says):
    for use in (open_model, check_is_model, check_headers):
        with pytest.raises(ChatmillError, match=says) as caught:
            use(folder)
        assert "\n" not in str(caught.value)


def header_of(path: Path) -> tuple[dict, bytes]:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_header(path: Path, header: object, data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json", "tokenizer.json"])
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (os.mkfifo, "is a FIFO; expected a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "is a link to a file outside the model folder"),
        (lambda path: path.symlink_to("../outside"), "is a link to a file outside the model folder"),
    ],
)
def test_links_and_special_files_are_refused(folder, name, make, says):
    (folder.parent / "outside").write_text("{}")
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    refused(folder, f"{name}: {says}")


def test_links_in_the_cache_of_hugging_face_are_followed(tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    small_gpt().save(blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    assert open_model(snapshot).num_parameters == SIZES.num_parameters


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "x.pkl", "last.ckpt"])
def test_pickles_are_not_read(folder, name):
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"cos\nsystem\n(S'touch executed'\ntR.")
    refused(folder, f"{name}: pickle weights are not read")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dtype": "F128"}, "cannot be read"),
        ({"shape": [2**40, 2**40]}, "has 7,808 bytes, which does not match the shape"),
        ({"shape": [-61, -32]}, "cannot be read"),
        ({"shape": "61"}, "cannot be read"),
        ({"shape": None}, "cannot be read"),
        ({"data_offsets": [0, 2**50]}, "bytes, which does not match the shape"),
        ({"data_offsets": [7808, 0]}, "bytes, which does not match the shape"),
        ({"data_offsets": [1.5, 3]}, "cannot be read"),
    ],
)
def test_an_inconsistent_header_is_refused(folder, change, says):
    path = folder / "model.safetensors"
    header, data = header_of(path)
    header["embedding.weight"].update(change)
    write_header(path, header, data)
    refused(folder, f"model.safetensors: .*{says}")


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 0, 10**9])
def test_a_header_with_a_wrong_length_is_refused(folder, length):
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    refused(folder, r"is not a safetensors file")


def test_tensors_with_overlaps_or_gaps_are_refused(folder):
    path = folder / "model.safetensors"
    header, data = header_of(path)
    write_header(path, {**header, "again": header["embedding.weight"]}, data)
    refused(folder, r"begins at byte .*the header is wrong")
    write_header(path, header, data + b"more")
    refused(folder, r"has 70,020 bytes of tensors, but its header lists 70,016")


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "x.bin", 7, None, "x\0.safetensors"]
)
def test_an_index_may_only_list_files_of_its_folder(folder, file):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": file}}))
    refused(folder, r"w is in .*; expected a safetensors file in this folder")


@pytest.mark.parametrize("name", ["n_layer", "n_embd", "vocab_size"])
@pytest.mark.parametrize("value", [2**31, 2**63, 10**30, -1, "2", None, True, [], 1e400])
def test_impossible_sizes_are_refused_before_memory_is_allocated(folder, name, value, monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: pytest.fail("sizes must be compared first"))
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    with pytest.raises(DataError, match=name if value != 2**31 else "config.json") as caught:
        open_model(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "vocab_size", "text_config.num_hidden_layers"])
@pytest.mark.parametrize("value", [2**31, -1, "2", 1.5, True, []])
def test_sizes_in_a_hugging_face_config_are_compared_with_the_weights(key, value):
    tensors = {f"layers.{number}": TensorInfo("F32", (8, 16)) for number in range(4)}
    *outer, name = key.split(".")
    config = {name: value}
    for each in outer:
        config = {each: config}
    with pytest.raises(DataError, match=rf"config.json: {key} is .*; expected 0 to \d+ \(the weights have 4 tensors"):
        check_sizes(ModelFiles(Path("x"), config, tensors))
    check_sizes(ModelFiles(Path("x"), {"num_hidden_layers": 4, "hidden_size": 16, "vocab_size": None}, tensors))


def test_a_kernel_from_a_repository_is_refused():
    with pytest.raises(DataError, match="a code repository"):
        check_sizes(ModelFiles(Path("x"), {"_attn_implementation": "somebody/kernels"}, {}))


def test_a_weight_that_transformers_would_initialize_randomly_is_an_error(tmp_path):
    folder = save_qwen(tmp_path / "qwen")
    path = folder / "model.safetensors"
    header, _ = header_of(path)
    names = [name for name in header if name not in ("__metadata__", "model.norm.weight")]
    kept, at, data = {}, 0, header_of(path)[1]
    out = b""
    for name in names:
        start, stop = header[name]["data_offsets"]
        kept[name] = {**header[name], "data_offsets": [at, at + stop - start]}
        out, at = out + data[start:stop], at + stop - start
    write_header(path, {"__metadata__": {"format": "pt"}, **kept}, out)
    with pytest.raises(DataError, match=r"the weight files have no model.norm.weight, .*\(missing weights: 1\)"):
        open_model(folder)


@pytest.mark.parametrize("base", ["empty", "somebody/model", None, 7, "x\0"])
def test_the_base_model_of_adapters_must_be_a_model_folder(tmp_path, base, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 4, "base_model_name_or_path": base})
    )
    write_header(tmp_path / "adapter_model.safetensors", {}, b"")
    with pytest.raises(DataError, match=r"is not a folder on this machine|empty: has no config.json"):
        open_model(tmp_path)


@pytest.mark.parametrize(
    "change", [{"r": 2**31}, {"r": "4"}, {"r": 0}, {"rank_pattern": {"a": -1}}, {"peft_type": "X"}]
)
def test_adapters_of_an_unsupported_kind_or_rank_are_refused(tmp_path, change, monkeypatch):
    base = save_qwen(tmp_path / "base")
    folder = tmp_path / "adapters"
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": str(base), **change}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    write_header(folder / "adapter_model.safetensors", {}, b"")
    monkeypatch.setattr(memory, "available_memory", lambda: 2.0**33)
    with pytest.raises(DataError, match=r"r is|peft_type is|a LoRA adapter of this rank takes"):
        open_model(folder)


# Memory.


def fake_system(tmp_path, monkeypatch, cgroup):
    monkeypatch.setattr(memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "cgroup")
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\nSwapFree: 1000 kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text(cgroup)


def group(path, limit, used, *, names=("memory.max", "memory.current"), stat="active_file 100\ninactive_file 24\n"):
    path.mkdir(parents=True, exist_ok=True)
    for name, text in zip((*names, "memory.stat"), (limit, used, stat), strict=True):
        (path / name).write_text(text)


def test_without_a_control_group_the_memory_of_the_host_counts(tmp_path, monkeypatch):
    fake_system(tmp_path, monkeypatch, "0::/\n")
    assert memory.available_memory() == 9000 << 10


@pytest.mark.parametrize(
    ("outer", "inner", "free"), [("max", "5000", 4124), ("2000", "max", 1124), ("2000", "5000", 1124)]
)
def test_the_tightest_control_group_counts(tmp_path, monkeypatch, outer, inner, free):
    fake_system(tmp_path, monkeypatch, "0::/jobs/mine\n")
    group(tmp_path / "cgroup" / "jobs", outer, "1000")
    group(tmp_path / "cgroup" / "jobs" / "mine", inner, "1000")
    assert memory.available_memory() == free


def test_control_groups_of_the_first_version_count(tmp_path, monkeypatch):
    fake_system(tmp_path, monkeypatch, "4:cpu:/x\n3:memory:/jobs\n")
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    group(tmp_path / "cgroup" / "memory" / "jobs", "3000", "1000", names=names, stat="total_inactive_file 5\n")
    assert memory.available_memory() == 2005


def test_a_limit_of_the_address_space_counts(tmp_path, monkeypatch):
    fake_system(tmp_path, monkeypatch, "")
    (tmp_path / "proc" / "self" / "statm").write_text("2 1 1 1 0 1 0\n")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (5 * resource.getpagesize(), -1))
    assert memory.available_memory() == 3 * resource.getpagesize()


def test_a_model_folder_that_does_not_fit_in_host_memory_is_refused(folder, monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: 1000.0)
    with pytest.raises(DataError, match=r"model: the model takes 0.0 GiB of memory, but 0.0 GiB are available"):
        open_model(folder)


def test_a_header_above_the_size_limit_is_refused(folder, monkeypatch):
    assert len(read_header(folder / "model.safetensors")) == len(small_gpt().state_dict())
    monkeypatch.setattr(model_files, "HEADER_LIMIT", 100)
    with pytest.raises(DataError, match="its header cannot have"):
        read_header(folder / "model.safetensors")
