"""The last loss that a run logged for each episode, from the files that --log_rows writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import ChatmillError, DataError
from chatmill.load.config import LoadConfig
from chatmill.load.plan import datasets_hash
from chatmill.load.source import DataSource, open_sources
from chatmill.plain_file import open_plain
from chatmill.show.dataset import DatasetView
from chatmill.show.order_view import in_whole

COLUMNS = ("episodes", "losses", "weights")
EXPECTED = "a line with the losses of a step, as written by training with --log_rows"


def run_losses(folder: Path, view: DatasetView) -> NDArray[np.float32]:
    """Return the last loss of each training episode, or NaN if the run did not train on it.

    The loss of a packed episode is the mean loss of its conversations, weighted by the sum of the token weights of each
    conversation. Steps that trained on other datasets are ignored.
    """
    paths = sorted((folder / "rows").glob("rank_*.jsonl"))
    if not paths:
        raise DataError(f"{folder}: has no per-conversation losses; train with --log_rows")
    count = len(view.dataset["train"]) if "train" in view.dataset else 0
    last_step = np.full(count, -1, dtype=np.int64)
    total, weight = np.zeros((2, count))
    sources: dict[str, tuple[DataSource, ...] | None] = {}
    for path in paths:
        for step, data, (episodes, losses, weights) in _lines(path):
            key = json.dumps(data, sort_keys=True)
            if key not in sources:
                sources[key] = _sources(view, data)
            if (trained_on := sources[key]) is None:
                continue
            numbers = in_whole(trained_on, "train", episodes.astype(np.int64))
            if len(numbers) and not 0 <= numbers.min() <= numbers.max() < count:
                raise DataError(f"{path}: step {step} has episodes that are not in the dataset; remove its line")
            newer = numbers[last_step[numbers] < step]
            last_step[newer], total[newer], weight[newer] = step, 0, 0
            current = last_step[numbers] == step
            np.add.at(total, numbers[current], (losses * weights)[current])
            np.add.at(weight, numbers[current], weights[current])
    if all(each is None for each in sources.values()):
        raise DataError(f"{folder}: the run did not train on {view.path}; view the dataset that it trained on")
    with np.errstate(invalid="ignore"):
        return np.where(weight > 0, total / weight, np.nan).astype(np.float32)


def _sources(view: DatasetView, data: dict[str, Any]) -> tuple[DataSource, ...] | None:
    """Return the sources of a run, or None if they do not belong to this dataset."""
    mix = data.get("mix_sft")
    config = LoadConfig(pad_token_id=0, mix_sft=mix, use_loss_mask=False, token_dtype=view.dataset.token_dtype)
    try:
        sources, _ = open_sources(view.path, config, stored_mix=False)
    except ChatmillError:
        return None
    is_same = datasets_hash(sources) == data.get("dataset_sha256")
    return sources if is_same and view.sources in (None, tuple(source.name for source in sources)) else None


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any], tuple[NDArray[Any], ...]]]:
    """Yield the step, the dataset description, and the arrays of episodes, losses and weights of each complete line."""
    try:
        with open_plain(path) as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n"):
                    continue
                try:
                    line = json.loads(raw)
                    columns = [np.array(line[name], dtype=np.float64) for name in COLUMNS]
                    if len({column.shape for column in columns}) != 1 or columns[0].ndim != 1:
                        raise ValueError
                    step, data = line["step"], dict(line["data"])
                    if type(step) is not int:
                        raise ValueError
                except (KeyError, TypeError, ValueError, RecursionError, OverflowError):
                    raise DataError(f"{path}:{number}: is damaged; expected {EXPECTED}; remove the line") from None
                yield step, data, tuple(columns)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
