"""Opening a malicious model folder must not hang, use much memory, or execute code from the folder."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import struct
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from fault_injection.processes import apart, limited, load_torch
from fault_injection.trial import Tally, Trial

ROOM = 1 << 30
"""Bytes of memory that opening a folder may use."""
CPU_SECONDS = 20.0
VALUES: tuple[Any, ...] = (None, [], {}, "", "12", -1, 0, 1.5, True, 2**31, 2**63, 10**30, float("nan"), 1e400, [[1]])
SIZES = ("n_layer", "n_embd", "n_head", "vocab_size", "n_kv_head", "head_dim", "n_ffn", "max_positions", "tie_weights")
HF_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "vocab_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "layer_types",
    "rope_parameters",
    "model_type",
    "architectures",
    "torch_dtype",
)
NAMES = ("config.json", "model.safetensors", "training.json", "generation_config.json", "tokenizer.json")

Attack = tuple[str, Callable[[Path], None]]


def edit(folder: Path, name: str, **changes: Any) -> None:
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def first(header: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = header[min(name for name in header if name != "__metadata__")]
    return entry


def replaced_by(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return attack


def a_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.name)
    os.chdir(here)


def wrong_files() -> Iterator[Attack]:
    for ending in ("pytorch_model.bin", "model.pt", "weights.pkl", "last.ckpt"):
        yield f"only pickles: {ending}", lambda folder, ending=ending: _pickle(folder, ending)
    for name in NAMES:
        yield f"{name} is a FIFO", replaced_by(name, os.mkfifo)
        yield f"{name} is a socket", replaced_by(name, a_socket)
        yield f"{name} is a link to a device", replaced_by(name, lambda path: path.symlink_to("/dev/zero"))
        yield (
            f"{name} is a link to a file outside the folder",
            replaced_by(name, lambda path: path.symlink_to("/etc/hostname")),
        )
    for name in NAMES[:2]:
        yield f"{name} is a folder", replaced_by(name, Path.mkdir)
        yield f"{name} is missing", replaced_by(name, lambda path: None)
        yield f"{name} is empty", replaced_by(name, Path.touch)
        yield f"{name} is a link to itself", replaced_by(name, lambda path: path.symlink_to(path.name))
        yield f"{name} is large and sparse", lambda folder, name=name: os.truncate(folder / name, 1 << 40)
    yield "a deeply nested config", lambda folder: (folder / "config.json").write_text("[" * 100_000) and None
    yield "a config of NUL bytes", lambda folder: (folder / "config.json").write_bytes(b"\0" * 1000) and None


def _pickle(folder: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    # Unpickling this file creates a marker file.
    (folder / name).write_bytes(b"cos\nsystem\n(S'touch " + os.fsencode(folder / "executed") + b"'\ntR.")


def wrong_headers() -> Iterator[Attack]:
    weights = "model.safetensors"

    def header(what: str, change: Callable[[dict[str, Any]], object]) -> Attack:
        return what, lambda folder: edit_header(folder / weights, lambda header: change(header) and None)

    for length in (2**63, 2**64 - 1, 2**32, 0):
        yield (
            f"a header of {length} bytes",
            lambda folder, length=length: (
                (folder / weights).write_bytes(struct.pack("<Q", length) + (folder / weights).read_bytes()[8:]) and None
            ),
        )
    yield header("an unknown dtype", lambda header: first(header).update(dtype="F128"))
    yield header("a giant shape", lambda header: first(header).update(shape=[2**40, 2**40]))
    yield header("a shape of zero", lambda header: first(header).update(shape=[0, 2**62]))
    yield header("a negative shape", lambda header: first(header).update(shape=[-1, -4]))
    yield header("a shape that is a string", lambda header: first(header).update(shape="12"))
    yield header("offsets beyond the end of the file", lambda header: first(header).update(data_offsets=[0, 2**50]))
    yield header("offsets backwards", lambda header: first(header).update(data_offsets=[64, 0]))
    yield header("overlapping offsets", lambda header: [each.update(data_offsets=[0, 4]) for each in header.values()])
    yield header("a null entry", lambda header: header.update(dict.fromkeys(list(header)[-1:])))
    yield header("two tensors with one name", lambda header: header.update({list(header)[-1]: first(header)}))
    yield header("no tensor", lambda header: header.clear())
    for target in (
        "../outside.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "no.safetensors",
        "x.bin",
        7,
        None,
        "\0",
    ):
        yield f"an index that lists {target!r}", lambda folder, target=target: _index(folder, {"x": target})
    for listed in ([], None, {}, "x"):
        yield f"an index with {listed!r}", lambda folder, listed=listed: _index(folder, listed)


def _index(folder: Path, listed: Any) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))


def wrong_numbers(names: tuple[str, ...], rng: random.Random) -> Iterator[Attack]:
    for name in names:
        for value in VALUES:
            yield (
                f"{name} is {value!r}",
                lambda folder, name=name, value=value: edit(folder, "config.json", **{name: value}),
            )
    yield "an unknown model_type", lambda folder: edit(folder, "config.json", model_type="x" * 10_000)
    yield (
        "custom model code",
        lambda folder: _code(folder, rng.choice(["AutoModelForCausalLM", "AutoConfig"])),
    )


def _code(folder: Path, name: str) -> None:
    (folder / "evil.py").write_text(f"open({str(folder / 'executed')!r}, 'w')\n")
    edit(folder, "config.json", model_type="unheard-of", auto_map={name: "evil.Evil", "AutoConfig": "evil.Evil"})


def judge(tally: Tally, folder: Path, what: str, *, harmless: bool) -> None:
    """Check that opening a model folder fails with an error message. With `harmless`, it is also correct if opening the
    folder succeeds.
    """
    from chatmill.train.load_model import check_is_model, open_model
    from chatmill.train.preflight import trained_with

    def work() -> str:
        check_is_model(folder)
        trained_with(folder)
        return type(open_model(folder)).__name__

    ended = apart(limited(work, ROOM), cpu_seconds=CPU_SECONDS)
    if (folder / "executed").exists():
        tally.is_wrong(f"{what}: code from the folder was executed")
    elif ended.value is not None and not harmless:
        tally.is_wrong(f"{what}: opened as {ended.value}")
    else:
        tally.judge(
            survived=ended.value is not None, found=bool(ended.refused), lost=f"{what}: {ended.broke or 'killed'}"
        )


def work(size: int, seed: int, folder: Path, tally: Tally) -> None:
    """Attack a model in chatmill's own format first; with a larger `size`, also attack a transformers model."""
    load_torch()
    from chatmill.train import GPT, GPTSizes

    rng, base = random.Random(seed), folder / "gpt"
    base.mkdir()
    GPT(GPTSizes(vocab_size=64, n_layer=2, n_embd=16, n_head=2, n_ffn=16, max_positions=32)).save(base)
    # Alternate between the kinds of attacks, so that a small run tries every kind.
    attacks = _in_turn(base, SIZES, rng)[:size]
    if size > len(attacks):
        attacks += _in_turn(save_hugging_face(folder / "qwen"), HF_SIZES, rng)[: size - len(attacks)]
    tally.expected = len(attacks)
    for number, (source, what, attack, harmless) in enumerate(attacks):
        place = folder / str(number)
        shutil.copytree(source, place)
        attack(place)
        judge(tally, place, f"{source.name}, {what}", harmless=harmless)
        shutil.rmtree(place)


def _in_turn(source: Path, names: tuple[str, ...], rng: random.Random) -> list[tuple[Path, str, Any, bool]]:
    files, headers, numbers = list(wrong_files()), list(wrong_headers()), list(wrong_numbers(names, rng))
    rng.shuffle(numbers)
    kinds = zip_longest(files, headers, numbers)
    return [
        (source, *attack, kind == 2) for attacks in kinds for kind, attack in enumerate(attacks) if attack is not None
    ]


def save_hugging_face(folder: Path) -> Path:
    """Save a small Qwen3 in a child process, because saving starts a thread. The modules are imported before forking,
    because all children need them.
    """
    from model_fixtures import save_qwen
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.qwen3 import modeling_qwen3

    assert all((AutoConfig, AutoModelForCausalLM, modeling_qwen3))
    saved = apart(lambda: str(save_qwen(folder)))
    assert saved.value, saved
    return folder


TRIAL = Trial(
    "hostile model folders",
    "Puts FIFOs, devices, links, pickles, code and wrong headers into model folders. Each folder must be refused "
    "with a one-line error, without executing code",
    work,
    full=460,
    short=40,
    in_memory=True,
)
