"""Train a model on a dataset: `python train.py --help`, or `torchrun --nproc-per-node N train.py …` on many GPUs.

Requires numpy, torch and safetensors; chatmill itself need not be installed.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent / "src"))

from chatmill.cli.guard import guarded


def train() -> None:
    from chatmill.cli.report_page import report_page
    from chatmill.cli.tokenizer_hash import tokenizer_sha256
    from chatmill.train.command import main

    main(tokenizer_sha256=tokenizer_sha256, report_page=report_page)


if __name__ == "__main__":
    guarded(train)
