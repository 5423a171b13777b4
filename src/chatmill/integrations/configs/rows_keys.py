"""Convert the keys of other trainers for row length, truncation, packing, validation split and chat template."""

from __future__ import annotations

import json
import re
from typing import Any

from chatmill.integrations.configs.report import TheirKeys, Translation

VAL_SHARE = 0.01
"""The validation fraction to use if a config sets a number of rows."""
CUT_AT_THE_END = (
    "the trainer truncates the end of longer rows; chatmill removes whole exchanges from the start, "
    "and drops rows that still do not fit"
)
TEXT_CUT = "chatmill splits longer texts into several rows, and trains on all tokens"


def take_length(translation: Translation, keys: TheirKeys, name: str, default: int, fit: str, note: str) -> None:
    """Read the maximum row length; `fit` sets what happens to longer rows."""
    length = keys.integer(name, least=2, most=2**24)
    recipe, train = {"max_tokens": length or default, "fit": fit}, {"block_size": length or default}
    if length is not None:
        translation.take(keys.path(name), length, recipe=recipe, train=train, note=note)
    else:
        translation.assume(f"{translation.trainer} uses this length by default; {note}", recipe=recipe, train=train)


def take_packing(translation: Translation, keys: TheirKeys, name: str) -> bool:
    packs = keys.switch(name)
    if packs is not None:
        taken = {"packing": "bins" if packs else "none"}
        note = "conversations in the same row do not attend to each other" if packs else ""
        translation.take(keys.path(name), packs, train=taken, note=note)
    return bool(packs)


def take_val_size(translation: Translation, keys: TheirKeys, name: str, *, other_val: bool) -> bool:
    """Read the size of the validation split; return whether the run has validation data."""
    size = keys.number(name)
    if size is None:
        return other_val
    if other_val:
        translation.default(
            keys.path(name), size, note="the config names separate validation data, so this key has no effect"
        )
    elif 0 <= size < 1:
        translation.take(keys.path(name), size, recipe={"val_split": float(size)})
    else:
        note = f"chatmill expects a fraction, not a number of rows, and uses {VAL_SHARE:g}; check val_split"
        translation.take(keys.path(name), size, recipe={"val_split": VAL_SHARE}, note=note)
    return other_val or bool(size)


def without_val(translation: Translation) -> None:
    """Turn off evaluation, because the run has no validation data."""
    for name in ("early_stop_patience", "keep_best"):
        if translation.train.pop(name, None) is not None:
            translation.assume(f"chatmill omits {name}, because the run has no validation data")
    if translation.train.get("eval_interval") != 0:
        translation.assume("the run has no validation data", train={"eval_interval": 0})


def use_template(translation: Translation, key: str, text: str) -> None:
    """Set the recipe's chat template, given as text or as a path."""
    if re.search(r"\{[{%#]", text):
        translation.chat_template = text if text.endswith("\n") else text + "\n"
        translation.take(key, text, other={"format": "template", "chat_template": "written next to the recipe"})
    else:
        translation.take(key, text, recipe={"format": "template", "chat_template": text})


def template_args(translation: Translation, key: str, values: dict[str, Any]) -> None:
    taken = [f"{name}={json.dumps(value)}" for name, value in values.items()]
    translation.take(key, values, recipe={"template_args": taken})
