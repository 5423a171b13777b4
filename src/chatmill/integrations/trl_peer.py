"""Prepare records with TRL's own code, to compare the rows with chatmill's.

TRL executes chat templates, which are untrusted code, so TRL runs in a separate process with resource limits, and
without access to files or the network.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from chatmill.errors import DataError, UsageError, one_line
from chatmill.format import TemplateRenderer
from chatmill.format.template.process.channel import Channel, EndedError, fork_server
from chatmill.format.template.template_input import TemplateInput, only_turns, plain_input
from chatmill.integrations.trl_process import PreparedRecord, PreparedRow, TRLSetup
from chatmill.records import Record
from chatmill.show.compare import PeerRow

SECONDS, SECONDS_PER_CHARACTER = 5.0, 2e-5
MEMORY, RESPONSE = 2 << 30, 1 << 28
PROCESS = "chatmill.integrations.trl_process"
MAX_KILLS = 3
"""The comparison fails after this many crashed or killed processes."""


def require_trl() -> None:
    """Raise an error if TRL or torch is not installed, without importing them."""
    if importlib.util.find_spec("torch") is None:
        raise ModuleNotFoundError(name="torch")
    if importlib.util.find_spec("trl") is None:
        raise UsageError("TRL is not installed; run pip install 'chatmill[trl]'")


class TRLPeer:
    """Prepares records with TRL in a separate process."""

    def __init__(self, renderer: TemplateRenderer, *, assistant_only_loss: bool = True, max_length: int | None = None):
        """`max_length` replaces SFTConfig's default; None keeps the default, and 0 means no limit."""
        folder = renderer.folder
        if folder.tokenizer_json is None:
            name = f"{renderer.tokenizer.name} has no tokenizer.json, which transformers requires"
            raise UsageError(f"{name}; give a Hugging Face folder or a tokenizer.json")
        self._renderer, self._kills = renderer, 0
        self._channel: Channel | None = None
        settings = {
            "special": folder.special,
            "template": folder.template.source,
            "with_tools": None if folder.with_tools is None else folder.with_tools.source,
            "now": "" if renderer.now is None else renderer.now.isoformat(),
            "assistant_only_loss": assistant_only_loss,
            "max_length": max_length,
        }
        self._arguments = (str(folder.tokenizer_json.absolute()), msgspec.json.encode(settings).decode())
        self.setup = self._setup()

    def rows(self, record: Record, *, completion: int | None = None) -> tuple[PeerRow | str, PeerRow | str]:
        """Return the rows that TRL prepares from a record: one for the configured loss, and one for TRL's default loss.

        If TRL rejects the record, the reason is returned instead of a row. In a prompt-completion dataset, `completion`
        is the index of the completion's first message.
        """
        turns = only_turns(record)
        style = self._renderer.templates[bool(record.tools)].style
        given = plain_input(turns, style)
        examples = [self._example(record, given, completion)]
        if self.setup.patched and style.arguments_as_text:
            # TRL's training template requires tool call arguments as objects.
            style = replace(style, arguments_as_text=False)
            examples.insert(0, self._example(record, plain_input(turns, style), completion))
        try:
            frame = self._exchange(examples, SECONDS + SECONDS_PER_CHARACTER * given.characters)
            prepared = msgspec.msgpack.decode(frame, type=PreparedRecord)
            if prepared.fault:
                raise _no_comparison(prepared.fault)
            chosen = _checked(prepared.chosen)
            return chosen, chosen if prepared.default is None else _checked(prepared.default)
        except EndedError as ended:
            return str(ended), str(ended)
        except (ValueError, TypeError):
            raise self._broken("the process did not return rows") from None

    def _example(self, record: Record, given: TemplateInput, completion: int | None) -> dict[str, Any]:
        kwargs = {**self._renderer.arguments, **msgspec.json.decode(record.template_kwargs or "{}")}
        example: dict[str, Any] = {"chat_template_kwargs": kwargs, "tools": given.tools}
        if completion is None:
            return example | {"messages": given.messages}
        return example | {"prompt": given.messages[:completion], "completion": given.messages[completion:]}

    def __enter__(self) -> TRLPeer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._channel is not None:
            self._channel.close()

    def _setup(self) -> TRLSetup:
        try:
            setup = msgspec.msgpack.decode(self._exchange(None, SECONDS), type=TRLSetup)
        except EndedError as ended:
            raise self._broken(f"the TRL process failed on a small conversation ({ended})") from None
        except (ValueError, TypeError):
            raise self._broken("the process did not return rows") from None
        if setup.fault:
            raise _no_comparison(setup.fault)
        return setup

    def _exchange(self, request: Any, seconds: float) -> bytes:
        """Send a request to the TRL process and return its response; raise `EndedError` if it crashes or exceeds its
        limits.
        """
        try:
            if self._channel is None:
                self._channel = Channel(fork_server(PROCESS), MEMORY, *self._arguments)
                if request is not None:
                    self._channel.exchange(msgspec.json.encode(None), seconds=SECONDS, limit=RESPONSE)
            return self._channel.exchange(msgspec.json.encode(request), seconds=seconds, limit=RESPONSE)
        except (EndedError, EOFError, OSError) as error:
            reason = str(error) if isinstance(error, EndedError) else "the TRL process crashed or ran out of memory"
            if self._channel is not None:
                self._channel.end()
            self._channel = None
            self._kills += 1
            if self._kills >= MAX_KILLS:
                raise self._broken(f"{reason}, as with earlier records") from None
            raise EndedError(reason) from None

    def _broken(self, what: str) -> DataError:
        name = one_line(self._renderer.folder.template.name, 200)
        return DataError(f"{name}: TRL cannot run with this template: {what}; fix the template")


def _no_comparison(fault: str) -> DataError:
    what = f"TRL fails with {one_line(fault, 300)}, so there is nothing to compare"
    return DataError(f"{what}; check that TRL and transformers are installed correctly")


def _checked(row: PreparedRow | str) -> PeerRow | str:
    if isinstance(row, str):
        return one_line(row, 300)
    ids = np.array(row.ids, dtype=np.uint32)
    trained = np.frombuffer(row.trained, dtype=np.uint8) > 0
    if len(ids) != len(trained) or not 0 <= row.kept <= len(ids):
        raise ValueError
    return PeerRow(ids, trained, row.kept)
