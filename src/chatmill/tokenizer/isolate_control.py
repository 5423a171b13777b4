"""Remove control tokens from a parsed tokenizer.json, so that text cannot produce them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from chatmill.errors import DataError, one_line
from chatmill.tokenizer.backend import aliases, is_markup

Json = dict[str, Any]


def byte_alphabet() -> dict[str, int]:
    """Return a dict that maps each character of the byte-level BPE alphabet to its byte.

    Printable Latin-1 characters represent themselves.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def kinds(section: object) -> Iterator[str]:
    """Yield the `type` of a tokenizer.json component and of all components nested in it."""
    if isinstance(section, dict):
        yield str(section.get("type"))
        for value in section.values():
            yield from kinds(value)
    elif isinstance(section, list):
        for value in section:
            yield from kinds(value)


def vocabulary(content: Json) -> dict[str, int]:
    """Return a dict that maps the tokens of the model to their ids. In Unigram models, the id of a token is its index
    in the vocabulary list.
    """
    vocab = content["model"]["vocab"]
    return dict(vocab) if isinstance(vocab, dict) else {token: id for id, (token, _) in enumerate(vocab)}


def isolate_control(
    place: str, content: Json, control: Collection[str], *, text_tokens: Collection[str] = ()
) -> tuple[Json, dict[str, int]]:
    """Return a tokenizer.json without its control tokens, and the ids of the control tokens.

        added  A* b C* d E*  ->  A' b C' d        * special, markup or in `control`; ' renamed to its alias

    Added tokens in `text_tokens` are kept as ordinary text tokens, even if they look like control tokens. The id of an
    added token depends on its position in the list, so a control token before a kept token is renamed instead of
    removed. The post-processor, truncation, padding and dropout are also removed.
    """
    model = dict(content["model"])
    vocab = vocabulary(content)
    _check_merges(place, model)
    unknown = _unknown(content, vocab)
    if unknown is None and "unk_token" in model:
        model["unk_token"] = None
    added = content.get("added_tokens") or []
    taken = {
        token["content"]: token["id"]
        for token in added
        if token["content"] != unknown
        and token["content"] not in text_tokens
        and (token.get("special") or token["content"] in control or is_markup(token["content"]))
    }
    for token in control:
        if token in vocab and token != unknown:
            taken.setdefault(token, vocab[token])
    _check_ids(place, taken, vocab)
    names = aliases(taken)

    staying = [index for index, token in enumerate(added) if token["content"] not in names]
    kept = [
        {**token, "content": names[token["content"]]} if token["content"] in names else token
        for token in added[: staying[-1] + 1 if staying else 0]
    ]
    if names.keys() & vocab.keys():
        _rename(model, names)
    if "dropout" in model:
        model["dropout"] = None
    nothing = {"post_processor": None, "truncation": None, "padding": None}
    return {**content, "model": model, "added_tokens": kept, **nothing}, taken


def _unknown(content: Json, vocab: Mapping[str, int]) -> str | None:
    """Return the model's unknown token (`unk_token`), if it has one. The unknown token is not a control token, because
    text can produce it.
    """
    model = content["model"]
    if model.get("unk_id") is not None:
        return str(model["vocab"][model["unk_id"]][0])
    # Ignore `unk_token` if every byte has its own token, because some byte-level files set it to the end-of-text token.
    if "ByteLevel" in kinds(content.get("pre_tokenizer")) and byte_alphabet().keys() <= vocab.keys():
        return None
    unknown: str | None = model.get("unk_token")
    return unknown


def _check_ids(place: str, taken: Mapping[str, int], vocab: Mapping[str, int]) -> None:
    owners = {id: token for token, id in vocab.items()}
    for token, id in taken.items():
        owner = owners.setdefault(id, token)
        if owner != token or vocab.get(token, id) != id:
            what = f'added token "{one_line(token)}" is listed with id {id}, which differs from its id in the model'
            raise DataError(f"{place}: {what}; the file is damaged")


def _check_merges(place: str, model: Json) -> None:
    """Raise `DataError` if the second half of a merge lacks the continuing_subword_prefix, because the Rust tokenizers
    library would abort.
    """
    if not (prefix := model.get("continuing_subword_prefix")):
        return
    for _, right in pairs(model.get("merges") or []):
        if not right.startswith(prefix):
            what = f'a merge ends with "{one_line(right)}", without the continuing_subword_prefix "{one_line(prefix)}"'
            raise DataError(f"{place}: {what}; the file is damaged")


def pairs(merges: Sequence[Any]) -> list[Sequence[str]]:
    """Return each merge as a pair of tokens. A tokenizer.json stores a merge as a pair or as a string such as `t h`."""
    return [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in merges]


def _rename(model: Json, names: Mapping[str, str]) -> None:
    """Rename tokens in the vocabulary, and drop the merges that involve a renamed token."""
    vocab = model["vocab"]
    if not isinstance(vocab, dict):
        model["vocab"] = [[names.get(token, token), score] for token, score in vocab]
        return
    model["vocab"] = {names.get(token, token): id for token, id in vocab.items()}
    if "merges" in model:
        prefix = model.get("continuing_subword_prefix") or ""
        model["merges"] = [
            merge
            for merge, (left, right) in zip(model["merges"], pairs(model["merges"]), strict=True)
            if names.keys().isdisjoint((left, right, left + right.removeprefix(prefix)))
        ]
