"""Chat formats and renderers, which turn conversations into token ids and a loss mask.

`ChatFormat` defines a chat format, and `TurnMarkers` defines how the turns of one role begin and end.
`load_format` and `parse_format` return a `ChatFormat`, and `PRESETS` lists the built-in names.
A `Renderer` combines a chat format with a tokenizer.
`open_renderer` opens a `Renderer`, and `resolve_format` chooses the format.
`TurnRenderer` renders with a `ChatFormat`, and `TemplateRenderer` with a Hugging Face chat template.
`TemplateOptions`, `Mask` and `TextTokens` are options for chat templates.
`has_template` returns whether a tokenizer folder has a chat template.
`renderer_from_json` restores the renderer stored in a dataset or a model.
`control_tokens_from_json` returns the control tokens of a stored format.
`record_texts` yields all texts of a record, to train a tokenizer on them.
`transcript_turns` returns the turns of a record as text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING as _TYPE_CHECKING

from chatmill._exports import lazy_exports as _lazy_exports

if _TYPE_CHECKING:
    from chatmill.format.chat_format import PRESETS as PRESETS
    from chatmill.format.chat_format import ChatFormat as ChatFormat
    from chatmill.format.chat_format import TurnMarkers as TurnMarkers
    from chatmill.format.chat_format import load_format as load_format
    from chatmill.format.chat_format import parse_format as parse_format
    from chatmill.format.factory import TEMPLATE as TEMPLATE
    from chatmill.format.factory import TemplateOptions as TemplateOptions
    from chatmill.format.factory import control_tokens_from_json as control_tokens_from_json
    from chatmill.format.factory import open_renderer as open_renderer
    from chatmill.format.factory import renderer_from_json as renderer_from_json
    from chatmill.format.factory import resolve_format as resolve_format
    from chatmill.format.messages import record_texts as record_texts
    from chatmill.format.messages import transcript_turns as transcript_turns
    from chatmill.format.renderer import Mask as Mask
    from chatmill.format.renderer import Renderer as Renderer
    from chatmill.format.renderer import TextTokens as TextTokens
    from chatmill.format.template.hf_folder import has_template as has_template
    from chatmill.format.template.renderer import TemplateRenderer as TemplateRenderer
    from chatmill.format.turn_renderer import TurnRenderer as TurnRenderer
    from chatmill.format.turn_renderer import before_cutting as before_cutting
    from chatmill.format.turn_renderer import requires_user as requires_user

__all__, __getattr__, __dir__ = _lazy_exports(__name__)
