from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from chatmill.errors import DataError
from chatmill.rollout.target import build_target
from chatmill.rows import Part, Rule

EOS = 256
FIRST_COORDINATE = 300
HURTING = (
    b"}}", b"}},", b'"},', b'"}}', b'"]}', b'"]}}', b'"]}, "', b'{"', b'{"object_', b'": {"desc": "', b'", "', b"]}},",
    b'"}, "object_', b"}\n}", b" }", b'{}', b'\xc3', b'\xa9"}', b'\x9f\x98', b'\\"', b"},", b", \"", b'_1', b"object_9",
)  # fmt: skip


class Toy:
    """A tokenizer whose ids 0 to 255 are bytes, followed by EOS, coordinates, and tokens added on request.

    Text is encoded by greedy longest match. `token` adds a token for any bytes, so a rollout can be split anywhere.
    """

    name = "toy"

    def __init__(self, merges: Sequence[bytes] = (), *, whole: bool = True) -> None:
        self._names = {"<|im_end|>": EOS} | {f"<|coord_{k}|>": FIRST_COORDINATE + k for k in range(1000)}
        control = {id: name.encode() for name, id in self._names.items()}
        self._bytes = control | ({byte: bytes([byte]) for byte in range(256)} if whole else {})
        self._ids = {piece: id for id, piece in self._bytes.items() if id not in control}
        for merge in merges:
            self.token(merge)
        self._merges = sorted(self._ids, key=len, reverse=True)

    @property
    def vocab_size(self) -> int:
        return 1 + max(self._bytes)

    def token(self, piece: bytes) -> int:
        if piece not in self._ids:
            id = self._ids[piece] = self.vocab_size
            self._bytes[id] = piece
        return self._ids[piece]

    def encode(self, text: str) -> list[int]:
        data, ids = text.encode(), []
        while data:
            piece = next((piece for piece in self._merges if data.startswith(piece)), None)
            if piece is None:
                raise DataError(f"toy: cannot write {data[:1]!r}")
            ids.append(self._ids[piece])
            data = data[len(piece) :]
        return ids

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        rows = [self.encode(text) for text in texts]
        offsets = np.cumsum([0, *map(len, rows)])
        return np.array([id for row in rows for id in row], dtype=np.uint32), offsets.astype(np.int64)

    def piece(self, id: int) -> bytes:
        if id not in self._bytes:
            raise DataError(f"toy: no token has id {id}")
        return self._bytes[id]

    def token_id(self, token: str) -> int | None:
        return self._names.get(token)

    def special_token_ids(self) -> dict[str, int]:
        return {"eot": EOS}

    def rollout(self, text: str) -> list[int]:
        """Encode an answer with each `<|coord_k|>` as its own token."""
        ids: list[int] = []
        while text:
            at = text.find("<|coord_")
            stop = text.find("|>", at) + 2 if at >= 0 else -1
            if at < 0 or text[at:stop] not in self._names:
                cut = len(text) if at < 0 else at + 1
                ids += self.encode(text[:cut])
                text = text[cut:]
                continue
            ids += [*self.encode(text[:at]), self._names[text[at:stop]]]
            text = text[stop:]
        return ids

    def text(self, ids: Sequence[int]) -> str:
        return b"".join(self._bytes[id] for id in ids).decode("utf-8", "replace")


def chopped(toy: Toy, data: bytes, seed: int) -> list[int]:
    draw = random.Random(seed)
    ids: list[int] = []
    while data:
        stop = data.find(b"|>") + 2
        id = toy.token_id(data[:stop].decode("utf-8", "replace"))
        if id is not None and draw.random() < 0.7:
            ids.append(id)
        else:
            stop = draw.randint(1, draw.choice((1, 2, 4, 9, 30)))
            ids.append(toy.token(data[:stop]))
        data = data[stop:]
    return ids


def box(number: int | str, desc: str, *places: int) -> str:
    tokens = ", ".join(f'"<|coord_{k}|>"' for k in places)
    return f'"object_{number}": {{"desc": "{desc}", "bbox_2d": [{tokens}]}}'


def thing(desc: str, *places: int) -> dict:
    return {"desc": desc, "bbox_2d": list(places)}


def target(toy, text, objects, **options):
    return build_target(toy.rollout(text), objects, tokenizer=toy, **options)


def spans(found):
    rows = found.rows
    return [
        (Part(span["part"]), found.ids[start:stop], float(span["weight"]), int(span["target"]), Rule(span["rule"]))
        for span, start, stop in zip(rows.spans, rows.span_start[:-1], rows.span_start[1:], strict=True)
    ]
