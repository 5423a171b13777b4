"""Compare two models on held-out questions, and check that the demo's targets are met.

    python scripts/demo_table.py with_mask.json without_mask.json

The two files are outputs of `chatmill eval --json`. The script exits with code 1 if a target is missed. There must be
at least 200 questions. The first model must answer at least 70 percent of the questions exactly, write an end token in
at least 99 percent of its answers, and have at least 30 percentage points more exact answers than the second model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

LEAST_QUESTIONS, LEAST_EXACT, LEAST_STOPPED, LEAST_DIFFERENCE = 200, 0.70, 0.99, 0.30


def table(scores: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'':<14}{'questions':>10}{'exact':>9}{'stopped':>9}{'answer loss':>17}"]
    for name, score in scores.items():
        lines.append(
            f"{name:<14}{score['questions']:>10,}{score['exact_rate']:>9.1%}{score['stop_rate']:>9.1%}"
            f"{score['loss']:>17.4f}"
        )
    return "\n".join(lines)


def shortfalls(score: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return one line for each target that is missed; `score` is the score of the model trained with the mask."""
    least = {"questions": LEAST_QUESTIONS, "exact_rate": LEAST_EXACT, "stop_rate": LEAST_STOPPED}
    found = {name: score[name] for name in least} | {"difference": score["exact_rate"] - other["exact_rate"]}
    least["difference"] = LEAST_DIFFERENCE
    return [
        f"{name} is {found[name]:.3g}; expected at least {bound:g}"
        for name, bound in least.items()
        if found[name] < bound
    ]


def main() -> int:
    with_mask, without_mask = (json.loads(Path(name).read_text()) for name in sys.argv[1:3])
    print(table({"with the mask": with_mask, "without": without_mask}))
    lines = shortfalls(with_mask, without_mask)
    print(*lines, sep="\n", end="\n" if lines else "", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
