"""Store GPU training results in the repository, because most benchmarks run on machines without a GPU.

python benchmarks/gpu.py FILE ...    store results of benchmarks/train.py, and update docs/explanation/benchmarks.md
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from page import with_training
from train_report import Found, read_results

HERE = Path(__file__).resolve().parent
GPU, PAGE = HERE / "results" / "gpu.json", HERE.parent / "docs" / "explanation" / "benchmarks.md"


def kept() -> dict[str, Found]:
    return dict(json.loads(GPU.read_text("utf-8")))


def keep(files: list[Path]) -> dict[str, Found]:
    """Add the results in these files to the stored results; return all results. Newer results replace older ones."""
    found = kept() | read_results(files)
    GPU.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return found


def main() -> int:
    files = [Path(name) for name in sys.argv[1:]]
    if not files or any(not file.is_file() for file in files):
        print(__doc__, file=sys.stderr)
        return 2
    PAGE.write_text(with_training(PAGE.read_text("utf-8"), keep(files)), "utf-8")
    print(f"written: {os.path.relpath(GPU)}, {os.path.relpath(PAGE)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
