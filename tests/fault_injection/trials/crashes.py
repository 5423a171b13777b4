from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import store_fixtures
from store_fixtures import contents, some_rows

from chatmill.store.layout import METADATA
from chatmill.store.publish import recover, staging_for
from chatmill.store.verify import verify_dataset
from fault_injection.crash_disk import Model, Recorder, outcomes
from fault_injection.disks import Unsynced, in_place
from fault_injection.trial import Tally, Trial

WAYS = {
    "a new dataset": {"old": False, "can_exchange": True},
    "over an old dataset, by exchange": {"old": True, "can_exchange": True},
    "over an old dataset, by two renames": {"old": True, "can_exchange": False},
}


class Known(dict[tuple[tuple[str, bytes], ...], str]):
    """Maps the content of a dataset to its hash or its faults, so that equal datasets are checked only once."""

    def of(self, path: Path) -> str:
        key = tuple(contents(path).items())
        if key not in self:
            report = verify_dataset(path, full=True)
            self[key] = "; ".join(report.faults) or report.sha256 or "no hash"
        return self[key]


def crashes(at: Path, model: Model, recorder: Recorder) -> Iterator[tuple[int, str]]:
    for number in range(len(recorder.steps) + 1):
        if number:
            recorder.steps[number - 1](model)
        for kind, keep in outcomes(number).items():
            model.crash(at, keep)
            yield number, kind
            shutil.rmtree(at)


def work(size: int, seed: int, folder: Path, tally: Tally) -> None:
    for way, how in WAYS.items():
        play(size, seed, folder / way.replace(" ", "_"), tally, way, **how)


def play(size: int, seed: int, folder: Path, tally: Tally, way: str, *, old: bool, can_exchange: bool) -> None:
    folder.mkdir()
    known, allowed, shard_tokens = Known(), {""}, 60 if size < 40 else 100
    if old:
        store_fixtures.write_dataset(folder / "x", {"train": some_rows(seed, count=size)}, shard_tokens=shard_tokens)
        allowed = {known.of(folder / "x")}
    rows = {"train": some_rows(seed + 1, count=size), "val": some_rows(seed + 2, count=size // 3)}
    model, recorder = Model(folder), Recorder(folder, can_exchange=can_exchange)
    with in_place(recorder):
        store_fixtures.write_dataset(folder / "x", rows, shard_tokens=shard_tokens, overwrite=old)
    new = known.of(folder / "x")
    at = folder / "crashed"
    with in_place(Unsynced()):
        for number, kind in crashes(at, model, recorder):
            where = f"{way}, step {number} of {len(recorder.steps)}, unsynced changes kept: {kind}"
            staging = staging_for(at / "x")
            # The metadata is written last, so all other files must be complete once it exists.
            early = kind == "all" and (staging / METADATA).is_file() and (staging / METADATA).stat().st_size
            if early and not old and known.of(staging) != new:
                tally.is_wrong(f"{where}: the metadata exists before all files are complete: {known.of(staging)}")
                continue
            recover(at / "x")
            report = known.of(at / "x") if (at / "x").exists() else ""
            right = {new} if number == len(recorder.steps) else allowed | {new}
            tally.judge(survived=report in right, lost=f"{where}: {report or 'nothing'}")


TRIAL = Trial(
    "power loss, building and publishing",
    "Replays every step of a build on a simulated disk that loses unsynced data. The target must be absent, or the "
    "complete old or new dataset",
    work,
    full=60,
    short=10,
    in_memory=True,
)
