"""The `Backend` protocol for tokenizer files, and the built-in backend `bytes`.

A backend encodes only text; `Tokenizer` adds the control tokens.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, overload

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import ChatmillError, DataError, one_line
from chatmill.rows import offsets

Ids = NDArray[np.uint32]
Offsets = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TextColumns(Sequence[str]):
    """A sequence of strings stored in one UTF-8 buffer. String i is before[kind[i]] + data[start[i]:stop[i]] +
    after[kind[i]].

    The C engine encodes the buffer without creating Python strings; other engines iterate over the strings.
    """

    data: bytes
    start: Offsets
    stop: Offsets
    kind: NDArray[np.uint8]
    before: list[bytes]
    after: list[bytes]

    def __len__(self) -> int:
        return len(self.kind)

    def __iter__(self) -> Iterator[str]:
        return map(bytes.decode, self.encoded())

    def encoded(self) -> Iterator[bytes]:
        """Yield each string as UTF-8 bytes."""
        data, before, after = self.data, self.before, self.after
        for kind, start, stop in zip(self.kind.tolist(), self.start.tolist(), self.stop.tolist(), strict=True):
            yield before[kind] + data[start:stop] + after[kind]

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[n] for n in range(*index.indices(len(self)))]
        kind, start, stop = int(self.kind[index]), int(self.start[index]), int(self.stop[index])
        return (self.before[kind] + self.data[start:stop] + self.after[kind]).decode()


class TextTokenizer(Protocol):
    """The methods of a tokenizer that `serialize_chat_to_ids` and `render_chat_sft` use."""

    def encode(self, text: str) -> list[int]: ...

    def special_token_ids(self) -> Mapping[str, int]: ...


class Backend(Protocol):
    """Encodes text with one kind of tokenizer file. The text never produces control tokens."""

    @property
    def engine(self) -> str:
        """Name of the library that encodes text."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def sha256(self) -> str: ...

    @property
    def control(self) -> Mapping[str, int]:
        """Maps each control token to its id."""

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        """Return the concatenated ids of all texts, and len(texts)+1 offsets into the ids."""

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids that contain no control token."""

    def piece(self, id: int) -> bytes:
        """Return the bytes of a token. Raise `KeyError` if no token has this id."""


def is_markup(token: str) -> bool:
    """Whether a token looks like a control token (`<think>`, `[INST]`), even if it is not marked as special."""
    return len(token) > 2 and token[0] in "<[" and token[-1] in ">]"


def aliases(control: Mapping[str, int]) -> dict[str, str]:
    """Map each control token to a placeholder name that cannot occur in text.

    Control tokens in the tokenizer are renamed instead of removed, because removing a token would change the ids of
    later tokens. Each name contains a new random number, so no message contains the name. No name is a prefix of
    another name, and the token ids do not depend on the names.
    """
    secret = secrets.token_hex(16)
    return {token: f"\U0010ffff{secret}:{id}\U0010ffff" for token, id in control.items()}


def flat(arrays: Sequence[NDArray[np.generic]]) -> tuple[Ids, Offsets]:
    """Concatenate the token ids of several texts; also return the offset of each text.

    [7 8] [] [9]  ->  [7 8 9], [0 2 2 3]
    """
    ids = np.concatenate(arrays) if arrays else np.empty(0)
    return ids.astype(np.uint32), offsets(np.array([len(array) for array in arrays], dtype=np.int64))


@contextmanager
def faults_of(place: str, what: str, right: str) -> Iterator[None]:
    """Convert any exception in the `with` block to a `DataError` of the form `place: what (error message); right`."""
    try:
        yield
    except (ChatmillError, MemoryError):
        raise
    except BaseException as error:
        # Check the type by name: a Rust panic is a BaseException whose type cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        message = one_line(f"{type(error).__name__}: {error}", 160)
        raise DataError(f"{place}: {what} ({message}); {right}") from error


_NGPT = "84a5023f67d74cf29cc4001becde983c"

# Add new tokens only at the end, because ids depend on the order.
CONTROL_TOKENS = (
    *(f"<|ngpt_{role}_{_NGPT}|>" for role in ("sys", "usr", "asst", "eot")),
    *("<|sys|>", "<|usr|>", "<|asst|>", "<|eot|>"),
    *("<|SYSTEM|>", "<|USER|>", "<|ASSISTANT|>", "<|END|>", "<|EOS|>"),
    *("<|im_start|>", "<|im_end|>"),
)


class ByteLevel:
    """The built-in tokenizer `bytes`, in which every byte is one token."""

    engine = "bytes"
    vocab_size = 256 + len(CONTROL_TOKENS)
    sha256 = hashlib.sha256("\n".join(["bytes", *CONTROL_TOKENS]).encode()).hexdigest()

    def __init__(self) -> None:
        self.control = {token: 256 + index for index, token in enumerate(CONTROL_TOKENS)}

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        pieces = list(texts.encoded() if isinstance(texts, TextColumns) else map(str.encode, texts))
        ids = np.frombuffer(b"".join(pieces), dtype=np.uint8).astype(np.uint32)
        return ids, offsets(np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces)))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")

    def piece(self, id: int) -> bytes:
        return bytes([id])


FOLDING = "\u00df\u0130\u0131\u0149\u017f\u01f0\u1e96\u1e97\u1e98\u1e99\u1e9a\u1e9e\u212a" + "".join(
    map(chr, range(0xFB00, 0xFB07))
)
"""All non-ASCII characters that match an ASCII letter if case is ignored."""
_SPACES = "\x00\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0\u1680\u180e\u2000\u200a\u200b\u2028\u2029\u202f\u205f\u2060\u3000\ufeff"
# One or two characters of each Unicode general category.
_CATEGORIES = (
    "\u01c5\u02b0\u0300\u0903\u20dd\u0661\u0967\uff11\u2160\u3007\u00b2\u0bf0\u203f\u2014\u2045\u2046\u00ab\u00bb\u00a7\u2212\u20ac"
    "\u02c6\u2117\u00ad\u200d\ue000\u0378\u1100\u1161\u11a8\uac00\u4e00\u0e01\u0e31\u1c80\u13a0\uab70\u10d0"
    "\U00010400\U0001d400\U0001f1e9\U00020000"
)


def _contractions(letter: str) -> str:
    """Return text for comparing two tokenizers, in which `letter` precedes, follows or replaces a letter of each
    contraction.
    """
    words = [f"'{word}" for word in ("s", "t", "re", "ve", "m", "ll", "d")]
    words += [word.upper() for word in words] + ["'Re", "'vE", "'lL"]
    replaced = {word[:n] + letter + word[n + 1 :] for word in words for n in range(1, len(word))}
    pieces = [letter + word for word in words] + [word + letter for word in words] + sorted(replaced)
    return "".join(before + piece for before in ("a", "1", " ", "\n") for piece in pieces)


def _between(letter: str) -> str:
    """Return text for comparing two tokenizers, with `letter` between characters of different Unicode classes."""
    others = ("a", "A", "1", " ", "\n", ".", letter)
    return "".join(before + letter + after for before in others for after in others)


PROBE = (
    "",
    " ",
    "a",
    " Hello",
    "Hello, world! It's 2024; they'll've \"won\" 1234567.89€ (~50%)…",
    "The quick brown fox jumps over the lazy dog. THE QUICK BROWN FOX. tHe qUiCk. Don't, DON'T, don’t.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. L'été, où ça? ¿Qué tal, señor? Žluťoučký kůň.",
    "Съешь же ещё этих мягких французских булок. Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. Պարտքի տարեկան",
    "我能吞下玻璃而不伤身体。私はガラスを食べられます。それは私を傷つけません。나는 유리를 먹을 수 있어요.",
    "أنا قادر على أكل الزجاج و هذا لا يؤلمني. אני יכול לאכול זכוכית. ฉันกินกระจกได้ मैं काँच खा सकता हूँ। நான் கண்ணாடி",
    "👩‍👩‍👧‍👦 👍🏽 🇩🇪 ❤️ 🤗🤗 ☃ ①②③ ﬁ ﬀ ™ Å Å e\u0301 ｆｕｌｌ ㎏ ½ x² \u200b\u200d\ufeff \u00a0\u3000 \U0010fffd",
    "def f(x: int) -> str:\n    if x == 0:\n\t\treturn f'{x!r}'\r\n    return {'a': [1, 2, 3]}['a'][::-1]\n\n\n",
    '<html><body class="x">&amp;</body></html>\n{"key": [null, true, -1.5e10], "s": "\\u00e9\\n"}\nSELECT * FROM t;',
    "for(i=0;i<n;++i){a[i]<<=2;b&&c||d;}//--**/ #include <stdio.h>\n$ ls -la | grep '^d' >> /dev/null 2>&1",
    "a  b   c    d     e      f\t\tg\t \th\n\n\ni \n j  \n\n  k\r\n\r\nl\r\r \u2003 \u2028 trailing   ",
    "   leading spaces\n    indented\n        more\n",
    "<|im_start|>user\nHi<|im_end|>\n<|eot|><|sys|> <s></s> <unk> [INST] <think></think> <|endoftext|> <｜User｜>",
    "<|im_st art|> im_end|> <|eo t|> <| eot |> <<|eot|>> |>|><|<| <0x0A> <0xFF> [CLS] [SEP] ▁ ▁▁ Ġ Ċ ##ing @@ </w>",
    "x" * 300 + "-" * 120 + "=" * 70 + " " * 130 + "\n" * 40 + "ha" * 90 + "1" * 50 + "।" * 20 + "😀" * 30,
    *map(_contractions, "s" + FOLDING),
    *map(_between, FOLDING + _SPACES + _CATEGORIES),
)
"""The texts that two tokenizer engines must encode to the same ids before the faster engine is used."""
