"""Certify every chat template that TRL ships, and hold the derived mask against its tagged edition: a Markdown table.

    python scripts/template_table.py            print the table
    python scripts/template_table.py --write    put it into docs/templates.md
    python scripts/template_table.py --check    exit 1 if docs/templates.md has another one

The tokenizer is a byte-level BPE trained here, with the control strings of all templates as its special tokens.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import trl
from transformers import PreTrainedTokenizerFast

from chatmill.errors import RecordError
from chatmill.format import Mask, TemplateOptions, TemplateRenderer, open_renderer
from chatmill.format.template.certify import PROBES, Finding, certify
from chatmill.records import Record
from chatmill.tokenizer import train_bpe

FOLDER = Path(trl.__file__).parent / "chat_templates"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "templates.md"
BEGIN, END = "<!-- table: scripts/template_table.py -->", "<!-- end of table -->"
ORIGINALS = sorted(path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training"))
TOKEN = re.compile(
    r"""<\|[^|<>\n]{1,40}\|>|<｜[^｜\n]+｜>|<\|"\|>|<\|[a-z_]+>|<[a-z_]+\|>|\[/?INST\]|\[gMASK\]|<sop>
    |</?(?:think|tool_call|tool_response|start_of_turn|end_of_turn|start_of_image|image|end_of_utterance|arg_key
    |arg_value)>""",
    re.VERBOSE,
)
AFTER = "{} *after*"
BEFORE = "{} *before*"
MORE = "not {}, *written*"
LEGEND = """What the tagged edition trains and chatmill does not, or the other way round, and why:
*after*: it follows the end of the turn, where a server has stopped, so it is context.
*before*: the prompt already holds it, so the model never has to write it and it is context.
*written*: the model has to write it for a server to stop there, so it is trained."""


class Line(NamedTuple):
    """What there is to say of one template."""

    name: str
    findings: list[Finding]
    origin: int
    starts: int
    stops: int
    """Answers by origin; beginnings and ends that prefixes tell as well."""
    tagged: str
    """How the tagged edition differs."""

    @property
    def certified(self) -> bool:
        return all(finding.passed for finding in self.findings)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/templates.md")
    parser.add_argument("--check", action="store_true", help="compare it with the one there")
    args = parser.parse_args()
    table = markdown(lines())
    if args.write:
        PAGE.write_text(with_table(PAGE.read_text("utf-8"), table), "utf-8")
        print(f"{PAGE}: written")
    elif args.check:
        same = with_table(PAGE.read_text("utf-8"), table) == PAGE.read_text("utf-8")
        print(f"{PAGE}: {'the same' if same else 'differs; write it anew with --write'}")
        return 0 if same else 1
    else:
        print(table)
    return 0


def lines() -> list[Line]:
    """One line for each original."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer(Path(folder))
        peer = PreTrainedTokenizerFast(
            tokenizer_file=str(tokenizer / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
        )
        return [line(name, tokenizer, peer) for name in ORIGINALS]


def line(name: str, tokenizer: Path, peer: PreTrainedTokenizerFast) -> Line:
    original = opened(tokenizer, name)
    findings = certify(original, peer=partial(peer_ids, peer, original), peer_name="transformers")
    derived = []
    for probe in PROBES:
        try:
            derived.append(original.derive(probe))
        except RecordError:
            continue
    prefixes = [prefix for one in derived for prefix in one.prefixes]
    return Line(
        name,
        findings,
        sum(len(one.answers) for one in derived),
        sum(prefix.start is not None for prefix in prefixes),
        sum(prefix.stop is not None for prefix in prefixes),
        tagged(name, original, tokenizer),
    )


def opened(tokenizer: Path, name: str, mask: Mask = "derived") -> TemplateRenderer:
    options = TemplateOptions(str(FOLDER / f"{name}.jinja"), mask=mask)
    renderer = open_renderer("template", str(tokenizer), template=options)
    assert isinstance(renderer, TemplateRenderer)
    return renderer


def make_tokenizer(folder: Path) -> Path:
    sources = [path.read_text("utf-8") for path in sorted(FOLDER.glob("*.jinja"))]
    control = sorted({token for source in sources for token in TOKEN.findall(source)} | {"<s>", "</s>"})
    data = train_bpe(["The quick brown fox jumps over the lazy dog. "] * 4, vocab_size=900, control=control)
    (folder / "tokenizer.json").write_bytes(data)
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder


def peer_ids(peer: PreTrainedTokenizerFast, format: TemplateRenderer, record: Record) -> list[int]:
    given = format.template_input(record)
    source = format.templates[bool(record.tools)].source
    return list(
        peer.apply_chat_template(
            given.messages, tools=given.tools, chat_template=source, tokenize=True, return_dict=False
        )
    )


def tagged(name: str, original: TemplateRenderer, tokenizer: Path) -> str:
    """How the mask of the tagged edition differs, over the probes that both write as the same text."""
    has_tags = "{%- generation -%}" in original.folder.template.source
    edition = name if has_tags else f"{name}_training"
    if not (FOLDER / f"{edition}.jinja").is_file():
        return "there is none"
    other = opened(tokenizer, edition, "tags")
    compared = 0
    reasons: dict[str, set[str]] = {}
    for probe in PROBES:
        try:
            one, two = original.derive(probe), other.derive(probe)
        except RecordError:
            continue
        if one.rendering.text != two.rendering.text:
            continue
        compared += 1
        for reason, text in differences(one.rendering.text, spans(one.answers), spans(two.answers)):
            reasons.setdefault(reason, set()).add(f"`{json.dumps(text, ensure_ascii=False)[1:-1]}`")
    if not compared:
        return "writes every probe differently"
    summary = "; ".join(reason.format(", ".join(sorted(texts))) for reason, texts in reasons.items())
    return summary or "the same mask"


def spans(answers: Sequence[tuple[int, int, int, bool]]) -> list[tuple[int, int]]:
    return [(start, stop) for _, start, stop, _ in answers]


def differences(text: str, ours: Sequence[tuple[int, int]], theirs: Sequence[tuple[int, int]]) -> list[tuple[str, str]]:
    """Stretches that only one of two masks trains, each with the reason."""
    mine = {at for start, stop in ours for at in range(start, stop)}
    tags = {at for start, stop in theirs for at in range(start, stop)}
    stretches = []
    places = sorted(mine ^ tags)
    while places:
        start = places[0]
        stop = next((at for at in range(start, len(text) + 1) if at not in places), len(text))
        places = [at for at in places if at >= stop]
        kind = MORE if start in mine else AFTER if start - 1 in mine else BEFORE
        stretches.append((kind, text[start:stop]))
    return stretches


def markdown(table: Sequence[Line]) -> str:
    """The table, and what it adds up to."""
    certified = sum(line.certified for line in table)
    both = sum(line.starts > 0 and line.stops > 0 for line in table)
    out = [
        f"{certified} of {len(table)} certify; both derivations apply to {both} of them.",
        "",
        LEGEND,
        "",
        "| template | certified | answers by origin | by prefix: begin / end | the tagged edition trains besides |",
        "|---|---|---:|---:|---|",
    ]
    for line in table:
        yes = "yes" if line.certified else "no"
        out.append(f"| `{line.name}` | {yes} | {line.origin} | {line.starts} / {line.stops} | {escaped(line.tagged)} |")
    refused = [(line.name, finding) for line in table for finding in line.findings if not finding.passed]
    for name, finding in refused:
        text = finding.text.replace(f"{FOLDER}/", "")
        out += ["", f"`{name}` is refused at *{finding.name}*:", "", f"    {text}"]
    return "\n".join(out)


def escaped(text: str) -> str:
    return text.replace("|", "\\|")


def with_table(page: str, table: str) -> str:
    before, after = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{after.split(END)[1]}"


if __name__ == "__main__":
    sys.exit(main())
