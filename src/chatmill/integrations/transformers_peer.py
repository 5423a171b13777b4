"""Render records with transformers' `apply_chat_template`, in a separate process because templates are untrusted."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any

import msgspec

from chatmill.format import TemplateRenderer
from chatmill.format.template.process.channel import Channel, EndedError, fork_server
from chatmill.records import Record

SECONDS, MEMORY, RESPONSE = 20.0, 2 << 30, 1 << 28
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "HOME": "/nonexistent"}
WARM_UP = "{% generation %}{{ 'x' }}{% endgeneration %}{{ messages | tojson }}{{ strftime_now('%Y') }}"
_RESPONSE = msgspec.msgpack.Decoder(list[int] | str | None)


class TransformersPeer:
    """Renders records with transformers in a separate process, and returns their token ids."""

    def __init__(self, renderer: TemplateRenderer) -> None:
        self._renderer = renderer
        self._channel: Channel | None = None
        self._owner = os.getpid()
        path = renderer.folder.tokenizer_json
        special = msgspec.json.encode(renderer.folder.special).decode()
        now = "" if renderer.now is None else renderer.now.isoformat()
        self._arguments = (str(path and path.absolute()), special, now)
        version = None if path is None else self._ask(None)
        self.version = version if isinstance(version, str) else ""
        """The version of transformers; empty if transformers cannot be used."""

    def __call__(self, record: Record, *, null_content: bool = False) -> list[int]:
        given = self._renderer.template_input(record)
        messages = [
            {**message, "content": None} if null_content and "tool_calls" in message and not text.content else message
            for message, text in zip(given.messages, record.messages, strict=True)
        ]
        source = self._renderer.templates[bool(record.tools)].source
        options = {"tools": given.tools, "chat_template": source, **self._renderer.arguments}
        ids = self._ask([messages, options])
        # If transformers rejects the record, return an empty list, so that the comparison reports a difference.
        return ids if isinstance(ids, list) else []

    def __enter__(self) -> TransformersPeer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._channel is not None:
            self._channel.close()

    def _ask(self, request: Any) -> list[int] | str | None:
        """Return the response of the process, or None if the process crashes or exceeds its limits."""
        if self._channel is not None and self._owner != os.getpid():
            # In a forked child, open a new channel, because the parent still uses the inherited channel.
            self._channel.close()
            self._channel = None
        self._owner = os.getpid()
        try:
            if self._channel is None:
                self._channel = Channel(fork_server(__name__), MEMORY, *self._arguments)
            frame = self._channel.exchange(msgspec.json.encode(request), seconds=SECONDS, limit=RESPONSE)
            response: list[int] | str | None = _RESPONSE.decode(frame)
            return response
        except (EndedError, EOFError, OSError, ValueError, TypeError, OverflowError):
            if self._channel is not None:
                self._channel.end()
            self._channel = None
            return None


def main() -> None:
    """Run the fork server, which starts the processes that run transformers."""
    from chatmill.format.template.process.fork_server import run_server

    os.environ.update(ENVIRONMENT)
    with suppress(ImportError):
        import transformers

        transformers.AutoTokenizer  # noqa: B018  # imported when it is used
    run_server(_service)


def _service(tokenizer: str, special: str, now: str) -> Callable[[bytes], bytes]:
    opened, version = opened_tokenizer(Path(tokenizer), msgspec.json.decode(special))
    if version is not None and now:
        set_clock(datetime.fromisoformat(now))

    def respond(frame: bytes) -> bytes:
        request = msgspec.json.decode(frame)
        try:
            if request is None:
                return msgspec.msgpack.encode(version)
            messages, options = request
            ids = opened.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
            return msgspec.msgpack.encode([int(id) for id in ids])
        except Exception:
            return msgspec.msgpack.encode(None)

    return respond


def set_clock(moment: datetime) -> None:
    """Make `strftime_now` in chat templates return the renderer's date."""
    import transformers.utils.chat_template_utils as module

    class _FixedClock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return moment

    if hasattr(module, "datetime"):
        module.datetime = _FixedClock


def opened_tokenizer(tokenizer: Path, special: dict[str, Any]) -> tuple[Any, str | None]:
    """Return the tokenizer and the version of transformers; (None, None) if loading fails."""
    try:
        import transformers

        if tokenizer.with_name("tokenizer_config.json").is_file():
            opened: Any = transformers.AutoTokenizer.from_pretrained(str(tokenizer.parent), trust_remote_code=False)
        else:
            opened = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), **special)
        # transformers imports some modules on first use, but this process cannot import modules later.
        opened.apply_chat_template([{"role": "user", "content": "x"}], chat_template=WARM_UP, tokenize=True)
    except Exception:
        return None, None
    return opened, str(transformers.__version__)
