"""Run a fixed set of commands, and compare the hashes of the files that they write with recorded hashes.

A refactor must not change any of these hashes. If the files change on purpose, update the hashes with `python
tests/test_recorded_hashes.py --record` and describe the change in CHANGELOG.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chatmill.cli.main import main

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).with_name("recorded_hashes.json")
PRESETS = ("chatml", "ngpt", "primer", "post-training")

TEMPLATE = """\
{{- '<|bos|>' }}
{%- for message in messages %}
{{- '<|start|>' + message.role + '\\n' }}
{%- if message.content %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '<|call|>' + call.function.name + ' ' + call.function.arguments | tojson }}
{%- endfor %}
{{- '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}
"""
CONTROL = ("<|bos|>", "<|start|>", "<|call|>", "<|end|>")

SHARED_FLAGS = [
    "--train-on",
    "assistant",
    "--val-split",
    "0.1",
    "--split",
    "hash",
    "--seed",
    "42",
    "--shard-tokens",
    "20000",
    "--workers",
    "1",
    "--engine",
    "local",
    "--on-error",
    "skip",
    "--rejects",
    "rejects.jsonl",
]
TURNS = ["--fit", "turns", "--max-tokens", "200"]
RUN = {
    "batch_size": 4,
    "block_size": 128,
    "gradient_accumulation_steps": 1,
    "use_loss_mask": True,
    "batch_sampling_mode": "epoch",
    "epoch_seed": 7,
    "epoch_shuffle": True,
    "epoch_drop_last": True,
    "episode_min_tokens": 2,
    "pad_token_id": None,
    "n_layer": 1,
    "n_embd": 16,
    "n_head": 2,
    "max_positions": 256,
    "max_iters": 10,
    "eval_interval": 0,
    "save_interval": 5,
    "device": "cpu",
    "dtype": "float32",
    "seed": 1,
}


def chatmill(*args: str) -> str:
    printed, argv = io.StringIO(), sys.argv
    sys.argv = ["chatmill", *args]
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
            main()
    except SystemExit as ending:
        if ending.code:
            raise AssertionError(f"{args} ended with {ending.code}") from ending
    finally:
        sys.argv = argv
    return printed.getvalue()


def text_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def folder_hash(folder: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            total.update(f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def write_tokenizer(folder: Path) -> None:
    folder.mkdir()
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = iter(range(256, 512))
    alphabet = [chr(byte if byte in printable else next(shifted)) for byte in range(256)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 256 + at, "content": token, **flags} for at, token in enumerate(CONTROL)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {character: id for id, character in enumerate(alphabet)},
            "merges": [],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"bos_token": "<|bos|>", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 259}))


def prepared(name: str, *flags: str, inputs: tuple[str, ...] = ("data/*.jsonl",)) -> str:
    Path("rejects.jsonl").unlink(missing_ok=True)
    chatmill("prepare", *inputs, "-o", f"out/{name}", *SHARED_FLAGS, *flags)
    rejects = Path("rejects.jsonl")
    return folder_hash(Path("out", name)) + (text_hash(rejects.read_text("utf-8")) if rejects.is_file() else "")


def preset(name: str, *flags: str) -> Callable[[], str]:
    label = "-".join([name, *(flag.strip("-") for flag in flags)])
    return lambda: prepared(label, "--format", name, "--tokenizer", "bytes", *flags)


def template(*flags: str) -> Callable[[], str]:
    label = "-".join(["template", *(flag.strip("-") for flag in flags)])
    chosen = ("--format", "template", "--mask", "derived", "--template-date", "2026-01-31", "--tokenizer", "tokenizer")
    return lambda: prepared(label, *chosen, *flags)


def cache(command: str, flag: str, file: str) -> Callable[[], str]:
    def build() -> str:
        out = f"out/{command}"
        chatmill(
            command, flag, file, "--out-dir", out, "--seed", "3", "--val-frac", "0.2", "--t-max", "64",
            "--tokenizer", "bytes",
        )  # fmt: skip
        return folder_hash(Path(out))

    return build


def dolly() -> str:
    lines = [
        {"instruction": f"Say {n}.", "context": "" if n % 2 else f"About {n}", "response": f"{n}!"} for n in range(30)
    ]
    Path("dolly.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return cache("build-sft-dolly15k", "--input", "dolly.jsonl")()


def order(*flags: str) -> Callable[[], str]:
    def recompute() -> str:
        if not Path("out/order").exists():
            prepared("order", "--format", "chatml", "--tokenizer", "bytes", *TURNS)
        out = chatmill("order", "out/order", "--seed", "42", "--first", "1000", *flags)
        return text_hash(out)

    return recompute


def reweighed() -> str:
    prepared("weighed", "--format", "chatml", "--tokenizer", "bytes", *TURNS)
    chatmill("reweigh", "out/weighed", "--train-on", "last", "-o", "out/weighed-last")
    return folder_hash(Path("out/weighed-last"))


def rendered(*flags: str) -> Callable[[], str]:
    def render() -> str:
        inputs = ("data/conversations.jsonl", "data/tool_conversations.jsonl")
        return text_hash(chatmill("render", *inputs, "--json", "-n", "1000", *flags))

    return render


def transcripts() -> str:
    chatmill(
        "export", "transcripts", "data/conversations.jsonl", "-o", "out/transcripts.txt", "--context-length", "512"
    )
    return hashlib.sha256(Path("out/transcripts.txt").read_bytes()).hexdigest()


def audited(packing: str) -> Callable[[], str]:
    def run() -> str:
        name = f"audited-{packing}"
        prepared(name, "--format", "chatml", "--tokenizer", "bytes", *TURNS)
        Path(f"{name}.json").write_text(json.dumps({**RUN, "packing": packing, "audit_dir": f"logs/{name}"}))
        chatmill("train", "--model_name", name, "--config_file", f"{name}.json", "--dataset_dir", f"out/{name}")
        (log,) = Path("logs", name).glob("*.log")
        lines = log.read_text().splitlines()
        assert len(lines) > 4
        return text_hash("\n".join(re.sub(r"\b(previous|head)=\w+", "", line.partition(" | ")[2]) for line in lines))

    return run


CASES: dict[str, Callable[[], str]] = {
    **{f"prepare {name}": preset(name, *TURNS) for name in PRESETS},
    **{f"prepare {name} packed": preset(name, *TURNS, "--pack", "512") for name in PRESETS},
    "prepare chatml exchanges": preset("chatml", "--fit", "exchanges", "--max-tokens", "200"),
    "prepare chatml windows": preset("chatml", "--fit", "windows", "--max-tokens", "120"),
    "prepare chatml tail, deduplicated": preset("chatml", "--fit", "tail", "--max-tokens", "90", "--dedupe"),
    "prepare post-training blocks": preset("post-training", "--fit", "blocks", "--max-tokens", "65"),
    "prepare template": template(*TURNS),
    "prepare template packed": template(*TURNS, "--pack", "512"),
    "reweigh": reweighed,
    "render chatml": rendered("--format", "chatml", "--tokenizer", "bytes"),
    "render template": rendered("--format", "template", "--tokenizer", "tokenizer", "--template-date", "2026-01-31"),
    "export transcripts": transcripts,
    "build-sft-primer": cache("build-sft-primer", "--primer-jsonl", "data/primer.jsonl"),
    "build-sft-dolly15k": dolly,
    "order epoch 0": order("--mode", "epoch", "--epoch", "0"),
    "order epoch 3": order("--mode", "epoch", "--epoch", "3"),
    "order feistel": order("--mode", "feistel", "--epoch", "1"),
    "order random": order("--mode", "random", "--epoch", "0"),
    "audit log": audited("none"),
    "audit log packed": audited("bins"),
}


@contextlib.contextmanager
def folder_with_data() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("data").symlink_to(ROOT / "data")
        Path("out").mkdir()
        write_tokenizer(Path("tokenizer"))
        yield


@pytest.mark.parametrize("case", CASES)
def test_the_bytes_are_those_that_were_recorded(case: str) -> None:
    with folder_with_data():
        assert CASES[case]() == json.loads(RECORD.read_text())[case]


def test_every_case_is_recorded() -> None:
    assert list(json.loads(RECORD.read_text())) == list(CASES)


if __name__ == "__main__":
    assert sys.argv[1:] == ["--record"], "run python tests/test_recorded_hashes.py --record"
    hashes = {}
    for case, compute in CASES.items():
        with folder_with_data():
            hashes[case] = compute()
        print(f"{hashes[case][:16]} {case}")
    RECORD.write_text(json.dumps(hashes, indent=2) + "\n")
