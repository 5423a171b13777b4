"""Convert the keys of LLaMA-Factory configs that set how conversations are rendered, packed and mixed."""

from __future__ import annotations

from chatmill.integrations.configs.chat_templates import NAMED
from chatmill.integrations.configs.report import TheirKeys, Translation
from chatmill.integrations.configs.rows_keys import CUT_AT_THE_END, take_length, take_packing


def take_mixing(translation: Translation, keys: TheirKeys) -> None:
    strategy, shares = keys.text("mix_strategy"), keys.texts("interleave_probs", separator=",")
    if strategy is not None:
        if strategy == "concat":
            translation.default(keys.path("mix_strategy"), strategy, note="chatmill trains on each row once per epoch")
        elif shares is None:
            translation.none(
                keys.path("mix_strategy"),
                strategy,
                "chatmill trains on each row once per epoch; set weights to change this",
            )
        else:
            note = "an epoch has as many rows as all sources together"
            translation.take(keys.path("mix_strategy"), strategy, other={"weight": shares}, note=note)
    if shares is None:
        return
    trained = [source for source in translation.sources if not source.get("only_val")]
    try:
        numbers = [float(share) for share in shares]
    except ValueError:
        numbers = []
    if strategy in (None, "concat"):
        translation.default(
            keys.path("interleave_probs"), shares, note="this key has no effect with mix_strategy concat"
        )
    elif len(numbers) != len(trained) or not all(0 < number < 1e6 for number in numbers):
        translation.faults.append("interleave_probs must contain one positive number per dataset")
        translation.none(keys.path("interleave_probs"), shares, "chatmill does not understand this value")
    else:
        for source, number in zip(trained, numbers, strict=True):
            source["weight"] = number
        translation.take(keys.path("interleave_probs"), shares, other={"weight": numbers})


def take_rows(translation: Translation, keys: TheirKeys) -> None:
    neat = keys.switch("neat_packing")
    packs = take_packing(translation, keys, "packing")
    if neat is not None:
        note = "conversations in the same row do not attend to each other"
        taken = {"packing": "bins" if neat or packs else "none"}
        translation.take(keys.path("neat_packing"), neat, train=taken, note=note if neat else "")
    take_length(translation, keys, "cutoff_len", 2048, "exchanges", CUT_AT_THE_END)
    inputs, last = keys.switch("train_on_prompt"), keys.switch("mask_history")
    if inputs is None:
        translation.assume("LLaMA-Factory trains only on answers by default", train={"use_loss_mask": True})
    else:
        translation.take(keys.path("train_on_prompt"), inputs, train={"use_loss_mask": not inputs})
    if last is not None:
        taken = {"train_on": "last" if last else "assistant"}
        translation.take(keys.path("mask_history"), last, recipe=taken)
    thinking = keys.switch("enable_thinking")
    if thinking is not None:
        taken_args = [f"enable_thinking={'true' if thinking else 'false'}"]
        translation.take(keys.path("enable_thinking"), thinking, recipe={"template_args": taken_args})
    _take_template(translation, keys)


def _take_template(translation: Translation, keys: TheirKeys) -> None:
    name = keys.text("template")
    if name is None:
        return
    if name == "chatml":
        translation.take(keys.path("template"), name, recipe={"format": "chatml"})
    elif name in NAMED:
        translation.chat_template = NAMED[name].template()
        translation.take(keys.path("template"), name, other={"chat_template": "written next to the recipe"})
    else:
        note = f"chatmill has no template {name} and uses the tokenizer's template; if that differs, set chat_template"
        translation.none(keys.path("template"), name, note)
