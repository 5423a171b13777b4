"""Two models side by side on held-out questions, and whether the first is as good as the demo promises.

    python scripts/demo_table.py with_mask.json without_mask.json

The files are what `chatmill eval --json` gave. Exit 1 if the first model answers fewer than 90 percent exactly or stops
by itself in fewer than 99 percent.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

LEAST_QUESTIONS, LEAST_EXACT, LEAST_STOPPED = 200, 0.90, 0.99


def table(scores: dict[str, dict[str, Any]]) -> str:
    """One row for each model."""
    lines = [f"{'':<14}{'questions':>10}{'exact':>9}{'stopped':>9}{'loss of answers':>17}"]
    for name, score in scores.items():
        lines.append(
            f"{name:<14}{score['questions']:>10,}{score['exact_rate']:>9.1%}{score['stop_rate']:>9.1%}"
            f"{score['loss']:>17.4f}"
        )
    return "\n".join(lines)


def shortfalls(score: dict[str, Any]) -> list[str]:
    """What the demo promises and this model does not keep."""
    least = {"questions": LEAST_QUESTIONS, "exact_rate": LEAST_EXACT, "stop_rate": LEAST_STOPPED}
    return [
        f"{name} is {score[name]:g}; the demo promises {bound:g}"
        for name, bound in least.items()
        if score[name] < bound
    ]


def main() -> int:
    with_mask, without_mask = (json.loads(Path(name).read_text()) for name in sys.argv[1:3])
    print(table({"with the mask": with_mask, "without": without_mask}))
    found = shortfalls(with_mask)
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
