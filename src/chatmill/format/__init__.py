"""Chat formats and renderers: how conversations become token ids, and which of them are trained.

ChatFormat, TurnMarkers     a format of turns; load_format, parse_format and PRESETS give one
Renderer                    a format with its tokenizer; open_renderer opens one
TurnRenderer                the renderer of a ChatFormat
TemplateRenderer            the renderer of a Hugging Face chat template; TemplateOptions, Mask, has_template
renderer_from_json          a renderer as a dataset or a model has stored it; control_tokens_from_json
record_texts                all texts of a record, to train a tokenizer on
transcript_turns            the turns of a record as text
"""

from chatmill.format.chat_format import PRESETS, ChatFormat, TurnMarkers, load_format, parse_format
from chatmill.format.factory import (
    TEMPLATE,
    TemplateOptions,
    control_tokens_from_json,
    open_renderer,
    renderer_from_json,
)
from chatmill.format.messages import record_texts, transcript_turns
from chatmill.format.renderer import Mask, Renderer
from chatmill.format.template.hf_folder import has_template
from chatmill.format.template.renderer import TemplateRenderer
from chatmill.format.turn_renderer import TurnRenderer

__all__ = [
    "PRESETS",
    "TEMPLATE",
    "ChatFormat",
    "Mask",
    "Renderer",
    "TemplateOptions",
    "TemplateRenderer",
    "TurnMarkers",
    "TurnRenderer",
    "control_tokens_from_json",
    "has_template",
    "load_format",
    "open_renderer",
    "parse_format",
    "record_texts",
    "renderer_from_json",
    "transcript_turns",
]
