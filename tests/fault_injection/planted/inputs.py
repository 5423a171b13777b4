"""Bugs in how records, templates and tokenizers are read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from chatmill.errors import RecordError
from chatmill.format.template.process import channel
from chatmill.prepare import unit
from chatmill.records import input_files
from chatmill.records.shapes import ShapeParser
from chatmill.records.shapes.decode import decode_object
from chatmill.tokenizer import reference, tokenizer_json


def bad_bytes_accepted() -> None:
    import msgspec

    decode = sys.modules[decode_object.__module__]
    strict = decode._DECODER

    class Lenient:
        def decode(self, data: bytes) -> Any:
            try:
                return strict.decode(data)
            except (msgspec.DecodeError, UnicodeDecodeError):
                return strict.decode(data.decode(errors="ignore").replace("\0", "").encode())

    decode._DECODER = Lenient()


def faults_forgotten() -> None:
    original = ShapeParser.__call__
    ShapeParser.__call__ = lambda self, line, data: [
        result for result in original(self, line, data) if not isinstance(result, RecordError)
    ]


def input_known_by_size() -> None:
    input_files.has_bytes = unit.has_bytes = lambda path, read: path.exists()


def sandbox_open() -> None:
    """Disable the sandbox inside the template process."""
    channel._START = channel._START.replace(
        "import_module(sys.argv[1])",
        """from chatmill.format.template.tracing import formatting, program, sandbox
sandbox.check_plain = formatting.check_plain = program.check_plain = lambda value, depth=0: None
sandbox.Sandbox.attribute = lambda self, obj, name: getattr(obj, name, None)
sandbox.Sandbox.is_safe_callable = lambda self, obj: True
import_module(sys.argv[1])""",
    )


def template_process_not_locked() -> None:
    channel._START = channel._START.replace(
        "import_module(sys.argv[1])",
        """from chatmill.format.template.process import lockdown
lockdown.lock_down = lambda memory, parent: []
import_module(sys.argv[1])""",
    )


def environment_kept() -> None:
    import os
    import subprocess

    class Keeping(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "env": dict(os.environ)})

    subprocess.Popen = Keeping


def panics_not_caught() -> None:
    @contextmanager
    def nothing(place: str, what: str, right: str) -> Iterator[None]:
        yield

    tokenizer_json.faults_of = reference.faults_of = nothing


def fastokens_believed() -> None:
    """Use fastokens for every text, without checking its token ids for the probe texts."""
    tokenizer_json.LEFT_BY_FASTOKENS = ""
    tokenizer_json.TokenizerJson._agrees = lambda self, engine: True
