"""Prepare records with TRL's SFTTrainer in a separate process, one record at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import msgspec

from chatmill.integrations.transformers_peer import ENVIRONMENT, opened_tokenizer, set_clock

NO_LIMIT = 0
"""The value of `max_length` that disables truncation."""
NOT_OF_TRL = (ImportError, OSError)
"""Errors caused by the limits of the process, not by TRL."""
SMALL = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}
REFUSING = "{{ raise_exception('x') }}"
WARM_UP = "{% for m in messages %}{{ m.content }}{% generation %}{{ m.role | tojson }}{% endgeneration %}{% endfor %}"


class TRLSetup(msgspec.Struct, frozen=True):
    """TRL's settings for training on conversations with a given chat template."""

    version: str
    max_length: int | None
    """Maximum number of tokens in a row; None means no limit."""
    patched: bool = False
    """Whether TRL renders with its own training template, which has generation tags."""
    no_mask: str = ""
    """The reason why TRL cannot train only on answers with this template; empty if it can."""
    end_trained: bool = True
    """Whether TRL trains on the end token of an answer."""
    fault: str = ""
    """The reason why TRL and chatmill cannot be compared; empty if they can."""


class PreparedRow(msgspec.Struct, frozen=True):
    """The token ids and the loss mask of a row, and the number of tokens that are left after truncation to
    `max_length`.
    """

    ids: list[int]
    trained: bytes
    kept: int


class PreparedRecord(msgspec.Struct, frozen=True):
    """A record that TRL prepared with the configured loss mask and with TRL's default loss mask.

    If TRL rejects the record, the error message is stored instead of the row.
    """

    chosen: PreparedRow | str
    default: PreparedRow | str | None = None
    """The row with TRL's default loss; None if it equals `chosen`."""
    fault: str = ""
    """An error caused by the limits of the process, not by the record."""


def main() -> None:
    """Run the fork server, which starts the processes that run TRL."""
    from chatmill.format.template.process.fork_server import run_server

    os.environ.update(ENVIRONMENT, ACCELERATE_USE_CPU="true", CUDA_VISIBLE_DEVICES="")
    with suppress(Exception):
        # Import TRL before forking, because the import is slow.
        import trl.trainer.sft_trainer  # noqa: F401
    run_server(_service)


def _service(tokenizer: str, settings: str) -> Callable[[bytes], bytes]:
    trainer, fault = None, ""
    try:
        trainer = _Preparation(Path(tokenizer), msgspec.json.decode(settings))
    except Exception as error:
        fault = _reason(error)

    def respond(frame: bytes) -> bytes:
        request = msgspec.json.decode(frame)
        answer: TRLSetup | PreparedRecord
        try:
            if trainer is None:
                answer = TRLSetup("", None, fault=fault)
            else:
                answer = trainer.setup() if request is None else trainer.prepare(request)
        except NOT_OF_TRL as error:
            answer = (
                TRLSetup("", None, fault=_reason(error))
                if request is None
                else PreparedRecord("", fault=_reason(error))
            )
        return msgspec.msgpack.encode(answer)

    return respond


class _Preparation:
    """Runs the dataset preparation of SFTTrainer without creating a trainer or a model."""

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
        self._import_all()
        named = {"default": settings["template"], "tool_use": settings["with_tools"]}
        opened.chat_template = named if settings["with_tools"] else settings["template"]

    def _import_all(self) -> None:
        """Prepare an example so that TRL imports all modules that it needs, because imports fail once the process is
        sandboxed.
        """
        for template in (REFUSING, WARM_UP):
            self._tokenizer.chat_template = template
            with suppress(Exception):
                self._decide()
            with suppress(jinja2.TemplateError):
                self._rows(SMALL, self._config(True, max_length=1), None)

    def setup(self) -> TRLSetup:
        """Return the settings that SFTTrainer chooses for the template."""
        setup = {"version": self._version, "max_length": self._cut[False].max_length}
        if not self._masked:
            return TRLSetup(**setup)
        try:
            self._template, end_trained = self._decide()
        except NOT_OF_TRL:
            raise
        except Exception as error:
            self._masked = False
            return TRLSetup(**setup, no_mask=_reason(error))
        return TRLSetup(**setup, patched=self._template is not None, end_trained=end_trained)

    def _decide(self) -> tuple[str | None, bool]:
        """Return the training template that TRL uses instead of the model's template, or None, and whether TRL trains
        on the end token of answers.
        """
        from trl import chat_template_utils as templates

        is_tagged = templates.has_generation_markers(self._tokenizer.chat_template)
        template = None if is_tagged else templates.get_training_chat_template(self._tokenizer)
        return template, templates.is_chat_template_stop_token_trained(self._tokenizer, chat_template=template)

    def prepare(self, examples: list[dict[str, Any]]) -> PreparedRecord:
        """Prepare a record. `examples` contains the record as input for TRL's training template and as input for the
        model's template.

        If the input is the same for both templates, `examples` has one element.
        """
        default = self._row(examples[-1], False, None)
        if not self._masked:
            return PreparedRecord(default)
        return PreparedRecord(self._row(examples[0], True, self._template), default)

    def _row(self, example: dict[str, Any], masked: bool, template: str | None) -> PreparedRow | str:
        try:
            [whole] = self._rows(example, self._whole[masked], template)
            ids, labels = whole["input_ids"], whole["labels"]
            limit = self._cut[masked].max_length
            cut = self._rows(example, self._cut[masked], template) if limit and len(ids) > limit else [whole]
            kept = len(cut[0]["input_ids"]) if cut else 0
            if cut and (cut[0]["input_ids"] != ids[:kept] or cut[0]["labels"] != labels[:kept]):
                raise ValueError("truncation to max_length does not keep the first tokens")
            return PreparedRow([int(id) for id in ids], bytes(label != -100 for label in labels), kept)
        except NOT_OF_TRL:
            raise
        except Exception as error:
            return _reason(error)

    def _rows(self, example: dict[str, Any], config: Any, template: str | None) -> list[dict[str, Any]]:
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
    """The part of the `IterableDataset` interface that SFTTrainer needs to prepare a dataset.

    A dataset of the `datasets` library would need shared memory, which this process is not allowed to use.
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
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
