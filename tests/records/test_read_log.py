from __future__ import annotations

import hashlib
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatmill.records import part_hashes as module
from chatmill.records.part_hashes import part_hashes
from chatmill.records.read_log import BLOCK, ReadLog


def expected_digest(data: bytes) -> str:
    complete = len(data) - len(data) % BLOCK
    blocks = (data[at : at + BLOCK] for at in range(0, complete, BLOCK))
    hashes = b"".join(hashlib.sha256(block).digest()[:16] for block in blocks)
    return hashlib.sha256(hashes + data[complete:]).hexdigest()


def content(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 40 * BLOCK, 40 * BLOCK + 7])
@given(cuts=st.lists(st.integers(0, 41 * BLOCK), max_size=8))
def test_the_digest_does_not_depend_on_the_sizes_of_the_reads(size, cuts):
    data, log = content(size), ReadLog()
    for start, stop in pairwise(sorted({0, size, *(cut for cut in cuts if cut < size)})):
        log.add(start, memoryview(data)[start:stop])
    read = log.bytes_read()
    assert (read.ranges, read.digest) == (((0, size),) if size else (), expected_digest(data))
    assert log.bytes_read() == read


@pytest.mark.parametrize("at", [0, BLOCK - 1, BLOCK, 20 * BLOCK, 40 * BLOCK, 40 * BLOCK + 6])
def test_every_changed_byte_changes_the_digest(at):
    data = content(40 * BLOCK + 7)
    changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    digests = []
    for each in (data, changed):
        log = ReadLog()
        log.add(0, memoryview(each))
        digests.append(log.bytes_read().digest)
    assert digests[0] != digests[1]


@given(st.lists(st.integers(0, 300), max_size=40))
def test_part_hashes_are_the_same_without_the_compiled_module(sizes):
    stop = np.cumsum(sizes, dtype=np.int64)
    data = content(sum(sizes))
    expected = b"".join(hashlib.sha256(data[start:end]).digest()[:16] for start, end in pairwise([0, *stop.tolist()]))
    assert part_hashes(data, stop) == part_hashes(bytearray(data), stop) == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_columns", None)
        assert part_hashes(data, stop) == part_hashes(memoryview(data), stop) == expected
