from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prepare_fixtures import build, conversations, digests, job_of, lines

from chatmill.errors import DataError
from chatmill.store.reweigh import reweigh_dataset
from chatmill.store.verify import verify_dataset
from fault_injection.disks import small_room
from fault_injection.processes import apart, load_torch
from fault_injection.trial import Tally, Trial


@contextmanager
def locked(room: Path, fill: Callable[[], None]) -> Iterator[bool]:
    with small_room(room, 64 << 20) as mounted:
        fill()
        if mounted is not None:
            mounted.lock()
            yield True
        elif os.geteuid() != 0:
            folders = [room, *(path for path in room.rglob("*") if path.is_dir())]
            for path in folders:
                path.chmod(0o555)
            yield True
            for path in folders:
                path.chmod(0o755)
        else:
            yield False


def work(size: int, seed: int, folder: Path, tally: Tally) -> None:
    from audit_fixtures import SMALL
    from train_fixtures import prepare, trained

    from chatmill.audit import Audit
    from chatmill.load.loader import EpisodeLoader

    load_torch()
    source, room = folder / "a.jsonl", folder / "room"
    source.write_bytes(lines(conversations(30, seed=seed)))
    job = job_of((str(source),))
    build(job, folder / "whole")
    sums = prepare(folder, "sums", seed=seed)

    def read() -> int:
        assert verify_dataset(room / "old", full=True).faults == ()
        loader = EpisodeLoader(room / "old", SMALL, tensors=False)
        return len(loader.get_batch().x)

    def audited() -> None:
        EpisodeLoader(folder / "whole", SMALL, listener=Audit(room / "logs"), tensors=False).get_batch()

    def reweighed() -> str:
        try:
            return str(reweigh_dataset(room / "old", room / "other", train_on="all"))
        except OSError as error:
            # Convert the error in the same way as the command line.
            raise DataError(f"{error.filename}: {error.strerror}") from None

    refused: dict[str, Callable[[], Any]] = {
        "a new dataset": lambda: build(job, room / "new").sha256,
        "a new dataset with two workers": lambda: build(job, room / "new", workers=2, unit_bytes=900).sha256,
        "over the old dataset": lambda: build(job, room / "old", overwrite=True).sha256,
        "a resumed build": lambda: build(job, room / "new", resume=True).sha256,
        "in a missing folder": lambda: build(job, room / "deep" / "new").sha256,
        "reweighed": reweighed,
        "a training run": lambda: str(trained(sums, room).checkpoint),
        "a resumed run": lambda: str(trained(sums, room, name="begun", resume="auto", max_iters=8).checkpoint),
        "an audit log": audited,
    }

    def fill() -> None:
        shutil.copytree(folder / "whole", room / "old")
        assert apart(lambda: str(trained(sums, room, name="begun", max_iters=4))).value

    with locked(room, fill) as is_locked:
        if not is_locked:
            tally.skipped = "root can write to every folder, and no file system can be mounted here"
            return
        before = digests(room)
        for number in range(size):
            for name, do in refused.items():
                ended = apart(do)
                if digests(room) != before:
                    tally.is_wrong(f"{name}: files were written")
                elif ended.value is not None:
                    tally.is_wrong(f"{name}: the command reported success")
                else:
                    tally.judge(found=bool(ended.refused), lost=f"{name}: {ended.broke or 'killed'}")
            ended = apart(read)
            tally.judge(survived=ended.value is not None, lost=f"read {number}: {ended.refused or ended.broke}")


TRIAL = Trial(
    "read-only targets",
    "Runs prepare, reweigh and training on a read-only file system. Each command must print a one-line error and "
    "change nothing",
    work,
    full=5,
    short=1,
)
