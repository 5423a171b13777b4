from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path

import pytest
from prepare_fixtures import conversations, lines

MEASURE = """
import resource, sys
from pathlib import Path
from chatmill.prepare import assemble, unit
from chatmill.prepare.engine import LocalEngine
from chatmill.prepare.job import InputSource, Job
from chatmill.prepare.pipeline import prepare_dataset
from chatmill.records import units

# As large builds have them, in small.
unit.FILE_TOKENS = assemble.CHUNK_TOKENS = units.WIDE_BLOCK = 2**17
inputs, options = sys.argv[1].split(), eval(sys.argv[2])
job = Job((InputSource(tuple(inputs), "messages"),), shard_tokens=2**20, **options)
prepare_dataset(job, Path("x"), engine=LocalEngine(2), unit_bytes=2**17)
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(status["VmHWM"].split()[0], resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def peaks(folder: Path, copies: int, options: dict) -> list[int]:
    folder.mkdir()
    data = lines(conversations(1000))
    for name in ("a.jsonl", "b.jsonl"):
        (folder / name).write_bytes(data * copies)
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(data * copies, 1))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, "a.jsonl b.jsonl c.jsonl.gz", repr(options)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return [int(line) for line in done.stdout.split()]


@pytest.mark.parametrize(
    "options",
    [
        {"pack": 2048, "val_split": 0.1},
        {"format": "post-training", "fit": "blocks", "max_tokens": 512, "dedupe": True},
    ],
)
def test_twelve_times_the_input_takes_no_more_memory(tmp_path, options):
    small, large = peaks(tmp_path / "small", 2, options), peaks(tmp_path / "large", 24, options)
    assert all(more - few < 10_000 for few, more in zip(small, large, strict=True)), (small, large)
