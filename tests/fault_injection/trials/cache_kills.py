"""Several reader processes share a small cache and compare every byte with the original data. If some readers are
killed, the other readers must still read the correct bytes.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
from functools import partial
from pathlib import Path

from chatmill.remote import cache, download, objects
from chatmill.remote.urls import Url
from fault_injection.processes import begin
from fault_injection.trial import Tally, Trial

READERS = 4
SIZES = (0, 1, 700, 5_000, 40_000, 90_000)
BOUND = 150_000


def contents(seed: int) -> dict[str, bytes]:
    rng = random.Random(seed)
    data = [rng.randbytes(size) for size in SIZES * 2]
    return {hashlib.sha256(each).hexdigest(): each for each in data}


def read_all(stored: dict[str, bytes], seed: float, rounds: int) -> str:
    rng = random.Random(seed)
    # Download slowly and in small pieces, so that most kills hit a download.
    download.RANGE_BYTES = 4_000
    read = download.read

    def slow(url: Url, *range_of_bytes: int) -> bytes:
        time.sleep(0.0005)
        return read(url, *range_of_bytes)

    download.read = slow
    for sha256, data in stored.items():
        objects.write(Url(f"memory://trial/{sha256}"), data)
    for _ in range(rounds):
        for sha256 in rng.sample(sorted(stored), len(stored)):
            fd = cache.open_object(Url(f"memory://trial/{sha256}"), size=len(stored[sha256]), sha256=sha256)
            with os.fdopen(fd, "rb") as file:
                if file.read() != stored[sha256]:
                    return f"{sha256[:12]}… ({len(stored[sha256])} bytes) was read with wrong content"
    return ""


def work(size: int, seed: int, folder: Path, tally: Tally) -> None:
    rng = random.Random(seed)
    tally.expected = size
    os.environ |= {"CHATMILL_CACHE_DIR": str(folder / "cache"), "CHATMILL_CACHE_SIZE": str(BOUND)}
    stored = contents(seed)
    for number in range(size):
        victims, readers = (
            [begin(partial(read_all, stored, rng.random(), rounds)) for _ in range(READERS // 2)]
            for rounds in (1000, 2)
        )
        time.sleep(rng.uniform(0.0, 0.15))
        ended = [child.kill() for child in victims]
        tally.notes["readers killed"] += sum(each.killed for each in ended)
        ended = [*(each for each in ended if not each.killed), *(child.end() for child in readers)]
        ended.append(begin(partial(read_all, stored, rng.random(), 1)).end())
        if wrong := next((each.value for each in ended if each.value), ""):
            tally.is_wrong(f"kill {number}: {wrong}")
            continue
        broke = next((each.refused or each.broke for each in ended if each.value is None), "")
        kept = sum(path.stat().st_size for path in (folder / "cache" / "objects").iterdir())
        if not broke and kept > BOUND:
            broke = f"the cache contains {kept} bytes; its limit is {BOUND}"
        tally.judge(survived=not broke, lost=f"kill {number}: {broke}")


TRIAL = Trial(
    "kill at random moments, cache",
    "Kills processes that read objects through a shared cache. Every read must return the right bytes, and the "
    "cache must stay within its size limit",
    work,
    full=100,
    short=6,
    in_memory=True,
)
