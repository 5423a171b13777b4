"""How conversations are written in tokens, and which of those are trained."""

from chatmill.format.body import record_texts
from chatmill.format.chat_format import PRESETS, ChatFormat, TurnMarkers, load_format, parse_format
from chatmill.format.render import prompt_ids, render, render_chunks, renderable
from chatmill.format.renderer import TEMPLATE, Renderer, TemplateOptions, open_renderer
from chatmill.format.template.hf_folder import has_template
from chatmill.format.transcript import transcript_turns

__all__ = [
    "PRESETS",
    "TEMPLATE",
    "ChatFormat",
    "Renderer",
    "TemplateOptions",
    "TurnMarkers",
    "has_template",
    "load_format",
    "open_renderer",
    "parse_format",
    "prompt_ids",
    "record_texts",
    "render",
    "render_chunks",
    "renderable",
    "transcript_turns",
]
