"""The options of commands that render conversations, from the declarations of `Job`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from chatmill.cli.expand import option
from chatmill.format import Mask, TemplateOptions
from chatmill.prepare.job import Job
from chatmill.rows import TrainOn

TokenizerName = Annotated[str, option(Job, "tokenizer")]
FormatName = Annotated[str, option(Job, "format")]
AddTokens = Annotated[bool, option(Job, "add_tokens")]
TrainedTurns = Annotated[TrainOn, option(Job, "train_on")]


@dataclass(frozen=True)
class TemplateFlags:
    """The options of a chat template; see `cli/expand.py`."""

    chat_template: Annotated[str | None, option(Job, "chat_template")] = None
    template_args: Annotated[list[str] | None, option(Job, "template_args")] = None
    template_date: Annotated[str | None, option(Job, "template_date")] = None
    mask: Annotated[Mask, option(Job, "mask")] = "derived"

    def options(self) -> TemplateOptions:
        return TemplateOptions(self.chat_template, self.template_args or (), self.mask, self.template_date)
