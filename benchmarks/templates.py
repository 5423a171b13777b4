"""Count the chat templates in TRL that pass `certify`: `python benchmarks/templates.py [--first N] [--json]`.

docs/explanation/templates.md lists the same results. This benchmark does not measure time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from measure import machine, report, versions
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from template_table import ORIGINALS, line, make_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=len(ORIGINALS), help="number of templates to check")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer(Path(folder))
        file = str(tokenizer / "tokenizer.json")
        peer = PreTrainedTokenizerFast(tokenizer_file=file, bos_token="<s>", eos_token="</s>")
        found = [line(name, tokenizer, peer) for name in ORIGINALS[: args.first]]
    refused = [one.name for one in found if not one.certified]
    both = sum(bool(one.origin and one.starts and one.stops) for one in found)
    report(
        f"chat templates; {machine('chatmill', 'trl', 'transformers')}",
        [
            (
                f"number of certified templates out of {len(found)} (target 37 of 41)",
                f"{len(found) - len(refused)}; not certified: {', '.join(refused)}",
            ),
            ("number of templates for which both methods find the answers (target: half)", f"{both}"),
        ],
        {
            "templates": len(found),
            "certified": len(found) - len(refused),
            "refused": refused,
            "both_derivations": both,
            "versions": versions("chatmill", "trl", "transformers"),
        },
        as_json=args.json,
    )


if __name__ == "__main__":
    main()
