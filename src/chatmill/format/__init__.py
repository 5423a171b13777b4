"""How conversations are written in tokens, and which of those are trained."""

from chatmill.format.body import record_texts
from chatmill.format.chat_format import PRESETS, ChatFormat, Turn, load_format, parse_format
from chatmill.format.opened import TEMPLATE, OpenFormat, TemplateOptions, open_format
from chatmill.format.render import prompt_ids, render, render_chunks, renderable
from chatmill.format.template.folder import has_template
from chatmill.format.written import written_turns

__all__ = [
    "PRESETS",
    "TEMPLATE",
    "ChatFormat",
    "OpenFormat",
    "TemplateOptions",
    "Turn",
    "has_template",
    "load_format",
    "open_format",
    "parse_format",
    "prompt_ids",
    "record_texts",
    "render",
    "render_chunks",
    "renderable",
    "written_turns",
]
