"""The lines that `chatmill prepare` and `chatmill render` print on standard error if `--tokenizer` is not given."""

from __future__ import annotations

FORMAT = "format: chatml, because the tokenizer bytes has no chat template\n"
NOTE = (
    "note: no tokenizer was given, so bytes is used, with one token per byte; to use the tokenizer of a model, pass "
    "--tokenizer FOLDER\n"
)


def without_notes(err: str) -> str:
    return err.removeprefix(FORMAT).removeprefix(NOTE)
