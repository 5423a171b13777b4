"""Chat formats: the tokens around each turn, and which parts of an assistant turn are trained on.

A chat format is a small TOML file; the presets are in `presets/`. `CompiledFormat` is a chat format compiled to token
ids for one tokenizer.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from chatmill.errors import DataError, UsageError, one_line
from chatmill.records import NO_ROLE, ROLES
from chatmill.remote.named_files import local_file
from chatmill.remote.urls import place
from chatmill.rows import Part, Rule, offsets
from chatmill.tokenizer import Tokenizer

PRESETS = ("chatml", "ngpt", "primer", "post-training")
TRAINABLE = ("open", "content", "close")

DEFAULT_BODY = {
    "reasoning": "<think>\n{}\n</think>\n\n",
    "tool_call": "<tool_call>\n{}\n</tool_call>",
    "tools": (
        "# Tools\n\nThese functions can be called; each line defines one:\n<tools>\n{}\n</tools>\n"
        'To call one, write {"name": ..., "arguments": ...} between <tool_call> and </tool_call>.'
    ),
}
"""Default templates for reasoning, tool calls and the list of tools."""


class TurnMarkers(NamedTuple):
    """The control tokens and text before and after a message."""

    open: str
    close: str


@dataclass(frozen=True)
class ChatFormat:
    """A chat format that marks turns with control tokens. `load_format` loads a format by name or path.

    >>> from chatmill import load_format
    >>> format = load_format("chatml")
    >>> format.turns["user"]
    TurnMarkers(open='<|im_start|>user\\n', close='<|im_end|>\\n')
    >>> format.trained
    ('content', 'close')
    """

    name: str
    tokens: Mapping[str, str]
    """Maps keys such as `sys`, `usr`, `asst` and `eot` to control tokens."""
    turns: Mapping[str, TurnMarkers]
    trained: tuple[str, ...] = ("content", "close")
    default_system: str | None = None
    begin: str = ""
    end: str = ""
    """`begin` and `end` are the control tokens before and after each conversation."""
    body: Mapping[str, str] = field(default_factory=lambda: dict(DEFAULT_BODY))
    """Templates for reasoning, a tool call and the list of tools, each with one `{}`."""
    requires_user: bool = False
    """Whether to train only on complete answers after a complete user turn, and to keep whitespace between turns."""

    def split(self, text: str) -> list[tuple[str | None, str]]:
        """Split `text` into (key, token) pairs for control tokens and (None, text) pairs for the text between them."""
        pieces: list[tuple[str | None, str]] = []
        keys = {token: key for key, token in self.tokens.items()}
        while text:
            at, token = min(
                ((text.index(token), token) for token in keys if token in text),
                key=lambda hit: (hit[0], -len(hit[1])),
                default=(len(text), ""),
            )
            if at:
                pieces.append((None, text[:at]))
            if token:
                pieces.append((keys[token], token))
            text = text[at + len(token) :]
        return pieces

    @property
    def has_turns(self) -> bool:
        """Whether the format marks turns with control tokens. This is true for every format except `text`."""
        return any(turn.open for turn in self.turns.values())

    @property
    def eot(self) -> str:
        """Key in `tokens` of the control token that ends an assistant turn."""
        return next(key for key, _ in self.split(self.turns["assistant"].close) if key is not None)

    def to_json(self) -> dict[str, Any]:
        """Return the format as a JSON object, which is stored in the dataset metadata."""
        stored: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        if not self.requires_user:
            # Omit a false `requires_user`, so that the metadata of existing datasets does not change.
            stored.pop("requires_user", None)
        return stored

    @classmethod
    def from_json(cls, stored: Any) -> ChatFormat:
        return msgspec.convert(stored, cls)


class UnknownFormatError(UsageError):
    """Raised if a name is neither a preset nor a .toml file."""


def load_format(spec: str | Path) -> ChatFormat:
    """Load a preset by name, or a TOML file by path.

    >>> from chatmill import load_format
    >>> load_format("primer").tokens
    {'sys': '<|sys|>', 'usr': '<|usr|>', 'asst': '<|asst|>', 'eot': '<|eot|>'}
    """
    if str(spec) in PRESETS:
        text = resources.files(__package__).joinpath("presets", f"{spec}.toml").read_text("utf-8")
        return parse_format(text, where=str(spec))
    given = place(spec)
    if Path(given.name).suffix != ".toml":
        raise UnknownFormatError(f'no format "{one_line(str(given))}"; expected {", ".join(PRESETS)} or a .toml file')
    try:
        text = local_file(spec).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise DataError(f"{given}: cannot be read ({reason}); a format is a TOML file") from None
    return parse_format(text, where=str(given))


def parse_format(text: str, *, where: str) -> ChatFormat:
    """Parse a chat format from TOML text. If the format is invalid, raise one `DataError` that lists all problems."""
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise DataError(f"{where}: not valid TOML: {error}") from None
    faults: list[str] = []
    known = {"name", "tokens", "trained", "default_system", "begin", "end", "body", "requires_user", *ROLES}
    faults += [f'unknown key "{one_line(key)}" (known: {", ".join(sorted(known))})' for key in data if key not in known]

    tokens = _strings(data.get("tokens", {}), "tokens", faults)
    if not tokens:
        faults.append('[tokens] is missing; list each control token there, for example eot = "<|eot|>"')
    if len(set(tokens.values())) < len(tokens):
        faults.append("two keys in [tokens] name the same token")
    turns: dict[str, TurnMarkers] = {}
    for role in ROLES:
        if role in data:
            turn = _strings(data[role], role, faults, allowed=("open", "close"))
            turns[role] = TurnMarkers(turn.get("open", ""), turn.get("close", ""))
    missing = [role for role in ("user", "assistant") if role not in turns]
    faults += [f"[{role}] is missing; a format needs at least [user] and [assistant]" for role in missing]
    trained = data.get("trained", ["content", "close"])
    if not isinstance(trained, list) or not trained or any(part not in TRAINABLE for part in trained):
        faults.append(f"trained must be a non-empty list of {', '.join(TRAINABLE)}")
        trained = []
    body = _strings(data.get("body", {}), "body", faults, allowed=tuple(DEFAULT_BODY))
    faults += [f'body.{key} must contain "{{}}" exactly once' for key in body if body[key].count("{}") != 1]
    texts = {key: data[key] for key in ("name", "default_system", "begin", "end") if key in data}
    faults += [f"{key} must be a string" for key, text in texts.items() if not isinstance(text, str)]
    texts = {key: text for key, text in texts.items() if isinstance(text, str)}
    requires_user = data.get("requires_user", False)
    if not isinstance(requires_user, bool):
        faults.append("requires_user must be true or false")
    if "default_system" in data and "system" not in turns:
        faults.append("default_system is set but [system] is missing")

    format = ChatFormat(
        name=texts.get("name") or Path(where).stem,
        tokens=tokens,
        turns=turns,
        trained=tuple(trained),
        default_system=texts.get("default_system"),
        begin=texts.get("begin", ""),
        end=texts.get("end", ""),
        body=DEFAULT_BODY | body,
        requires_user=requires_user is True,
    )
    faults += _marker_faults(format)
    if faults:
        raise DataError(f"{where}: " + "; ".join(faults))
    return format


def _strings(table: Any, name: str, faults: list[str], *, allowed: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the non-empty string values of a TOML table; append an error message to `faults` for each other value."""
    if not isinstance(table, dict):
        faults.append(f"[{name}] must be a table")
        return {}
    good = {}
    for key, value in table.items():
        if allowed and key not in allowed:
            faults.append(f'[{name}] has unknown key "{one_line(key)}" (known: {", ".join(allowed)})')
        elif not isinstance(value, str) or not value:
            faults.append(f"{name}.{one_line(key)} must be a non-empty string")
        else:
            good[key] = value
    return good


def _marker_faults(format: ChatFormat) -> list[str]:
    """Return an error message for each problem with the turn markers.

    Without control tokens at the start and end of each turn, message text could imitate a turn.
    """
    faults, used = [], set()
    for role, turn in format.turns.items():
        opening, closing = format.split(turn.open), format.split(turn.close)
        used |= {key for key, _ in opening + closing}
        if not opening or opening[0][0] is None:
            faults.append(f"{role}.open must start with a control token from [tokens]")
        if all(key is None for key, _ in closing):
            faults.append(f"{role}.close must contain a control token from [tokens]")
    for name in ("begin", "end"):
        pieces = format.split(getattr(format, name))
        used |= {key for key, _ in pieces}
        if any(key is None for key, _ in pieces):
            faults.append(f"{name} must consist only of control tokens from [tokens]")
    for name, template in format.body.items():
        keys = {key for key, _ in format.split(template)}
        if name == "tools" and keys - {None}:
            # Tool definitions are part of the system message, which is encoded as plain text.
            faults.append("body.tools must be plain text without control tokens from [tokens]")
        used |= keys
    if format.requires_user:
        faults += [
            f"{role}.{name} must contain one control token, at the {end}, because requires_user is true"
            for role, turn in format.turns.items()
            for name, end, pieces in (
                ("open", "start", format.split(turn.open)),
                ("close", "end", format.split(turn.close)[::-1]),
            )
            if sum(key is not None for key, _ in pieces) != 1 or pieces[0][0] is None
        ]
        if len(format.split(format.turns["assistant"].open)) > 1:
            faults.append("assistant.open must be a single control token, because requires_user is true")
    faults += [f"tokens.{key} is never used" for key in format.tokens if key not in used]
    return faults


BEGIN, OPEN, BODY, CLOSE, AFTER, END = range(6)
"""The pieces of a message, which are the columns of the tables in `CompiledFormat`.

Messages with the same role differ only in BODY.
"""
PARTS = (Part.OPEN, Part.OPEN, Part.CONTENT, Part.CLOSE, Part.CLOSE, Part.EOS)
ROLE_CODES: dict[str, int] = {role: code for code, role in enumerate((*ROLES, NO_ROLE))}
"""Maps each role to its row index in the tables of `CompiledFormat`, which equals its `Role` value."""


class CompiledFormat:
    """A chat format compiled to token ids for one tokenizer. `literals` contains the token ids of all turn markers and
    control tokens.
    """

    def __init__(self, format: ChatFormat, tokenizer: Tokenizer) -> None:
        opened_for = getattr(tokenizer, "control", None)
        if opened_for is not None and dict(opened_for) != dict(format.tokens):
            raise DataError(
                f"the tokenizer was opened for other control tokens ({', '.join(opened_for.values()) or 'none'}); "
                f"open it with the control tokens of the format {format.name}"
            )
        ids = tokenizer.special_token_ids()
        control = {key: int(ids[key]) for key in format.tokens}
        self.prefix: list[str] = []
        self.suffix: list[str] = []
        """For each role, `prefix` and `suffix` contain the text of the turn markers that is encoded together with the
        message text.
        """
        fixed: list[list[tuple[str | None, str]]] = []
        for role in ROLES:
            turn = format.turns.get(role)
            opening = format.split(turn.open) if turn else []
            closing = format.split(turn.close) if turn else []
            # The assistant header is encoded separately from the body, because the prompt at inference ends with the
            # header.
            joins = role != "assistant" and opening and opening[-1][0] is None
            self.prefix.append(opening.pop()[1] if joins else "")
            self.suffix.append(closing.pop(0)[1] if closing and closing[0][0] is None else "")
            last = max((at for at, (key, _) in enumerate(closing) if key is not None), default=-1)
            close, after = closing[: last + 1], closing[last + 1 :]
            fixed += [format.split(format.begin), opening, [], close, after, format.split(format.end)]
        # Text outside turns has no opening marker but may be followed by an end marker.
        self.prefix.append("")
        self.suffix.append("")
        fixed += [format.split(format.begin), [], [], [(format.eot, "")], [], format.split(format.end)]

        flat, start = tokenizer.encode_batch([text for pieces in fixed for key, text in pieces if key is None])
        texts = (flat[first:stop].tolist() for first, stop in pairwise(start))
        encoded = [
            [i for key, _ in pieces for i in (next(texts) if key is None else [control[key]])] for pieces in fixed
        ]
        self.lengths = np.array([len(ids) for ids in encoded], dtype=np.int64).reshape(-1, len(PARTS))
        self.starts = offsets(self.lengths.ravel())[:-1].reshape(self.lengths.shape)
        # After the fixed pieces, `literals` contains one id for each control token, for use inside message bodies.
        self.control_start = {key: int(self.lengths.sum()) + at for at, key in enumerate(control)}
        self.literals = np.array([i for ids in encoded for i in ids] + list(control.values()), dtype=np.uint32)

        trainable = [Rule.ROLE if part in format.trained else Rule.HEADER for part in TRAINABLE]
        self.rules = (Rule.HEADER, *trainable, Rule.HEADER, Rule.HEADER)

    def fixed(self, role: str, piece: int) -> list[int]:
        start, length = int(self.starts[ROLE_CODES[role], piece]), int(self.lengths[ROLE_CODES[role], piece])
        ids: list[int] = self.literals[start : start + length].tolist()
        return ids
