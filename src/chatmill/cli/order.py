"""`chatmill order`: print the order of episodes in an epoch, or the position of one episode."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from chatmill.cli.options import AsJson, DatasetOrCaches, TokenDtype, counted, echo_json
from chatmill.config import LONGEST
from chatmill.load.config import LoadConfig
from chatmill.load.order import MODES
from chatmill.load.plan import LoadPlan
from chatmill.load.source import open_sources

DEFAULT = LoadConfig()


def order(
    dataset: DatasetOrCaches,
    seed: Annotated[int | None, typer.Option(help="Base seed (epoch_seed in a config).", show_default="1337")] = None,
    epoch: Annotated[
        int, typer.Option(min=0, help="Epoch, counted from 0. In a mix of sources, each source counts its own epochs.")
    ] = 0,
    first: Annotated[int, typer.Option(min=0, max=LONGEST, metavar="N", help="Print this many episodes.")] = 10,
    find: Annotated[
        int | None, typer.Option(metavar="EPISODE", help="Print only the position of this episode.")
    ] = None,
    mode: Annotated[
        str | None, typer.Option(help=f"Sampling mode: {', '.join(MODES)}.", show_default=DEFAULT.batch_sampling_mode)
    ] = None,
    split: Annotated[str, typer.Option(help="Split: train or val.")] = "train",
    config: Annotated[Path | None, typer.Option(help="Config of a run; flags override its values.")] = None,
    token_dtype: TokenDtype = None,
    as_json: AsJson = False,
) -> None:
    """Print the order in which an epoch visits its episodes, or the position of one episode.

    Recomputes the order from the seed and the epoch, without a training run. Episodes are numbered across all shards
    and, in a mix, across the sources sorted by name. Episodes shorter than episode_min_tokens (2) are skipped. With
    packing, episodes are packed in the printed order.

    \b
    Examples:
      chatmill order data/chat_sft --seed 42 --epoch 3
      chatmill order data/chat_sft --seed 42 --epoch 3 --find 173
      chatmill order data/chat_sft --config configs/sft1/150M.json --first 100 --json
    """
    chosen = {"epoch_seed": seed, "batch_sampling_mode": mode, "token_dtype": token_dtype}
    changes = {name: value for name, value in chosen.items() if value is not None}
    settings = LoadConfig.from_mapping(changes) if config is None else LoadConfig.of_run(config, **changes)
    # The order does not depend on the padding token, which the dataset may not record.
    sources, settings = open_sources(dataset, replace(settings, pad_token_id=0))
    plan = LoadPlan(sources, settings, split)
    position = None if find is None else plan.order.find(epoch, plan.ordinal(find))
    episodes = plan.first_episodes(epoch, first).tolist() if find is None else []
    if as_json:
        about = {"order": plan.order.name, "seed": settings.epoch_seed, "epoch": epoch, "split": split}
        counts = {"num_episodes": plan.num_eligible, "num_skipped": len(plan.skipped)}
        result = {"episodes": episodes} if find is None else {"episode": find, "position": position}
        echo_json({**about, **counts, **result})
        return
    skipped = f", {len(plan.skipped):,} skipped as too short" if len(plan.skipped) else ""
    typer.echo(
        f"{plan.order.name}, seed {settings.epoch_seed}, epoch {epoch}: "
        f"{counted(plan.num_eligible, 'episode')} in {split}{skipped}"
    )
    typer.echo(" ".join(map(str, episodes)) if find is None else f"episode {find} is at position {position}")
