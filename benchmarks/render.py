"""Compare the speed of chatmill's rendering with that of tokenization alone and of transformers.

    python benchmarks/render.py                    render 50,000 conversations; report medians of 5 runs
    python benchmarks/render.py --conversations 5000 --runs 3 --json
    python benchmarks/render.py --format template  use a published chat template, with a derived mask

The benchmark first checks that transformers and chatmill give the same ids and mask for the timed rows. transformers
needs generation tags for a mask, so transformers uses TRL's version of the template, which has generation tags.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from corpus import Data, add_options, chosen, options_of
from fastokens import Tokenizer as Fastokens
from measure import alone, interleaved, machine, report, versions

from chatmill.format import TemplateRenderer, TurnRenderer, load_format
from chatmill.format.messages import message_columns
from chatmill.format.template.hf_folder import read_folder
from chatmill.records import Record, read_records
from chatmill.rows import Rows, concat
from chatmill.tokenizer import open_tokenizer

CHATML = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' -%}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{%- else -%}{{ message.content + '<|im_end|>\\n' }}{%- endif -%}"
    "{%- endfor -%}"
)
CHUNK = 4096
"""Number of texts per call when only tokenizing. 4096 was faster than 1024, 16384 and all texts at once."""


Chunks = Iterator[Rows]
Both = tuple[list[int], list[int]]
"""Ids and mask of one row."""


class Chatml:
    def __init__(self, data: Data) -> None:
        format = load_format("chatml")
        self.renderer = TurnRenderer(format, open_tokenizer(data.tokenizer, control=format.tokens))

    def chunks(self, records: Iterable[Record]) -> Chunks:
        return self.renderer.render_chunks(records)

    def rows(self, records: list[Record], *, threads: int | None) -> Rows:
        return self.renderer.render(records, threads=threads)

    def texts(self, records: list[Record]) -> list[str]:
        return list(message_columns(records, self.renderer.format, self.renderer.compiled).texts)


class Template:
    def __init__(self, data: Data, name: str) -> None:
        self.tokenizer = open_tokenizer(data.tokenizer)
        self.source = read_folder(str(data.tokenizer), str(template_file(name)))

    def chunks(self, records: Iterable[Record]) -> Chunks:
        # Deriving the mask from the template is part of the work, so each run creates a new renderer.
        renderer = TemplateRenderer(self.source, self.tokenizer)
        return renderer.render_chunks(renderer.renderable(records))

    def rows(self, records: list[Record], *, threads: int | None) -> Rows:
        renderer = TemplateRenderer(self.source, self.tokenizer)
        return renderer.render(list(renderer.renderable(records)), threads=threads)

    def texts(self, records: list[Record]) -> list[str]:
        return [message.content for record in records for message in record.messages]


def template_file(name: str) -> Path:
    # Importing TRL would add to chatmill's memory.
    (package,) = find_spec("trl").submodule_search_locations  # type: ignore[union-attr]
    return Path(package) / "chat_templates" / f"{name}.jinja"


def peer_of(data: Data, args: argparse.Namespace) -> Any:
    """Return a transformers tokenizer with the benchmarked chat template, in a version that has generation tags."""
    # Importing transformers elsewhere would add to chatmill's memory.
    from transformers import PreTrainedTokenizerFast

    peer = PreTrainedTokenizerFast(tokenizer_file=str(data.tokenizer))
    tagged = CHATML if args.format == "chatml" else template_file(f"{args.template}_training").read_text("utf-8")
    peer.chat_template = tagged
    return peer


def peer_rows(peer: Any, records: list[Record]) -> list[Both]:
    """Return the ids and assistant mask of each conversation, with one call of `apply_chat_template` per row."""
    out = []
    for record in records:
        messages = [{"role": message.role, "content": message.content} for message in record.messages]
        row = peer.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        out.append((row["input_ids"], row["assistant_masks"]))
    return out


def differences(rows: Rows, peers: list[Both], peer: Any) -> dict[str, Any]:
    """Return the number of rows with different ids or masks, and the tokens that only one mask includes."""
    start, mask = rows.row_start, rows.mask()
    ids_differ = masks_differ = 0
    only: dict[str, Counter[str]] = {"chatmill": Counter(), "peer": Counter()}
    for number, (peer_ids, peer_mask) in enumerate(peers):
        here = slice(start[number], start[number + 1])
        if rows.ids[here].tolist() != peer_ids:
            ids_differ += 1
            continue
        ours, theirs = mask[here], np.array(peer_mask, dtype=bool)
        masks_differ += not np.array_equal(ours, theirs)
        for side, found in (("chatmill", ours & ~theirs), ("peer", theirs & ~ours)):
            only[side].update(peer.convert_ids_to_tokens(rows.ids[here][found].tolist()))
    shown = {side: dict(texts.most_common(5)) for side, texts in only.items()}
    return {"rows": len(peers), "ids_differ": ids_differ, "masks_differ": masks_differ, "trained_by_one": shown}


def encode_alone(fast: Fastokens, texts: list[str]) -> None:
    for at in range(0, len(texts), CHUNK):
        fast.encode_batch_flat(texts[at : at + CHUNK], split_special_tokens=True)


def way_of(data: Data, args: argparse.Namespace) -> Chatml | Template:
    return Chatml(data) if args.format == "chatml" else Template(data, args.template)


def side(data: Data, args: argparse.Namespace) -> None:
    """Render with only chatmill or only the peer, to measure memory. chatmill streams the file; the peer renders the
    timed rows.
    """
    if args.side == "chatmill":
        for _ in way_of(data, args).chunks(read_records([data.path])):
            pass
    else:
        peer_rows(peer_of(data, args), list(islice(read_records([data.path]), args.peer_rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument(
        "--peer-rows", type=int, default=2_000, help="number of conversations that transformers renders"
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--format", choices=("chatml", "template"), default="chatml")
    parser.add_argument(
        "--template",
        default="qwen2_5",
        help="TRL template for --format template; TRL must have it with and without generation tags",
    )
    parser.add_argument(
        "--side", choices=("chatmill", "peer"), help="run only chatmill or the peer, once, without output"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    data = chosen(args)
    if args.side:
        side(data, args)
        return
    way = way_of(data, args)
    same = [*options_of(data), "--format", args.format, "--template", args.template, "--peer-rows", args.peer_rows]
    memory = {name: alone(__file__, "--side", name, *same)[1] for name in ("chatmill", "peer")}

    fast, peer = Fastokens.from_file(str(data.tokenizer)), peer_of(data, args)
    records = list(read_records([data.path]))
    few, texts = records[: args.peer_rows], way.texts(records)
    few_rows, peers = concat(list(way.chunks(few))), peer_rows(peer, few)
    differ = differences(few_rows, peers, peer)
    tokens = sum(len(rows.ids) for rows in way.chunks(records))
    encode_alone(fast, texts)

    def render_all() -> None:
        for _ in way.chunks(records):
            pass

    seconds = interleaved(args.runs, encode=lambda: encode_alone(fast, texts), render=render_all)
    in_threads = interleaved(
        args.runs, one=lambda: way.rows(records, threads=1), all=lambda: way.rows(records, threads=None)
    )
    peer_seconds = interleaved(min(args.runs, 3), peer=lambda: peer_rows(peer, few))["peer"]
    speed, peer_speed = tokens / seconds["render"], len(few_rows.ids) / peer_seconds
    # fastokens encodes on all cores, so compare it with rendering on all cores.
    share, ratio = seconds["encode"] / in_threads["all"], speed / peer_speed
    cores, times_threads = len(os.sched_getaffinity(0)), in_threads["one"] / in_threads["all"]
    packages = ("chatmill", "fastokens", "tokenizers", "transformers", "trl")
    wanted, named = ("target 30", "chatml") if args.format == "chatml" else ("target 10", args.template)
    report(
        f"render {named}: {len(records):,} conversations, {len(texts):,} messages, {tokens / 1e6:.1f} million tokens; "
        + machine(*packages),
        [
            (
                f"differences from transformers in {len(few):,} rows",
                f"ids differ in {differ['ids_differ']}, masks in {differ['masks_differ']}",
            ),
            ("tokens that only one mask includes", str(differ["trained_by_one"])),
            ("tokenization alone: fastokens with the same texts on all cores", f"{seconds['encode']:.2f} s"),
            ("chatmill render, one thread", f"{seconds['render']:.2f} s, {speed / 1e6:.1f} Mtok/s"),
            (
                "speed on all cores relative to tokenization alone" + (" (target 0.75)" if named == "chatml" else ""),
                f"{share:.2f}",
            ),
            (
                f"one list of records, on 1 thread and on {cores} threads",
                f"{in_threads['one']:.2f} and {in_threads['all']:.2f} s, speedup {times_threads:.2f}",
            ),
            ("transformers apply_chat_template, row by row", f"{peer_speed / 1e6:.3f} Mtok/s"),
            (f"speedup over transformers ({wanted})", f"{ratio:.1f}"),
            ("peak memory of chatmill and of transformers", " and ".join(f"{x / 1e6:.0f} MB" for x in memory.values())),
        ],
        {
            "conversations": len(records),
            "messages": len(texts),
            "tokens": tokens,
            "template": named,
            "runs": args.runs,
            "differ": differ,
            "encode_s": seconds["encode"],
            "render_s": seconds["render"],
            "share_of_encoding": share,
            "list_s": {"1": in_threads["one"], str(cores): in_threads["all"]},
            "times_threads": times_threads,
            "peer_tokens_per_s": peer_speed,
            "times_transformers": ratio,
            "memory": memory,
            "versions": versions(*packages),
        },
        as_json=args.json,
    )


if __name__ == "__main__":
    main()
