"""Train a model on a dataset: `python train.py --help`, or `torchrun --nproc-per-node N train.py …` on many GPUs.

Needs numpy, torch and safetensors; chatmill itself need not be installed.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent / "src"))

from chatmill.cli.guard import guarded


def train() -> None:
    from chatmill.train.command import main

    main()


if __name__ == "__main__":
    guarded(train)
