"""The figures of training on a GPU, kept in the repository: most runs of the benchmarks have none at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

GPU = Path(__file__).resolve().parent / "results" / "gpu.json"


def merged(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Several runs of benchmarks/train.py as one, each number as the least and the most of them."""

    def ends(values: list[Any]) -> Any:
        known = [value for value in values if value is not None]
        return [min(known), max(known)] if known else None

    works = [name for name, value in runs[0]["figures"].items() if not isinstance(value, str)]
    figures = {
        work: {
            key: value if isinstance(value, str) else ends([run["figures"][work][key] for run in runs])
            for key, value in runs[0]["figures"][work].items()
        }
        for work in works
    }
    return {"title": runs[0]["title"], "best_tflops": ends([run["best_tflops"] for run in runs]), "figures": figures}
