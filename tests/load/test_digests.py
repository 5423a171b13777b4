from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatmill.load.batch import Batch
from chatmill.load.digests import blake2b_rows, sha256_rows


def random_batch(seed, rows, size, most=3):
    rng = np.random.default_rng(seed)
    loss_mask = rng.random((rows, size)) < 0.5
    x, y = rng.integers(0, 2**32, (2, rows, size))
    episodes = rng.integers(0, 1000, (rows, most))
    episodes[np.arange(most) >= rng.integers(0, most + 1, (rows, 1))] = -1
    weights = np.where(loss_mask, rng.random((rows, size)), 0).astype(np.float32)
    zeros = np.zeros((rows, size), dtype=np.int32)
    return Batch(x, np.where(loss_mask, y, -100), loss_mask, weights, zeros, zeros, episodes)


def words_of(batch, row):
    ids = [value % 2**32 for array in (batch.x, batch.y) for value in array[row].tolist()]
    return ids + [struct.unpack("<I", struct.pack("<f", value))[0] for value in batch.weights[row].tolist()]


def sha256(batch, row, step, place):
    x, y = batch.x[row].tolist(), batch.y[row].tolist()
    bits = [struct.unpack("<I", struct.pack("<f", value))[0] for value in batch.weights[row].tolist()]
    one = struct.unpack("<I", struct.pack("<f", 1.0))[0]
    episodes = [number for number in batch.episode_ids[row].tolist() if number >= 0]
    labels, weights = [], []
    for at, label in enumerate(y):
        if label != -100 and (at + 1 == len(x) or label != x[at + 1]):
            labels += [at, label]
        if bits[at] != (one if label != -100 else 0):
            weights += [at, bits[at]]
    numbers = [len(x), len(episodes), len(labels), len(weights), step, place, *episodes, *labels, *weights]
    marks = "".join("01"[label != -100] for label in y).ljust(-(-len(x) // 8) * 8, "0")
    packed = bytes(int(marks[at : at + 8], 2) for at in range(0, len(marks), 8))
    content = struct.pack(f"<{len(numbers)}q", *numbers) + packed + struct.pack(f"<{len(x)}I", *x)
    return list(struct.unpack("<2Q", hashlib.sha256(content).digest()[:16]))


def blake2b(batch, row, step, place):
    episodes = [number for number in batch.episode_ids[row].tolist() if number >= 0]
    words = struct.pack(f"<{3 * batch.x.shape[1]}I", *words_of(batch, row))
    content = words + struct.pack(f"<{len(episodes) + 3}q", *episodes, -1, step, place)
    return list(struct.unpack("<2Q", hashlib.blake2b(content, digest_size=16).digest()))


@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 2), st.integers(1, 19), st.booleans())
def test_digests_are_as_documented(seed, steps, rows, size, usual):
    batch = random_batch(seed, steps * rows, size)
    if usual:
        # As in ordinary fine-tuning, the labels are the next tokens, and the weight of every label is 1.
        following = np.append(batch.x[:, 1:], batch.x[:, :1], axis=1)
        weights = batch.loss_mask.astype(np.float32)
        batch = batch._replace(y=np.where(batch.loss_mask, following, -100), weights=weights)
    numbers = [7 + 2 * step for step in range(steps)]
    places = [(numbers[row // rows], 5 + row % rows) for row in range(steps * rows)]
    assert sha256_rows(batch, numbers, 5).tolist() == [sha256(batch, row, *place) for row, place in enumerate(places)]
    assert blake2b_rows(batch, numbers, 5).tolist() == [blake2b(batch, row, *place) for row, place in enumerate(places)]


@pytest.mark.parametrize("row_digests", [sha256_rows, blake2b_rows])
def test_a_digest_depends_on_every_position_the_step_the_row_and_the_episodes(row_digests):
    batch = random_batch(1, 2, 37)
    batch.episode_ids[:] = [[4, 5, -1], [6, -1, -1]]
    right = row_digests(batch, [3], 0)
    for name in ("x", "y", "weights"):
        for column in range(37):
            changed = batch._replace(**{name: getattr(batch, name).copy()})
            getattr(changed, name)[1, column] += 1
            other = row_digests(changed, [3], 0)
            assert other[0].tolist() == right[0].tolist() and other[1].tolist() != right[1].tolist(), (name, column)
    for column in range(3):
        changed = batch._replace(episode_ids=batch.episode_ids.copy())
        changed.episode_ids[1, column] = 9
        assert row_digests(changed, [3], 0)[1].tolist() != right[1].tolist()
    assert (row_digests(batch, [4], 0) != right).all() and (row_digests(batch, [3], 1) != right).all()


@pytest.mark.parametrize("row_digests", [sha256_rows, blake2b_rows])
def test_the_sum_of_digests_detects_swapped_rows_and_tokens(row_digests):
    def total(batch):
        return row_digests(batch, [3], 0).sum(axis=0, dtype=np.uint64).tolist()

    rng, batch = np.random.default_rng(3), random_batch(2, 4, 12)
    batch = batch._replace(y=rng.permutation(48).reshape(4, 12), weights=rng.random((4, 12), dtype=np.float32))
    right = total(batch)
    assert total(batch.each(lambda array: array[[1, 0, 2, 3]])) != right
    for name in ("x", "y", "weights"):
        swapped = getattr(batch, name).copy()
        swapped[[0, 1], 5] = swapped[[1, 0], 5]
        assert total(batch._replace(**{name: swapped})) != right
        swapped = getattr(batch, name).copy()
        swapped[0, [4, 5]] = swapped[0, [5, 4]]
        assert total(batch._replace(**{name: swapped})) != right
