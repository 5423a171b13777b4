"""`chatmill diff`: show which conversations differ between two datasets, and why."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from chatmill.cli.options import AsJson, GivenPlace, TokenDtype, argument, dataset_place, echo_json, echo_line
from chatmill.errors import one_line
from chatmill.remote.urls import Place
from chatmill.store.diff import ConversationOrigin, Diff, diff_datasets

MEANING = {
    "added": "only in B",
    "removed": "only in A",
    "changed": "same content, different tokens",
    "mask": "same tokens, different loss mask",
    "moved": "in a different split",
}


def diff(
    one: Annotated[GivenPlace, argument("A", "First dataset.", dataset_place)],
    other: Annotated[GivenPlace, argument("B", "Second dataset.", dataset_place)],
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit with code 1 if a conversation differs, like git diff --exit-code.")
    ] = False,
    token_dtype: TokenDtype = None,
    as_json: AsJson = False,
) -> None:
    """Show which conversations differ between datasets A and B, and which build settings differ.

    Prints counts and the first few conversations that were added or removed, have different tokens or a different loss
    mask, or moved to another split. Conversations are matched by a hash of their content, so order, shards and packing
    do not matter. If a conversation occurs several times, each occurrence is matched separately. Uses about 40 bytes of
    memory per conversation. The exit code is 0 even if datasets differ, unless --exit-code is given.

    \b
    Examples:
      chatmill diff data/v1 data/v2
      chatmill diff data/v1 data/v2 --exit-code --json
    """
    result = diff_datasets(one, other, token_dtype=token_dtype)
    if as_json:
        matches = {"matched_by": "key" if result.by_key else "ids", "equal": result.equal}
        kinds = {name: asdict(kind) for name, kind in result.kinds.items()}
        causes = [asdict(cause) for cause in result.causes]
        echo_json({"same": result.same, "identical": result.identical, **matches, **kinds, "causes": causes})
    else:
        _print_diff(one, other, result)
    if exit_code and not result.same:
        raise typer.Exit(1)


def _print_diff(one: Place, other: Place, result: Diff) -> None:
    if result.identical:
        echo_line(f"{one} and {other} are the same dataset, byte for byte")
    elif result.same:
        echo_line(f"{one} and {other} have the same conversations; order, shards or packing may differ")
    if not result.by_key:
        typer.echo("conversations are matched by tokens, because one of the datasets has no content hashes")
    typer.echo(f"{result.equal:>9,} equal")
    for name, kind in result.kinds.items():
        if kind.count:
            more = ", …" if kind.count > len(kind.examples) else ""
            typer.echo(f"{kind.count:>9,} {name:<8} {MEANING[name]}: {', '.join(map(_place, kind.examples))}{more}")
    for cause in result.causes:
        echo_line(f"{cause.part}: {cause.what} {_value(cause.one)} -> {_value(cause.other)}")


def _place(place: ConversationOrigin) -> str:
    return f"{one_line(place.file, 200)}:{place.line}" if place.file is not None else f"of {place.split}"


def _value(value: Any) -> str:
    return f"{value[:12]}…" if isinstance(value, str) and len(value) == 64 else one_line(str(value))
