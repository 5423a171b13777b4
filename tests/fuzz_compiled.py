"""Test the compiled modules with random and hostile input, and compare the results with plain Python code. The script
needs only the Python standard library.

    python tests/fuzz_compiled.py FOLDER [ROUNDS] [SEED]

FOLDER contains the compiled modules. `make sanitize` runs this script with modules that abort on every invalid memory
access and on undefined behavior.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import struct
import sys
import threading
from array import array
from collections.abc import Callable, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

EXTREME = [0, 1, -1, 7, 2**31, -(2**31), 2**32, 2**61, 2**62, -(2**62), 2**63 - 1, -(2**63), -(2**63) + 1]
ROLES = ["system", "user", "assistant", "tool"]
PIECES = ["a", "Zz", " ", "  ", "\n", "\r\n", "\t", "'s", "'LL", "'", "12", "3", "!?", "ä", "ſ", "名", "🍀",
          "\u0301", "\x00", "\x7f", "\x01\x02", "<a>", "zz", "/", "/\n", "AbC", "x" * 15,
          "y" * 16, "q" * 70, "word " * 20, "\U0010ffff", "\u2028"]  # fmt: skip


def load(folder: Path, name: str) -> ModuleType:
    [path] = folder.glob(f"{name}.*so")
    spec = spec_from_file_location(f"chatmill._native.{name}", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def refused(call: Callable[..., Any], *args: Any, **named: Any) -> Any:
    try:
        return call(*args, **named)
    except (ValueError, TypeError, IndexError, BufferError, OverflowError, RuntimeError, UnicodeError) as error:
        return error


def unaligned(data: bytes | bytearray) -> memoryview:
    return memoryview(bytearray(b"\0" + data))[1:]


def numbers(values: Sequence[int]) -> bytes:
    return array("q", values).tobytes()


def any_buffer(rng: random.Random, data: bytes) -> Any:
    return rng.choice([
        lambda: data, lambda: bytearray(data), lambda: unaligned(data), lambda: memoryview(data),
        lambda: memoryview(data)[::2], lambda: data[:-1], lambda: data + b"\1", lambda: b"", lambda: None,
        lambda: "text", lambda: array("q", [1, 2, 3]),
    ])()  # fmt: skip


# _copy


def try_copy(copy: ModuleType, rng: random.Random) -> None:
    width = rng.choice([1, 2, 4, 8, 12, 16, 40])
    size, room, count = rng.randrange(200), rng.randrange(200), rng.randrange(12)
    source, target = rng.randbytes(size * width), bytearray(rng.randbytes(room * width))
    start = [rng.randrange(size + 1) for _ in range(count)]
    stop = [rng.randrange(first, size + 1) for first in start]
    to = [rng.randrange(max(1, room - (b - a) + 1)) for a, b in zip(start, stop, strict=True)]
    expected: bytearray | None = bytearray(target)
    for at, first, last in zip(to, start, stop, strict=True):
        if at + last - first > room and last > first:
            expected = None
            break
        assert expected is not None
        expected[at * width : (at + last - first) * width] = source[first * width : last * width]
    columns = [rng.choice([bytes, unaligned])(numbers(each)) for each in (to, start, stop)]
    result = refused(copy.ranges, target, columns[0], unaligned(source), columns[1], columns[2], width)
    assert (result is None) == (expected is not None), result
    assert expected is None or target == expected


def try_pieces(copy: ModuleType, rng: random.Random) -> None:
    first, second = (array("I", [rng.randrange(2**32) for _ in range(rng.randrange(60))]) for _ in range(2))
    both, pieces = [*first, *second], []
    for _ in range(rng.randrange(9)):
        low, high = rng.choice([(0, len(first)), (len(first), len(both))])
        start = rng.randrange(low, high + 1)
        pieces.append((start, rng.randrange(high - start + 1)))
    expected = [id for start, length in pieces for id in both[start : start + length]]
    target = array("I", [0] * (len(expected) + rng.choice([0, 0, 1])))
    start, length = (numbers([piece[n] for piece in pieces]) for n in range(2))
    result = refused(copy.pieces, target, first.tobytes(), unaligned(second.tobytes()), unaligned(start), length)
    if result is None:
        assert target.tolist() == expected
    else:
        # These pieces are valid, so the only reason to reject them is a target of the wrong length.
        assert len(target) != len(expected), result


def try_bad_copy(copy: ModuleType, rng: random.Random) -> None:
    target = bytearray(64)
    columns = [any_buffer(rng, numbers([rng.choice(EXTREME) for _ in range(3)])) for _ in range(3)]
    source = any_buffer(rng, bytes(64))
    refused(copy.ranges, any_buffer(rng, target), columns[0], source, columns[1], columns[2], rng.choice(EXTREME))
    refused(copy.ranges, target, columns[0], target, columns[1], columns[2], rng.choice([1, 4, 8]))
    refused(copy.pieces, target, source, any_buffer(rng, bytes(64)), columns[0], columns[1])
    refused(copy.ranges, target, numbers([1, 0]), target, numbers([0, 3]), numbers([63, 60]), 1)


# _batch


def try_batch(batch: ModuleType, rng: random.Random) -> None:
    size, width = rng.randrange(1, 40), rng.choice([2, 4])
    ids = [rng.randrange(256**width) for _ in range(60)]
    tokens = unaligned(b"".join(id.to_bytes(width, "little") for id in ids))
    spans, episodes, words, filled = b"", [], [], 0
    for number in range(rng.randrange(6)):
        start = rng.randrange(60)
        stop = rng.randrange(start, min(60, start + size + 1 - filled) + 1)
        spans += struct.pack("<IIfBBB", stop - start, 0, rng.choice([0, 1, 0.5]), 0, rng.choice([1, 7]), 0)
        episodes.append([90 + number, 0, start, stop, 0, 0, number, number + 1, number, number + 1])
        words += ids[start:stop]
        filled += stop - start
    room = [size, size, size, size, size, size, 6, 7]
    outputs = [array(kind, [0] * count) for kind, count in zip("qqBfiiqq", room, strict=True)]
    rows, borders = array("q", [0, len(episodes)]), array("q", range(len(episodes)))
    wrong = bool(episodes) and rng.random() < 0.5
    if wrong:
        rng.choice([*episodes, rows, borders])[0 if rng.random() < 0.2 else -1] = rng.choice(EXTREME)
        episode = rng.choice(episodes)
        episode[rng.randrange(10)] = rng.choice([*EXTREME, 3, 59])
    table = array("q", [value for episode in episodes for value in episode])
    options = size, 6, width, 5, rng.random() < 0.5, 7
    digests = bytearray(16)
    hashed = rng.choice([(), (digests, array("q", [3]), 2)])
    result = refused(batch.rows, *outputs, [tokens], [unaligned(spans)], table, rows, borders, *options, *hashed)
    if not wrong:
        assert any(digests) == bool(hashed)
        assert result == -1, result
        assert outputs[0].tolist() == (words + [5] * size)[:size]
        assert outputs[7][1] == filled


def try_bad_batch(batch: ModuleType, rng: random.Random) -> None:
    arguments: list[Any] = [bytearray(8) for _ in range(8)]
    arguments += [[bytes(8)], [bytes(15)], numbers([0] * 10), numbers([0, 1]), numbers([0])]
    arguments += [1, 1, rng.choice([2, 4, 8, 0, -1]), 0, True, 7, bytearray(16), numbers([5]), 0]
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(arguments))
        arguments[at] = rng.choice([any_buffer(rng, bytes(8)), rng.choice(EXTREME), [any_buffer(rng, bytes(15))], []])
    refused(batch.rows, *arguments)


# _positions


def try_positions(positions: ModuleType, rng: random.Random) -> None:
    lengths = array("i", [rng.choice([0, 1, 2, 3, 9, 2**30]) for _ in range(rng.randrange(1, 9))])
    if rng.random() < 0.2:
        lengths[rng.randrange(len(lengths))] = -1
    ids = array("I", [rng.randrange(len(lengths)) for _ in range(rng.randrange(40))])
    ranges = [sorted(rng.randrange(len(ids) + 1) for _ in range(2)) for _ in range(rng.randrange(9))]
    totals = [sum(lengths[id] for id in ids[first:stop]) for first, stop in ranges]
    size = [total - rng.choice([0, 0, 1, 2, -1]) for total in totals]
    offset = [rng.choice([0, one, rng.randrange(-2, max(one, 0) + 3)]) for one in size]
    count, known = len(ranges), all(lengths[id] >= 0 for first, stop in ranges for id in ids[first:stop])
    position, inside, exact = array("q", [0] * count), bytearray(count), bytearray(count)
    columns = [[first for first, _ in ranges], [stop for _, stop in ranges], size, offset]
    texts = unaligned(ids.tobytes()), lengths, *(unaligned(numbers(column)) for column in columns)
    assert positions.positions(*texts, position, inside, exact) is known
    for at, (first, stop) in enumerate(ranges if known else []):
        target = totals[at] - size[at] + offset[at]
        begins = [*accumulate((lengths[id] for id in ids[first:stop]), initial=0)]
        number = next((n for n, begin in enumerate(begins) if begin >= target), len(begins) - 1)
        assert position[at] == first + number
        assert (inside[at], exact[at]) == (begins[number] != target, totals[at] - size[at] in (0, 1))


def try_bad_positions(positions: ModuleType, rng: random.Random) -> None:
    lengths = any_buffer(rng, array("i", [1, 2, 3]).tobytes())
    columns = [any_buffer(rng, numbers([rng.choice(EXTREME) for _ in range(2)])) for _ in range(4)]
    out = [any_buffer(rng, bytes(size)) for size in (16, 2, 2)]
    refused(positions.positions, any_buffer(rng, array("I", [0, 2, 2**32 - 1]).tobytes()), lengths, *columns, *out)
    good = [numbers([0, 1]), numbers([3, 3]), numbers([rng.choice(EXTREME)] * 2), numbers([rng.choice(EXTREME)] * 2)]
    refused(positions.positions, bytes(12), bytes(12), *good, bytearray(16), bytearray(2), bytearray(2))


def try_byte_pairs(positions: ModuleType, rng: random.Random) -> None:
    data = bytes(rng.choice(b"<<<|/ab\xff") for _ in range(rng.choice([0, 1, 2, 30, 3_000])))
    first, seconds = rng.choice(data or b"<"), bytes(rng.random() < 0.3 for _ in range(256))
    right = [at for at, one in enumerate(data) if one == first and (at + 1 == len(data) or seconds[data[at + 1]])]
    given = rng.choice([bytes, unaligned])(data)
    assert array("q", positions.byte_pairs(given, first, seconds)).tolist() == right
    refused(positions.byte_pairs, any_buffer(rng, data), rng.choice(EXTREME), any_buffer(rng, seconds))


def try_ids_in_range(positions: ModuleType, rng: random.Random) -> None:
    near = [0, 1, 2, 3, 7, 2**31, 2**32 - 2, 2**32 - 1]
    ids = array("I", [rng.choice(near) for _ in range(rng.choice([0, 1, 63, 64, 65, 200]))])
    first, last = rng.choice(near), rng.choice(near)
    right = [at for at, id in enumerate(ids) if first <= id <= last]
    assert array("q", positions.ids_in_range(unaligned(ids.tobytes()), first, last)).tolist() == right
    refused(positions.ids_in_range, any_buffer(rng, ids.tobytes()), rng.choice(EXTREME), rng.choice(EXTREME))


# _columns


def any_text(rng: random.Random) -> str:
    return "".join(rng.choice(PIECES) for _ in range(rng.randrange(8)))


def any_record(rng: random.Random) -> dict[str, Any]:
    turns: list[dict[str, Any]] = []
    for _ in range(rng.choice([1, 2, 3, 15, 16, 17, 40])):
        fields = [
            ("role", rng.choice(ROLES)),
            ("content", any_text(rng) * rng.choice([1, 1, 1, 9, 700])),
            ("name", None),
        ]
        fields = fields[: rng.choice([2, 3])]
        rng.shuffle(fields)
        turns.append(dict(fields))
    record = [("messages", turns), ("id", rng.choice([None, any_text(rng), rng.randrange(10**6), -3]))]
    record = record[: rng.choice([1, 2])]
    rng.shuffle(record)
    return dict(record)


def check_columns(block: bytes, start: int, columns: Callable[..., Any]) -> int:
    end, data, messages, stop, role, first, last = columns(block, start)
    assert start <= end <= len(block)
    lines = [line for line in block[start:end].split(b"\n") if line]
    counts, stops, starts, ends = (array("q", column).tolist() for column in (messages, stop, first, last))
    assert len(lines) == len(counts) == len(stops) and sum(counts) == len(role) == len(starts) == len(ends)
    turns = [turn for line in lines for turn in json.loads(line)["messages"]]
    assert [ROLES[code] for code in role] == [turn["role"] for turn in turns]
    assert [data[a:b].decode() for a, b in zip(starts, ends, strict=True)] == [turn["content"] for turn in turns]
    assert [len(json.loads(line)["messages"]) for line in lines] == counts
    return len(lines)


def try_columns(columns: ModuleType, rng: random.Random) -> None:
    ascii_only = rng.random() < 0.5
    records = [any_record(rng) for _ in range(rng.randrange(1, 5))]
    separators = rng.choice([(", ", ": "), (",", ":"), (" ,\t", " : ")])
    lines = [json.dumps(each, ensure_ascii=ascii_only, separators=separators).encode() for each in records]
    block = b"\n".join(lines) + rng.choice([b"", b"\n"])
    assert check_columns(block, 0, columns.columns) == len(records)
    data = bytearray(block)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                del data[at : at + rng.randrange(1, 40)]
            case 2:
                data[at:at] = rng.choice(
                    [b'"', b"\\", b"\\u", b"\\ud800", b"\0", b"\xff", b"\xe0\x80\x80", b"{", b"[[", b"\n"]
                )
            case _:
                del data[at:]
        if not data:
            break
    check_columns(bytes(data), rng.randrange(len(data) + 1), columns.columns)
    refused(columns.columns, any_buffer(rng, block), rng.choice(EXTREME))


def try_keys(columns: ModuleType, rng: random.Random) -> None:
    longest = rng.choice([3, 70, 400, 5_000])
    records = [rng.randbytes(rng.randrange(longest)) for _ in range(rng.choice([0, 1, 2, 15, 16, 17, 90]))]
    data, stop = b"".join(records), numbers([*accumulate(map(len, records))])
    expected = b"".join(hashlib.sha256(record).digest()[:16] for record in records)
    assert columns.keys(unaligned(data), unaligned(stop)) == expected
    refused(columns.keys, any_buffer(rng, data), any_buffer(rng, numbers([rng.choice(EXTREME) for _ in range(3)])))
    refused(columns.keys, data, stop + b"1")


# _bpe

LETTER, UPPER, LOWER, MARK, NUMBER, SPACE, OTHER, CONTROL, CJK_LETTER, CJK_OTHER, UNKNOWN, DOUBT = *range(11), 16
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CL100K = rf"{_ENDINGS}|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]{{1,%d}}| ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_O200K = (
    r"[^\r\nA-Za-z0-9]?[A-Z]*[a-z]+(?:%s)?|[^\r\nA-Za-z0-9]?[A-Z]+(?:%s)?|[0-9]{1,%d}"
    r"| ?[^\sA-Za-z0-9]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+",
    _CL100K % 3,
    _CL100K % 1,
    _O200K % (_ENDINGS, _ENDINGS, 3),
    _O200K % ("", "", 1),
    # Digits are split off first, so the rule for spaces ignores them. Unmatched characters are split off too.
    r"[0-9]{1,3}|[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n!-~]?[A-Za-z]+| ?[!-/:-@\[-`{-~]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?![^\s0-9])|\s+|(?:(?![\x00-\x20\x7f]?[A-Za-z])[\x00-\x08\x0e-\x1f\x7f])+",
]
"""Regular expressions that split ASCII text into words, indexed by the encoder's pattern number."""


def ascii_class(pattern: int, character: str) -> int:
    if character.isalpha():
        return LETTER if pattern not in (3, 4) else UPPER if character.isupper() else LOWER
    if character.isdigit() or character in " \t\n\r\f\v":
        return NUMBER if character.isdigit() else SPACE
    return CONTROL if pattern == 5 and not character.isprintable() else OTHER


def classes(pattern: int) -> bytes:
    """Return a table with a class for each character: correct classes for ASCII, and arbitrary classes beyond ASCII."""
    return bytes(
        [ascii_class(pattern, chr(n)) for n in range(128)]
        + [(n * 7 % 23 % 10) + (DOUBT if n % 31 == 0 else 0) for n in range(128, 2**16)]
        + [UNKNOWN] * 99
    )


class Vocabulary:
    """A random vocabulary, which consists of all single bytes and random merges."""

    def __init__(self, rng: random.Random) -> None:
        self.tokens = [bytes([n]) for n in range(256)]
        self.merges: dict[tuple[int, int], int] = {}
        common = [*b"abxyz word'sLL123 \n!", *"ä名".encode()]
        while len(self.merges) < 120:
            pair = rng.choice([*common, *self.merges.values()]), rng.choice([*common, *self.merges.values()])
            merged = self.tokens[pair[0]] + self.tokens[pair[1]]
            if pair not in self.merges and merged not in self.tokens and len(merged) < 40:
                self.merges[pair] = len(self.tokens)
                self.tokens.append(merged)
        self.whole, self.pattern = rng.random() < 0.3, rng.randrange(len(PATTERNS))

    def arguments(self) -> dict[str, Any]:
        places = [0]
        for token in self.tokens:
            places.append(places[-1] + len(token))
        return {
            "pattern": self.pattern,
            "whole": self.whole,
            "classes": classes(self.pattern),
            "byte_ids": array("I", range(256)),
            "pairs": array("I", [half for pair in self.merges for half in pair]),
            "into": array("I", self.merges.values()),
            "vocabulary": b"".join(self.tokens),
            "places": array("q", places),
            "numbers": array("I", range(len(self.tokens))),
            "added": b"\3<a>\2zz",
        }

    def encode(self, text: str) -> list[int]:
        words = re.compile(PATTERNS[self.pattern], re.ASCII).findall(text)
        assert "".join(words) == text
        return [id for word in words for id in self.word(word.encode())]

    def word(self, word: bytes) -> list[int]:
        if self.whole and word in self.tokens:
            return [self.tokens.index(word)]
        ids = [*word]
        rank = {pair: n for n, pair in enumerate(self.merges)}
        while True:
            at = min(range(len(ids) - 1), key=lambda n: (rank.get((ids[n], ids[n + 1]), 10**9), n), default=None)
            if at is None or (ids[at], ids[at + 1]) not in rank:
                return ids
            ids[at : at + 2] = [self.merges[ids[at], ids[at + 1]]]


def check_encoded(vocabulary: Vocabulary, texts: Sequence[bytes], encoded: tuple[bytes, bytes, list[int]]) -> None:
    ids, offsets, odd = array("I", encoded[0]).tolist(), array("q", encoded[1]).tolist(), encoded[2]
    assert len(offsets) == len(texts) + 1 and offsets[0] == 0 and offsets[-1] == len(ids) and offsets == sorted(offsets)
    for n, text in enumerate(texts):
        own = ids[offsets[n] : offsets[n + 1]]
        if n in odd or b"zz" in text or b"<a>" in text:
            assert own == [] and n in odd
            continue
        assert b"".join(vocabulary.tokens[id] for id in own) == text
        if text.isascii():
            assert own == vocabulary.encode(text.decode()), text


def try_bpe(bpe: ModuleType, rng: random.Random) -> None:
    vocabulary = Vocabulary(rng)
    encoder = bpe.Encoder(**vocabulary.arguments())
    for _ in range(6):
        texts = [any_text(rng) * rng.choice([1, 1, 1, 20]) for _ in range(rng.randrange(9))]
        check_encoded(vocabulary, [text.encode() for text in texts], encoder.encode(texts, rng.random() < 0.5))
        before, after = [b"", b"user\n"], [b"", b" \n"]
        kinds = bytes(rng.randrange(2) for _ in texts)
        # The last choice starts with UTF-8 continuation bytes.
        pieces = [rng.choice([text.encode(), rng.randbytes(rng.randrange(40)), b"\x80\x80a"]) for text in texts]
        data, starts, stops = b"", [], []
        for piece in pieces:
            starts.append(len(data))
            data += piece
            stops.append(len(data))
        columns = [rng.choice([bytes, unaligned])(numbers(each)) for each in (starts, stops)]
        encoded = encoder.encode_columns(unaligned(data), *columns, kinds, before, after)
        check_encoded(vocabulary, [before[k] + p + after[k] for k, p in zip(kinds, pieces, strict=True)], encoded)
        wrong = [any_buffer(rng, numbers([rng.choice(EXTREME) for _ in texts])) for _ in range(2)]
        refused(encoder.encode_columns, data, *wrong, any_buffer(rng, rng.randbytes(len(texts))), before, after)
        refused(encoder.encode_columns, data, *columns, kinds, rng.choice([[], None, ["text"] * 2]), after)
        refused(encoder.encode, rng.choice([None, (), ["a", 3], ["\udcff"], [None]]), True)
    # A forked process must be able to encode new words.
    if rng.random() < 0.2 and not (child := os.fork()):
        try:
            check_encoded(vocabulary, [b"word new"], encoder.encode(["word new"], True))
            os._exit(0)
        except BaseException:
            os._exit(1)
    elif "child" in locals() and child:
        assert os.waitpid(child, 0)[1] == 0


def try_bpe_in_threads(bpe: ModuleType, rng: random.Random) -> None:
    """Encode new words in several threads at once; the calls are large enough to release the GIL."""
    vocabulary = Vocabulary(rng)
    encoder = bpe.Encoder(**vocabulary.arguments())
    batches = [["".join(rng.choices("abxyword'LL12 \n!", k=6000)) for _ in range(4)] for _ in range(4)]
    encoded: list[Any] = [None] * len(batches)

    def encode(number: int) -> None:
        texts = [text.encode() for text in batches[number]]
        stops = numbers([*accumulate(map(len, texts))])
        starts = numbers([0, *array("q", stops)[:-1]])
        for _ in range(2):
            encoder.encode(batches[number], True)
            encoded[number] = encoder.encode_columns(b"".join(texts), starts, stops, bytes(len(texts)), [b""], [b""])

    threads = [threading.Thread(target=encode, args=(number,)) for number in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    number = rng.randrange(len(batches))
    check_encoded(vocabulary, [text.encode() for text in batches[number]], encoded[number])


def try_bad_bpe(bpe: ModuleType, rng: random.Random) -> None:
    arguments = Vocabulary(rng).arguments()
    for name in rng.sample([*arguments], rng.randrange(1, 4)):
        value = arguments[name]
        if isinstance(value, int):
            arguments[name] = rng.choice([-(2**31), -1, 0, 1, 2, 3, 5, 6, 2**31 - 1])
        elif isinstance(value, array) and rng.random() < 0.6:
            changed = value[: rng.randrange(len(value) + 1)] if rng.random() < 0.3 else value[:]
            for _ in range(rng.randrange(3)):
                if changed:
                    changed[rng.randrange(len(changed))] = (
                        rng.choice(EXTREME) % 2**32 if value.typecode == "I" else rng.choice(EXTREME)
                    )
            arguments[name] = changed
        elif name == "classes" and rng.random() < 0.6:
            arguments[name] = bytes(
                rng.choice([value, rng.randbytes(len(value)), b"\6" * 200, b"\5" * 128, b"\4" * 128])
            )
        else:
            arguments[name] = any_buffer(rng, bytes(value))
    encoder = refused(bpe.Encoder, **arguments)
    if isinstance(encoder, bpe.Encoder):
        texts = [any_text(rng) for _ in range(20)]
        encoder.encode(texts, True)
        data = rng.randbytes(100)
        encoder.encode_columns(data, numbers([0, 50]), numbers([50, 100]), b"\0\0", [b""], [b""])
        refused(encoder.__init__, **arguments)
    unmade = bpe.Encoder.__new__(bpe.Encoder)
    assert isinstance(refused(unmade.encode, ["a"], True), RuntimeError)
    assert isinstance(
        refused(unmade.encode_columns, b"a", numbers([0]), numbers([1]), b"\0", [b""], [b""]), RuntimeError
    )
    assert isinstance(refused(unmade.__init__), TypeError)


# _rollout

BOX = re.compile(
    r'"(object_([0-9]{1,9}))": \{"desc": "([ !#-\[\]-~]+)", "bbox_2d": \['
    + ", ".join([r'"(<\|coord_(?:0|[1-9][0-9]{0,2})\|>)"'] * 4)
    + r"\]\}"
)


def boxes(text: str, at: int) -> list[Any]:
    entries: list[Any] = []
    while box := BOX.match(text, at):
        number, places = int(box[2]), [int(each[8:-2]) for each in box.groups()[3:]]
        starts = [box.start(group) for group in range(4, 8)]
        value = text.index("{", at)
        entries.append((box[1], number, number, at, value, box.end(), True, True, (box[3], places, starts)))
        if text[box.end() : box.end() + 2] != ", ":
            break
        at = box.end() + 2
    return entries


def try_boxes(rollout: ModuleType, rng: random.Random) -> None:
    entries = []
    for _ in range(rng.randrange(4)):
        number, desc = rng.choice([1, 7, "07", 10**8, 10**9, "", "x"]), rng.choice(["cat", "a b", "", "é", "~!", '\\"'])
        places = [rng.choice([0, 5, 10, 99, 999, 1000, "00", "", -1]) if rng.random() < 0.1 else 7 for _ in range(4)]
        coordinates = ", ".join(f'"<|coord_{k}|>"' for k in places)
        entries.append(f'"object_{number}": {{"desc": "{desc}", "bbox_2d": [{coordinates}]}}')
    data = bytearray(rng.choice(["", "{", "{ "]).encode() + rng.choice([", ", ",", ",  "]).join(entries).encode())
    if data and rng.random() < 0.4:
        at = rng.randrange(len(data))
        data[at : at + rng.randrange(3)] = rng.choice([b"", b'"', b"\0", b"\xff", b"9", b" "])
    if rng.random() < 0.4:
        del data[rng.randrange(len(data) + 1) :]
    text = data.decode("latin-1")
    for at in (0, 1, rng.randrange(len(data) + 1)):
        if at <= len(data):
            assert rollout.boxes(rng.choice([bytes, unaligned])(data), at) == boxes(text, at)
    refused(rollout.boxes, any_buffer(rng, bytes(data)), rng.choice(EXTREME))
    assert isinstance(refused(rollout.boxes, bytes(data), len(data) + 1), ValueError)


def overlap(one: list[int], other: list[int]) -> float | None:
    """Return the IoU of two boxes, or None if they neither overlap nor touch."""
    width, height = (min(one[at + 2], other[at + 2]) - max(one[at], other[at]) for at in (0, 1))
    if min(width, height) < 0:
        return None
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    union = sum(areas) - width * height
    return width * height / union if union > 0 else float(one == other)


def try_overlaps(rollout: ModuleType, rng: random.Random) -> None:
    most = rng.choice([3, 9, 999, 10**6])
    lists: list[list[Any]] = []
    for _ in range(2):
        corners = [[sorted(rng.randrange(most) for _ in range(2)) for _ in range(2)] for _ in range(rng.randrange(9))]
        lists.append([[xs[0], ys[0], xs[1], ys[1]] for xs, ys in corners])
    expected = [
        (n, m, ratio)
        for n, one in enumerate(lists[0])
        for m, other in enumerate(lists[1])
        if (ratio := overlap(one, other)) is not None
    ]
    mine, others, ratios = (array(code, column) for code, column in zip("qqd", rollout.overlaps(*lists), strict=True))
    assert list(zip(mine, others, ratios, strict=True)) == expected
    wrong = rng.choice(
        [[1, 2, 3], [1, 2, 3, 4.0], [1, 2, 3, 2**80], [1, 2, 3, True], (1, 2, 3, 4), None, "1234", [2**30] * 4]
    )
    lists[rng.randrange(2)].append(wrong)
    # An invalid box in the second list must be detected even if the first list is empty.
    assert rollout.overlaps(*lists) is None
    refused(rollout.overlaps, rng.choice([None, (), {}, 3]), [])


def fuzz(folder: Path, rounds: int, seed: int) -> int:
    rng = random.Random(seed)
    names = ("_copy", "_batch", "_positions", "_columns", "_bpe", "_rollout")
    copy, batch, positions, columns, bpe, rollout = (load(folder, name) for name in names)
    tries = [(try_copy, copy, 20), (try_pieces, copy, 20), (try_bad_copy, copy, 20), (try_columns, columns, 4),
             (try_keys, columns, 8),
             (try_batch, batch, 10), (try_bad_batch, batch, 10),
             (try_positions, positions, 12), (try_bad_positions, positions, 12),
             (try_byte_pairs, positions, 8), (try_ids_in_range, positions, 8), (try_bpe, bpe, 1),
             (try_bad_bpe, bpe, 1), (try_bpe_in_threads, bpe, 1),
             (try_boxes, rollout, 20), (try_overlaps, rollout, 4)]  # fmt: skip
    for _ in range(rounds):
        for attempt, module, times in tries:
            for _ in range(times):
                attempt(module, rng)
    return rounds * sum(times for _, _, times in tries)


if __name__ == "__main__":
    folder, rounds, seed = Path(sys.argv[1]), *(int(each) for each in [*sys.argv[2:], "100", "1"][:2])
    print(f"{fuzz(folder, rounds, seed):,} random and hostile calls to the compiled modules")
