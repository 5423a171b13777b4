"""Generate the benchmark data: conversations with realistic lengths.

English prose is taken from the docstrings of Python's standard library, and code from its source files. Text in other
languages consists of random words in eight other scripts, such as Greek and Han. `python benchmarks/corpus.py`
generates the data once, from a fixed seed, and stores it in `benchmarks/.data`. Use `--input` and `--tokenizer` to run
a benchmark on your own data.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sys
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

DATA = Path(__file__).parent / ".data"
SYSTEMS = [
    "You are a helpful assistant.",
    "You are a careful programmer. Answer with code where code helps.",
    "Answer in the language of the question.",
    "You are a patient teacher who explains step by step and checks every result before giving it.",
]
# Scripts as (first letter, last letter, letters per word, word separator).
SCRIPTS = [
    ("α", "ω", 6, " "),
    ("а", "я", 7, " "),
    ("א", "ת", 5, " "),
    ("ا", "ي", 5, " "),
    ("अ", "ह", 4, " "),
    ("一", "龥", 2, ""),
    ("ぁ", "ん", 3, ""),
    ("가", "힣", 2, " "),
]


def prose_and_code(rng: random.Random) -> tuple[list[str], list[str]]:
    prose, code = [], []
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        path for path in root.rglob("*.py") if "site-packages" not in path.parts and "test" not in path.parts
    )
    rng.shuffle(files)
    for path in files[:1500]:
        try:
            text = path.read_text("utf-8")
            tree = ast.parse(text)
        except (OSError, ValueError, SyntaxError):
            continue
        lines = text.splitlines()
        code += ["\n".join(lines[at : at + 12]) for at in range(0, len(lines), 12)]
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and (doc := ast.get_docstring(node)):
                prose += [" ".join(part.split()) for part in doc.split("\n\n") if len(part) > 40]
    return prose, code


def foreign(rng: random.Random) -> str:
    first, last, letters, separator = rng.choice(SCRIPTS)
    # Zipf-like frequencies make some words common, as in a real language.
    words = []
    for _ in range(rng.randrange(8, 30)):
        word_rng = random.Random(int(rng.paretovariate(0.7)) % 5000)
        span = ord(last) - ord(first) + 1
        words.append(
            "".join(chr(ord(first) + word_rng.randrange(span)) for _ in range(1 + word_rng.randrange(letters)))
        )
    return separator.join(words) + "."


def conversations(count: int, *, seed: int = 0) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Yield multi-turn conversations with a mean length of about 780 tokens, two thirds of which are in assistant
    turns.
    """
    rng = random.Random(seed)
    prose, code = prose_and_code(rng)

    def text(characters: int) -> str:
        parts: list[str] = []
        size = 0
        while size < characters:
            kind = rng.random()
            part = rng.choice(prose) if kind < 0.65 else rng.choice(code) if kind < 0.9 else foreign(rng)
            parts.append(part)
            size += len(part) + 2
        return "\n\n".join(parts)[:characters].strip() or "yes"

    for _ in range(count):
        messages = [{"role": "system", "content": rng.choice(SYSTEMS)}] if rng.random() < 0.5 else []
        for _ in range(1 + min(int(rng.expovariate(0.45)), 11)):
            messages.append({"role": "user", "content": text(int(rng.lognormvariate(5.1, 1.0)))})
            messages.append({"role": "assistant", "content": text(int(rng.lognormvariate(6.2, 0.9)))})
        yield {"messages": messages}


def chat_file(count: int) -> Path:
    """Return the path of a file with `count` conversations. Create the file if it does not exist."""
    path = DATA / f"chat-{count}.jsonl"
    if not path.exists():
        print(f"generating {path.name} …", file=sys.stderr, flush=True)
        DATA.mkdir(exist_ok=True)
        aside = path.with_suffix(".part")
        with aside.open("w", encoding="utf-8") as file:
            for record in conversations(count):
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        aside.replace(path)
    return path


def tokenizer_file(vocab_size: int = 100_000) -> Path:
    """Return the path of a byte-level BPE tokenizer with the ChatML tokens. Train the tokenizer on generated
    conversations if the file does not exist.
    """
    from chatmill.format import load_format
    from chatmill.tokenizer import train_bpe

    path = DATA / f"bpe-{vocab_size}.json"
    if not path.exists():
        print(f"training {path.name} …", file=sys.stderr, flush=True)
        DATA.mkdir(exist_ok=True)
        texts = (message["content"] for record in conversations(10_000, seed=1) for message in record["messages"])
        data = train_bpe(texts, vocab_size=vocab_size, control=list(load_format("chatml").tokens.values()))
        path.write_bytes(data)
    return path


class Data(NamedTuple):
    """The input of a benchmark: a file of conversations, their number, and a tokenizer.json with the ChatML tokens."""

    path: Path
    conversations: int
    tokenizer: Path


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--conversations", type=int, default=50_000, help="number of conversations to generate if --input is not given"
    )
    parser.add_argument("--input", type=Path, help="use your own conversations: JSON lines with plain-text messages")
    parser.add_argument("--tokenizer", type=Path, help="use your own tokenizer.json, which must have the ChatML tokens")


def chosen(args: argparse.Namespace) -> Data:
    DATA.mkdir(exist_ok=True)
    tokenizer = args.tokenizer or tokenizer_file()
    if args.input is None:
        return Data(chat_file(args.conversations), args.conversations, tokenizer)
    with args.input.open("rb") as file:
        return Data(args.input, sum(1 for line in file if line.strip()), tokenizer)


def options_of(data: Data) -> list[str]:
    return ["--input", str(data.path), "--tokenizer", str(data.tokenizer)]


def grown(path: Path, folder: Path, *, lines: int, times: int = 1) -> Path:
    """Write the first `lines` lines of a file to a new file, repeated `times` times."""
    out = folder / f"{path.stem}-{lines}x{times}.jsonl"
    with path.open("rb") as file:
        content = b"".join(islice(file, lines))
    with out.open("wb") as file:
        for _ in range(times):
            file.write(content)
    return out


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Generate the benchmark data.")
    add_options(options)
    arguments = options.parse_args()
    found = chosen(arguments)
    own = [name for name in ("input", "tokenizer") if getattr(arguments, name)]
    print(json.dumps({"conversations": found.conversations, "bytes": found.path.stat().st_size, "own": own}))
