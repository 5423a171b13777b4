"""List the sentences of the repository, draw a random sample, or check all sentences for phrases to avoid.

    python scripts/sentences.py src/chatmill/fit                    every sentence below a folder, with its place
    python scripts/sentences.py --sample 120 --seed 1               a sample from docs, docstrings, comments and strings
    python scripts/sentences.py --kinds docs string --sample 20     only some kinds
    python scripts/sentences.py --check                             fail on phrases in scripts/phrases.txt

The kinds are `docs` (Markdown outside of code blocks), `docstring`, `comment` and `string` (such as errors and help).
Paths default to the whole repository.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PHRASES = Path(__file__).with_name("phrases.txt")
KINDS = ("docs", "docstring", "comment", "string")
# Files that intentionally contain phrases to avoid.
QUOTES_PHRASES = frozenset({"scripts/phrases.txt", "tests/test_sentences.py"})
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`\"(])")
C_COMMENT = re.compile(r"/\*(.*?)\*/|//([^\n]*)", re.DOTALL)
MIN_WORDS = 3


class Sentence(NamedTuple):
    path: str
    line: int
    kind: str
    text: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="files or folders, relative to the repository")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="kinds of text to include")
    parser.add_argument("--sample", type=int, help="number of sentences to draw at random")
    parser.add_argument("--seed", type=int, default=0, help="seed for the sample")
    parser.add_argument(
        "--check", action="store_true", help="fail if a sentence contains a phrase in scripts/phrases.txt"
    )
    args = parser.parse_args()
    if args.check:
        problems = list(phrases_to_avoid(ROOT, args.paths, PHRASES.read_text("utf-8")))
        print(*problems, sep="\n", end="\n" if problems else "")
        return 1 if problems else 0
    listed = [each for each in sentences(ROOT, args.paths) if each.kind in args.kinds]
    if args.sample is not None:
        # Do not sample strings in tests: they are test data, or copies of messages that are listed where they are
        # defined.
        listed = [each for each in listed if each.kind != "string" or not each.path.startswith("tests/")]
        listed = sorted(random.Random(args.seed).sample(listed, min(args.sample, len(listed))))
    for each in listed:
        print(f"{each.path}:{each.line}: {each.kind}: {each.text}")
    return 0


def sentences(root: Path, paths: list[str]) -> Iterator[Sentence]:
    """Yield every sentence of the tracked files under `paths`."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *paths]
    listing = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    for name in sorted(set(listing.stdout.splitlines())):
        path = root / name
        if path.is_file():
            for line, kind, passage in passages(path):
                for text in split_sentences(passage):
                    yield Sentence(name, line, kind, text)


def passages(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield the line, kind and text of every passage of prose in a file."""
    if path.suffix == ".md":
        yield from ((line, "docs", text) for line, text in markdown_passages(path.read_text("utf-8")))
    elif path.suffix == ".py":
        yield from python_passages(path.read_text("utf-8"))
    elif path.suffix in {".c", ".h"}:
        source = path.read_text("utf-8")
        for match in C_COMMENT.finditer(source):
            text = re.sub(r"^\s*\*", "", match[1] or match[2] or "", flags=re.MULTILINE)
            yield source.count("\n", 0, match.start()) + 1, "comment", text
    elif path.name == "Makefile":
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            if "#" in line:
                yield number, "comment", line.split("#", 1)[1].lstrip("# ")


def markdown_passages(text: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs, list items, headings and table cells outside of code blocks."""
    start, lines, fenced = 0, [], False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        fence = line.lstrip().startswith("```")
        if fence or fenced or not line.strip() or re.match(r"\s*(#|\||[-*] |\d+\. |<!--)", line):
            if lines:
                yield start, " ".join(lines)
            lines = []
        fenced ^= fence
        if fence or fenced or not line.strip() or line.startswith("<!--"):
            continue
        if line.lstrip().startswith("|"):
            yield from ((number, cell.strip()) for cell in line.split("|"))
            continue
        if not lines:
            start = number
        lines.append(line.strip().lstrip("#-* "))


def python_passages(source: str) -> Iterator[tuple[int, str, str]]:
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                docstrings.add(first.value)
                for block in re.split(r"\n\s*\n", first.value.value):
                    if not re.match(r"\s*>>>| {4,}\S.* {2,}\S", block):
                        yield first.lineno, "docstring", block
    yield from ((line, "comment", text) for line, text in comment_blocks(source))
    templates = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    other = docstrings | {part for node in templates for part in ast.walk(node) if part is not node}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "string", "".join(template_part(part) for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in other:
            yield node.lineno, "string", node.value


def template_part(part: ast.expr) -> str:
    return str(part.value) if isinstance(part, ast.Constant) else "{" + ast.unparse(part.value) + "}"  # type: ignore[attr-defined]


def comment_blocks(source: str) -> Iterator[tuple[int, str]]:
    """Yield the comments of Python source, with comments on adjacent lines joined."""
    start, last, lines = 0, -1, []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or re.match(r"# (type|noqa|ruff|mypy|pragma)\b", token.string):
            continue
        if token.start[0] != last + 1 and lines:
            yield start, " ".join(lines)
            lines = []
        if not lines:
            start = token.start[0]
        last = token.start[0]
        lines.append(token.string.lstrip("#: "))
    if lines:
        yield start, " ".join(lines)


def split_sentences(passage: str) -> Iterator[str]:
    for text in SENTENCE_END.split(" ".join(passage.split())):
        if len([word for word in text.split() if re.search("[A-Za-z]{2}", word)]) >= MIN_WORDS:
            yield text


def phrases_to_avoid(root: Path, paths: list[str], listing: str) -> Iterator[str]:
    """Yield a line for each sentence that matches a pattern in `listing`, whose lines are `pattern -> replacement`."""
    rules = []
    for line in listing.splitlines():
        if line.strip() and not line.startswith("#"):
            pattern, better = line.split(" -> ", 1)
            rules.append((re.compile(pattern, re.IGNORECASE), better))
    for each in sentences(root, paths):
        if each.path not in QUOTES_PHRASES:
            for pattern, better in rules:
                if match := pattern.search(each.text):
                    yield f'{each.path}:{each.line}: "{match[0]}"; write {better}'


if __name__ == "__main__":
    sys.exit(main())
