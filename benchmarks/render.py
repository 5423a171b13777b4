"""Rendering conversations: chatmill beside bare tokenization and beside transformers, in one run.

    python benchmarks/render.py                    50 000 conversations, medians of 5 runs
    python benchmarks/render.py --conversations 5000 --runs 3 --json
    python benchmarks/render.py --format template  a chat template as it was published, its mask derived

First it is checked that transformers gives the same ids and the same mask on the rows it is timed on. A chat template
without generation tags has no mask in transformers: there it is given the tagged edition that TRL ships beside it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import trl
from corpus import chat_file, tokenizer_file
from fastokens import Tokenizer as Fastokens
from measure import interleaved, machine, report
from transformers import PreTrainedTokenizerFast

from chatmill.format import ChatFormat, load_format, render_chunks
from chatmill.format.plates import Plates
from chatmill.format.sheet import lay_out
from chatmill.format.template import TemplateFormat
from chatmill.format.template.folder import read_folder
from chatmill.ledger import Ledger
from chatmill.records import Record, read
from chatmill.rows import Rows, concat
from chatmill.tokenizer import Tokenizer, open_tokenizer

CHATML = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' -%}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{%- else -%}{{ message.content + '<|im_end|>\\n' }}{%- endif -%}"
    "{%- endfor -%}"
)
CHUNK = 4096
"""Texts a call for the bare encoding: the fastest of 1024, 4096, 16384 and all at once."""


def peer_rows(peer: PreTrainedTokenizerFast, records: list[Record]) -> list[tuple[list[int], list[int]]]:
    """Ids and assistant mask of each conversation, one call a row as its users do."""
    out = []
    for record in records:
        messages = [{"role": message.role, "content": message.content} for message in record.messages]
        row = peer.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        out.append((row["input_ids"], row["assistant_masks"]))
    return out


def differences(rows: Rows, peers: list[tuple[list[int], list[int]]]) -> list[int]:
    """The rows whose ids or mask are not the peer's."""
    ids, mask, start = rows.ids, rows.mask(), rows.row_start
    return [
        number
        for number, (peer_ids, peer_mask) in enumerate(peers)
        if ids[start[number] : start[number + 1]].tolist() != peer_ids
        or mask[start[number] : start[number + 1]].astype(int).tolist() != peer_mask
    ]


def encode_alone(fast: Fastokens, texts: list[str]) -> None:
    for at in range(0, len(texts), CHUNK):
        fast.encode_batch_flat(texts[at : at + CHUNK], split_special_tokens=True)


def render_all(records: list[Record], format: ChatFormat, tokenizer: Tokenizer) -> int:
    return sum(len(rows.ids) for rows in render_chunks(records, format, tokenizer))


def template_main(args: argparse.Namespace) -> None:
    """A published template, derived and replayed, beside its tagged edition in transformers."""
    path = args.tokenizer or tokenizer_file()
    folder = Path(trl.__file__).parent / "chat_templates"
    tokenizer = open_tokenizer(path)
    source = read_folder(str(path), str(folder / f"{args.template}.jinja"))
    peer = PreTrainedTokenizerFast(tokenizer_file=str(path))
    peer.chat_template = (folder / f"{args.template}_training.jinja").read_text("utf-8")
    records = list(read([chat_file(args.conversations)]))
    few = records[: args.peer_rows]

    def render_template(chosen: list[Record]) -> Rows:
        # A new one each time: what it derives is part of the work.
        format = TemplateFormat(source, tokenizer)
        return concat(list(format.chunks(format.accepted(chosen), ledger=Ledger())))

    few_rows, peers = render_template(few), peer_rows(peer, few)
    start = few_rows.row_start
    differ = [n for n, (ids, _) in enumerate(peers) if few_rows.ids[start[n] : start[n + 1]].tolist() != ids]
    tokens = len(render_template(records).ids)
    seconds = interleaved(args.runs, render=lambda: render_template(records), peer=lambda: peer_rows(peer, few))
    speed, peer_speed = tokens / seconds["render"], len(few_rows.ids) / seconds["peer"]
    report(
        f"render --format template, {args.template}: {len(records):,} conversations, {tokens / 1e6:.1f} M tokens; "
        + machine("chatmill", "jinja2", "fastokens", "tokenizers", "transformers", "trl"),
        [
            (f"rows whose ids differ from transformers, of {len(few):,}", f"{len(differ)}"),
            ("chatmill, mask derived and proven", f"{seconds['render']:.2f} s, {speed / 1e6:.1f} Mtok/s"),
            ("transformers apply_chat_template, tagged edition", f"{peer_speed / 1e6:.3f} Mtok/s"),
            ("times transformers (target 10)", f"{speed / peer_speed:.1f}"),
        ],
        {
            "tokens": tokens,
            "rows_that_differ": len(differ),
            "render_s": seconds["render"],
            "peer_tokens_per_s": peer_speed,
            "times_transformers": speed / peer_speed,
        },
        as_json=args.json,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=50_000)
    parser.add_argument("--peer-rows", type=int, default=2_000, help="how many of them transformers renders")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json with the ChatML tokens; made here if left out")
    parser.add_argument("--format", choices=("chatml", "template"), default="chatml")
    parser.add_argument(
        "--template", default="qwen2_5", help="of TRL, for --format template: one that is there in two editions"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.format == "template":
        template_main(args)
        return

    path = args.tokenizer or tokenizer_file()
    format = load_format("chatml")
    ours = open_tokenizer(path, control=format.tokens)
    fast = Fastokens.from_file(str(path))
    peer = PreTrainedTokenizerFast(tokenizer_file=str(path))
    peer.chat_template = CHATML
    records = list(read([chat_file(args.conversations)]))
    few = records[: args.peer_rows]
    texts = lay_out(records, format, Plates(format, ours)).texts

    few_rows = concat(list(render_chunks(few, format, ours)))
    differ = differences(few_rows, peer_rows(peer, few))
    tokens = render_all(records, format, ours)
    encode_alone(fast, texts)
    seconds = interleaved(
        args.runs,
        encode=lambda: encode_alone(fast, texts),
        render=lambda: render_all(records, format, ours),
    )
    peer_seconds = interleaved(3, peer=lambda: peer_rows(peer, few))["peer"]
    speed = tokens / seconds["render"]
    peer_speed = len(few_rows.ids) / peer_seconds
    share, ratio = seconds["encode"] / seconds["render"], speed / peer_speed
    report(
        f"render: {len(records):,} conversations, {len(texts):,} messages, {tokens / 1e6:.1f} M tokens; "
        + machine("chatmill", "fastokens", "tokenizers", "transformers"),
        [
            (f"rows that differ from transformers, of {len(few):,}", f"{len(differ)}"),
            ("fastokens, the same texts alone", f"{seconds['encode']:.2f} s"),
            ("chatmill render", f"{seconds['render']:.2f} s, {speed / 1e6:.1f} Mtok/s"),
            ("share of bare encoding speed (target 0.6)", f"{share:.2f}"),
            ("transformers apply_chat_template, row by row", f"{peer_speed / 1e6:.3f} Mtok/s"),
            ("times transformers (target 30)", f"{ratio:.1f}"),
        ],
        {
            "tokens": tokens,
            "rows_that_differ": len(differ),
            "encode_s": seconds["encode"],
            "render_s": seconds["render"],
            "share_of_encoding": share,
            "peer_tokens_per_s": peer_speed,
            "times_transformers": ratio,
        },
        as_json=args.json,
    )


if __name__ == "__main__":
    main()
