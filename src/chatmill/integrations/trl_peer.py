"""What TRL's SFTTrainer makes of records, to compare with.

Its own `_prepare_dataset` runs, on one record at a time. It runs chat templates, which are other people's code, so it
runs in a process of its own, with limits and without files or network.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from chatmill.errors import DataError, UsageError, one_line
from chatmill.format import TemplateRenderer
from chatmill.format.template.process.channel import Channel, EndedError, fork_server
from chatmill.format.template.template_input import only_turns
from chatmill.integrations.transformers_peer import ENVIRONMENT, opened_tokenizer, set_clock
from chatmill.records import Record
from chatmill.show.compare import PeerRow

SECONDS, SECONDS_PER_CHARACTER = 5.0, 2e-5
MEMORY, RESPONSE = 2 << 30, 1 << 28
MAX_KILLS = 3
"""After so many processes were killed at a limit, or crashed, the template is given up."""
NO_LIMIT = 0
"""As `max_length`: rows are not cut."""
SMALL = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}
WARM_UP = "{% for m in messages %}{{ m.content }}{% generation %}{{ m.role | tojson }}{% endgeneration %}{% endfor %}"


class TRLSetup(msgspec.Struct, frozen=True):
    """How TRL would train with a template."""

    version: str
    max_length: int | None
    """Tokens of a row that are kept; None: all of them."""
    patched: bool = False
    """It renders with its own edition of the template, which has generation tags."""
    no_mask: str = ""
    """Its reason, if it cannot tell answers from other tokens with this template; it trains every token then."""
    end_trained: bool = True
    """Whether it trains the end of an answer; if not, it says so in a warning."""
    fault: str = ""
    """Why it cannot be compared with."""


class _PreparedRow(msgspec.Struct, frozen=True):
    """One row: its ids, 1 for each that is trained, and how many are left after `max_length`."""

    ids: list[int]
    trained: bytes
    kept: int


class _Prepared(msgspec.Struct, frozen=True):
    """A record with the loss of answers only, and with TRL's default; a text is why TRL refuses it."""

    chosen: _PreparedRow | str
    default: _PreparedRow | str | None
    """None: the same."""


class TRLPeer:
    """Rows of records as TRL prepares them."""

    def __init__(self, renderer: TemplateRenderer, *, assistant_only_loss: bool = True, max_length: int | None = None):
        """`max_length`: as in SFTConfig; None is its default, 0 no limit."""
        if importlib.util.find_spec("trl") is None:
            raise UsageError("this needs TRL, which is not installed; pip install 'chatmill[trl]'")
        folder = renderer.folder
        if folder.tokenizer_json is None:
            name = f"{renderer.tokenizer.name} has no tokenizer.json, which transformers opens"
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
        """The row of a record, and that with TRL's default loss; a text is why TRL refuses it.

        `completion`: the first message of the completion, for a dataset of prompts and completions.
        """
        turns = only_turns(record)
        given = self._renderer.template_input(turns)
        kwargs = {**self._renderer.arguments, **msgspec.json.decode(record.template_kwargs or "{}")}
        example: dict[str, Any] = {"chat_template_kwargs": kwargs, "tools": given.tools}
        if completion is None:
            example["messages"] = given.messages
        else:
            example |= {"prompt": given.messages[:completion], "completion": given.messages[completion:]}
        try:
            frame = self._exchange(example, SECONDS + SECONDS_PER_CHARACTER * given.characters)
            prepared = msgspec.msgpack.decode(frame, type=_Prepared)
            chosen = _checked(prepared.chosen)
            return chosen, chosen if prepared.default is None else _checked(prepared.default)
        except EndedError as ended:
            return str(ended), str(ended)
        except (ValueError, TypeError):
            raise self._broken("it answers with something else than rows") from None

    def __enter__(self) -> TRLPeer:
        return self

    def __exit__(self, *_: object) -> None:
        """End its process."""
        if self._channel is not None:
            self._channel.close()

    def _setup(self) -> TRLSetup:
        try:
            setup = msgspec.msgpack.decode(self._exchange(None, SECONDS), type=TRLSetup)
        except EndedError as ended:
            raise self._broken(f"{ended}, on a small conversation") from None
        except (ValueError, TypeError):
            raise self._broken("it answers with something else than rows") from None
        if setup.fault:
            raise DataError(f"TRL cannot be compared with: {one_line(setup.fault, 300)}")
        return setup

    def _exchange(self, request: Any, seconds: float) -> bytes:
        """The response of the process; an `EndedError` if it gives none within its limits."""
        try:
            if self._channel is None:
                self._channel = Channel(fork_server(__name__), MEMORY, *self._arguments)
                if request is not None:
                    self._channel.exchange(msgspec.json.encode(None), seconds=SECONDS, limit=RESPONSE)
            return self._channel.exchange(msgspec.json.encode(request), seconds=seconds, limit=RESPONSE)
        except (EndedError, EOFError, OSError) as error:
            reason = str(error) if isinstance(error, EndedError) else "its process ended, by a crash or for memory"
            if self._channel is not None:
                self._channel.end()
            self._channel = None
            self._kills += 1
            if self._kills >= MAX_KILLS:
                raise self._broken(f"{reason}; so did others before") from None
            raise EndedError(reason) from None

    def _broken(self, what: str) -> DataError:
        name = one_line(self._renderer.folder.template.name, 200)
        return DataError(f"{name}: TRL with this template was given up: {what}; fix the template")


def _checked(row: _PreparedRow | str) -> PeerRow | str:
    if isinstance(row, str):
        return one_line(row, 300)
    ids = np.array(row.ids, dtype=np.uint32)
    trained = np.frombuffer(row.trained, dtype=np.uint8) > 0
    if len(ids) != len(trained) or not 0 <= row.kept <= len(ids):
        raise ValueError
    return PeerRow(ids, trained, row.kept)


# The process.


def main() -> None:
    """The fork server of such processes."""
    from chatmill.format.template.process.fork_server import run_server

    os.environ.update(ENVIRONMENT, ACCELERATE_USE_CPU="true", CUDA_VISIBLE_DEVICES="")
    with suppress(Exception):
        # Before any process is forked, as this takes long.
        import trl.trainer.sft_trainer  # noqa: F401
    run_server(_service)


def _service(tokenizer: str, settings: str) -> Callable[[bytes], bytes]:
    trainer, fault = None, ""
    try:
        trainer = _Preparation(Path(tokenizer), msgspec.json.decode(settings))
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"

    def respond(frame: bytes) -> bytes:
        request = msgspec.json.decode(frame)
        if trainer is None:
            return msgspec.msgpack.encode(TRLSetup("", None, fault=fault))
        return msgspec.msgpack.encode(trainer.setup() if request is None else trainer.prepare(request))

    return respond


class _Preparation:
    """The part of an SFTTrainer that prepares a dataset, without a model."""

    def __init__(self, tokenizer: Path, settings: dict[str, Any]) -> None:
        import trl

        opened, version = opened_tokenizer(tokenizer, settings["special"])
        if version is None:
            raise ValueError(f"transformers cannot open {tokenizer}")
        if settings["now"]:
            set_clock(datetime.fromisoformat(settings["now"]))
        self._version, self._tokenizer = str(trl.__version__), opened
        self._masked, limit = settings["assistant_only_loss"], settings["max_length"]
        self._limit = {} if limit is None else {"max_length": limit if limit != NO_LIMIT else None}
        self._template: str | None = None
        self._whole = {masked: self._config(masked, max_length=None) for masked in (False, True)}
        self._cut = {masked: self._config(masked, **self._limit) for masked in (False, True)}
        # Some of what it needs is imported at its first use, which is only possible now.
        opened.chat_template = WARM_UP
        self._rows(SMALL, self._config(True, max_length=1), None)
        named = {"default": settings["template"], "tool_use": settings["with_tools"]}
        opened.chat_template = named if settings["with_tools"] else settings["template"]

    def setup(self) -> TRLSetup:
        """What SFTTrainer decides before it prepares a dataset. This runs the template."""
        from trl import chat_template_utils as templates

        setup = {"version": self._version, "max_length": self._cut[False].max_length}
        if not self._masked:
            return TRLSetup(**setup)
        try:
            if not templates.has_generation_markers(self._tokenizer.chat_template):
                self._template = templates.get_training_chat_template(self._tokenizer)
        except Exception as error:
            self._masked = False
            return TRLSetup(**setup, no_mask=_reason(error))
        ends = templates.is_chat_template_stop_token_trained(self._tokenizer, chat_template=self._template)
        return TRLSetup(**setup, patched=self._template is not None, end_trained=ends)

    def prepare(self, example: dict[str, Any]) -> _Prepared:
        default = self._row(example, False, None)
        return (
            _Prepared(self._row(example, True, self._template), default) if self._masked else _Prepared(default, None)
        )

    def _row(self, example: dict[str, Any], masked: bool, template: str | None) -> _PreparedRow | str:
        try:
            [whole] = self._rows(example, self._whole[masked], template)
            ids, labels = whole["input_ids"], whole["labels"]
            limit = self._cut[masked].max_length
            cut = self._rows(example, self._cut[masked], template) if limit and len(ids) > limit else [whole]
            kept = len(cut[0]["input_ids"]) if cut else 0
            if cut and (cut[0]["input_ids"] != ids[:kept] or cut[0]["labels"] != labels[:kept]):
                raise ValueError("max_length keeps something else than the first tokens")
            return _PreparedRow([int(id) for id in ids], bytes(label != -100 for label in labels), kept)
        except Exception as error:
            return _reason(error)

    def _rows(self, example: dict[str, Any], config: Any, template: str | None) -> list[dict[str, Any]]:
        """The dataset of one example, as SFTTrainer prepares it."""
        from trl.trainer.sft_trainer import SFTTrainer

        trainer: Any = SimpleNamespace(
            _tokenizer=self._tokenizer, chat_template=template, completion_only_loss="completion" in example
        )
        dataset: Any = _PreparedExamples([example])
        return list(SFTTrainer._prepare_dataset(trainer, dataset, self._tokenizer, config, False, None, "train"))

    @staticmethod
    def _config(masked: bool, **limit: Any) -> Any:
        from trl import SFTConfig

        return SFTConfig(
            output_dir="unused", report_to="none", use_cpu=True, bf16=False, assistant_only_loss=masked, **limit
        )


class _PreparedExamples:
    """As much of an `IterableDataset` as SFTTrainer uses to prepare one.

    `datasets` itself shares memory with other processes, which is not possible here.
    """

    column_names = None

    def __init__(self, examples: list[dict[str, Any]]) -> None:
        self._examples = examples

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._examples)

    def map(
        self,
        function: Callable[..., dict[str, Any]],
        fn_kwargs: dict[str, Any] | None = None,
        remove_columns: str | list[str] | None = None,
    ) -> _PreparedExamples:
        removed = [remove_columns] if isinstance(remove_columns, str) else remove_columns or []
        return _PreparedExamples(
            [
                {key: value for key, value in one.items() if key not in removed} | function(one, **fn_kwargs or {})
                for one in self._examples
            ]
        )

    def filter(self, function: Callable[[dict[str, Any]], bool]) -> _PreparedExamples:
        return _PreparedExamples([one for one in self._examples if function(one)])


def _reason(error: Exception) -> str:
    """The first sentence of an error."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
