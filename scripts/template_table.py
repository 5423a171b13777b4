"""Certify every chat template in TRL, and compare chatmill's loss masks with those of TRL's tagged versions.

    python scripts/template_table.py            print the table
    python scripts/template_table.py --write    write it to docs/explanation/templates.md
    python scripts/template_table.py --check    exit 1 if the table in docs/explanation/templates.md differs

The script trains a byte-level BPE tokenizer, with the control strings of all templates as special tokens.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import trl
from transformers import PreTrainedTokenizerFast

from chatmill.errors import RecordError
from chatmill.format import Mask, TemplateRenderer
from chatmill.format.template.answers.derived import DerivedAnswers
from chatmill.format.template.certify.certificate import certify
from chatmill.format.template.certify.finding import Finding
from chatmill.format.template.hf_folder import read_folder
from chatmill.format.template.probes import BASIC
from chatmill.format.template.process.client import TemplateProcess
from chatmill.format.template.template_input import shape_and_texts
from chatmill.records import Record
from chatmill.tokenizer import Tokenizer, open_tokenizer, train_bpe

FOLDER = Path(trl.__file__).parent / "chat_templates"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "explanation" / "templates.md"
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
LEGEND = """The last column lists the tokens on which chatmill's mask and the mask of the tagged version differ.
*after*: the token comes after the end of the turn, and only the tagged version trains on the token.
*before*: the token is part of the prompt, and only the tagged version trains on the token.
*written*: the model has to generate the token so that a server stops, and only chatmill trains on the token."""


class Line(NamedTuple):
    name: str
    findings: list[Finding]
    origin: int
    starts: int
    stops: int
    """`origin` is the number of answers that chatmill finds by tracking the origin of each character; `starts` and
    `stops` are the numbers of answer starts and ends that a comparison of prefixes also finds.
    """
    tagged: str
    """A description of how the mask of the tagged version differs from chatmill's mask."""

    @property
    def certified(self) -> bool:
        return all(finding.passed for finding in self.findings)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table to docs/explanation/templates.md")
    parser.add_argument(
        "--check", action="store_true", help="compare the table with the one in docs/explanation/templates.md"
    )
    args = parser.parse_args()
    table = markdown(lines())
    if args.write:
        PAGE.write_text(with_table(PAGE.read_text("utf-8"), table), "utf-8")
        print(f"{PAGE}: written")
    elif args.check:
        same = with_table(PAGE.read_text("utf-8"), table) == PAGE.read_text("utf-8")
        print(f"{PAGE}: {'the same' if same else 'differs; update it with --write'}")
        return 0 if same else 1
    else:
        print(table)
    return 0


def lines(names: Sequence[str] = ORIGINALS) -> list[Line]:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer(Path(folder))
        peer = PreTrainedTokenizerFast(
            tokenizer_file=str(tokenizer / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
        )
        return [line(name, tokenizer, peer) for name in names]


def line(name: str, tokenizer: Path, peer: PreTrainedTokenizerFast) -> Line:
    original = opened(tokenizer, name)
    findings = certify(original, peer=partial(peer_ids, peer, original), peer_name="transformers")
    derived = derived_probes(original.process, "derived")
    prefixes = [prefix for one in derived.values() for prefix in one.prefixes]
    return Line(
        name,
        findings,
        sum(len(one.answers) for one in derived.values()),
        sum(prefix.start is not None for prefix in prefixes),
        sum(prefix.stop is not None for prefix in prefixes),
        tagged(name, original, derived, tokenizer),
    )


def derived_probes(process: TemplateProcess, mask: Mask) -> dict[str | None, DerivedAnswers]:
    """Return the answers found in each probe conversation that the template accepts, keyed by probe id."""
    template = process.templates[0]
    derived = {}
    for probe in BASIC:
        texts = len(shape_and_texts(probe, template.style)[1])
        with suppress(RecordError):
            derived[probe.id] = process.derive(template.number, probe, texts=texts, mask=mask, cacheable=False)
    return derived


def opened(tokenizer: Path, name: str) -> TemplateRenderer:
    return TemplateRenderer(read_folder(str(tokenizer), template_file(name)), shared_tokenizer(str(tokenizer)))


def template_file(name: str) -> str:
    return str(FOLDER / f"{name}.jinja")


@cache
def shared_tokenizer(folder: str) -> Tokenizer:
    """Open one tokenizer for all templates, because opening it takes longer than checking most templates."""
    return open_tokenizer(folder)


def make_tokenizer(folder: Path) -> Path:
    sources = [path.read_text("utf-8") for path in sorted(FOLDER.glob("*.jinja"))]
    control = sorted({token for source in sources for token in TOKEN.findall(source)} | {"<s>", "</s>"})
    data = train_bpe(["The quick brown fox jumps over the lazy dog. "] * 4, vocab_size=900, control=control)
    (folder / "tokenizer.json").write_bytes(data)
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder


def peer_ids(
    peer: PreTrainedTokenizerFast, format: TemplateRenderer, record: Record, *, null_content: bool = False
) -> list[int]:
    given = format.template_input(record)
    source = format.templates[bool(record.tools)].source
    messages = [
        {**one, "content": None} if null_content and "tool_calls" in one and not message.content else one
        for one, message in zip(given.messages, record.messages, strict=True)
    ]
    try:
        ids = peer.apply_chat_template(
            messages, tools=given.tools, chat_template=source, tokenize=True, return_dict=False
        )
    except Exception:
        return []
    return list(ids)


def tagged(name: str, original: TemplateRenderer, derived: Mapping[str | None, DerivedAnswers], tokenizer: Path) -> str:
    """Describe how the loss mask of TRL's template with generation tags differs from chatmill's mask of the original
    template. Only probe conversations that both templates render to the same text are compared.
    """
    has_tags = "{%- generation -%}" in original.folder.template.source
    edition = name if has_tags else f"{name}_training"
    if not (FOLDER / f"{edition}.jinja").is_file():
        return "no tagged version"
    compared = 0
    reasons: dict[str, set[str]] = {}
    folder = read_folder(str(tokenizer), template_file(edition))
    tokens = list(original.control_tokens.ids)
    # Run only the template, because a renderer would check the tokenizer again.
    process = TemplateProcess([folder.template], variables=folder.special, now=datetime.now(), tokens=tokens, ends=[])
    for id, two in derived_probes(process, "tags").items():
        one = derived.get(id)
        if one is None or one.rendering.text != two.rendering.text:
            continue
        compared += 1
        for reason, text in differences(one.rendering.text, spans(one.answers), spans(two.answers)):
            reasons.setdefault(reason, set()).add(f"`{json.dumps(text, ensure_ascii=False)[1:-1]}`")
    if not compared:
        return "the tagged version renders every probe differently"
    summary = "; ".join(reason.format(", ".join(sorted(texts))) for reason, texts in reasons.items())
    return summary or "no difference"


def spans(answers: Sequence[tuple[int, int, int, bool]]) -> list[tuple[int, int]]:
    return [(start, stop) for _, start, stop, _ in answers]


def differences(text: str, ours: Sequence[tuple[int, int]], theirs: Sequence[tuple[int, int]]) -> list[tuple[str, str]]:
    """Return each piece of text that is in only one of the two masks, with the reason."""
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
    certified = sum(line.certified for line in table)
    both = sum(line.starts > 0 and line.stops > 0 for line in table)
    out = [
        f"{certified} of {len(table)} templates pass `certify`. Both methods find answers in {both} templates.",
        "",
        LEGEND,
        "",
        "| template | certified | answers by origin | by prefix (begin / end) | difference from tagged version |",
        "|---|---|---:|---:|---|",
    ]
    for line in table:
        yes = "yes" if line.certified else "no"
        out.append(f"| `{line.name}` | {yes} | {line.origin} | {line.starts} / {line.stops} | {escaped(line.tagged)} |")
    refused = [(line.name, finding) for line in table for finding in line.findings if not finding.passed]
    for name, finding in refused:
        text = finding.text.replace(f"{FOLDER}/", "")
        out += ["", f"`certify` fails for `{name}` with this `{finding.name}` line:", "", "```text", text, "```"]
    return "\n".join(out)


def escaped(text: str) -> str:
    return text.replace("|", "\\|")


def with_table(page: str, table: str) -> str:
    before, after = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{after.split(END)[1]}"


if __name__ == "__main__":
    sys.exit(main())
