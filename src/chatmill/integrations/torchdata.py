"""Read batches of a dataset with torchdata's `StatefulDataLoader`.

    loader = stateful_loader("chat_sft", config, epochs=3, num_workers=2)
    for batch in loader: …
    state = loader.state_dict()

Each rank reads its own rows of each batch. The saved position does not count batches that are prefetched but not yet
returned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader

from chatmill.errors import UsageError
from chatmill.integrations.columns import causal_lm_columns
from chatmill.integrations.train_rows import rank_and_world_size
from chatmill.load.config import LoadConfig
from chatmill.load.loader import EpisodeLoader, Listener
from chatmill.remote.urls import Place

BATCHING = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "collate_fn"}
"""Options of `StatefulDataLoader` that would change the rows of a batch."""


def stateful_loader(
    dataset_dir: str | Place,
    config: LoadConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    epochs: int | None = None,
    num_workers: int = 0,
    hf_columns: bool = False,
    ranks: tuple[int, int] | None = None,
    listener: Listener | None = None,
    **options: Any,
) -> StatefulBatches:
    """Return a loader for the batches of one rank; without `epochs`, it never ends.

    Batches are `Batch` objects; with `hf_columns`, they are dicts of Hugging Face columns. `ranks` is a pair (rank,
    world size), by default the values of torch.distributed or torchrun. Pass `ranks` if several processes must read the
    same rows, for example with tensor parallelism. `listener` can be an `Audit`, which writes an audit log. `options`
    are passed to `StatefulDataLoader`, but options that shuffle, sample or batch rows are rejected.

    >>> from chatmill.integrations.torchdata import stateful_loader
    >>> job = chatmill.Job(sources=(chatmill.InputSource(("data/conversations.jsonl",)),))
    >>> _ = chatmill.prepare_dataset(job, Path("chat_sft"))
    >>> loader = stateful_loader("chat_sft", {"batch_size": 4, "block_size": 64, "use_loss_mask": True}, epochs=1)
    >>> tuple(next(iter(loader)).x.shape)
    (4, 64)
    """
    if listener is not None and num_workers:
        raise UsageError(
            f"num_workers is {num_workers}; expected 0, because a listener must run in the training process"
        )
    if batching := sorted(BATCHING & options.keys()):
        raise UsageError(f"{', '.join(batching)}: not supported, because chatmill batches the rows; remove the option")
    rank, world_size = ranks or rank_and_world_size()
    episodes = EpisodeLoader(dataset_dir, config, rank=rank, world_size=world_size, epochs=epochs, listener=listener)
    if hf_columns:
        options["collate_fn"] = partial(causal_lm_columns, pad_token_id=episodes.plan(episodes.split).pad_token_id)
    return StatefulBatches(episodes, batch_size=None, num_workers=num_workers, **options)


class StatefulBatches(StatefulDataLoader[Any]):
    """A `StatefulDataLoader` in which a second loop continues where the first loop stopped."""

    _begun = False
    _ended = False
    """Whether the loaded state belongs to a finished run."""

    def __iter__(self) -> Iterator[Any]:
        if self._begun:
            self.load_state_dict(self.state_dict())
            if self._ended:
                raise UsageError(
                    "all epochs have been read; loop only once, and pass the total number of epochs to stateful_loader"
                )
        self._begun = True
        return iter(()) if self._ended else super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        """Return the current position in the data, which is the same on all ranks."""
        return {"num_workers": self.num_workers, "state": super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a saved position; the number of ranks may differ, but not the number of workers."""
        try:
            workers, state = state_dict["num_workers"], state_dict["state"]
            ended = state["_iterator_finished"]
        except (KeyError, TypeError):
            raise UsageError("the state is not from a stateful_loader; expected the result of its state_dict") from None
        if workers != self.num_workers:
            raise UsageError(f"the state was saved with num_workers {workers}, but this loader has {self.num_workers}")
        super().load_state_dict(state)
        self._begun, self._ended = False, ended
