"""A torchtitan dataloader for chatmill datasets.

    config.dataloader = EpisodeDataLoader.Config(dataset_path="chat_sft", load={"batch_size": 8, "use_loss_mask": True})

    x, y, positions of a batch  ->  ({"input": x, "positions": positions}, y)

Positions restart at 0 in each conversation, so that flex and varlen attention can separate packed conversations.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torchtitan.components.dataloader import BaseDataLoader

from chatmill.audit import Audit
from chatmill.errors import DataError, UsageError
from chatmill.load.batch import Batch
from chatmill.load.config import LoadConfig
from chatmill.load.loader import EpisodeLoader
from chatmill.load.source import DataSource

TitanBatch = tuple[dict[str, Tensor], Tensor]
"""A dict of model inputs, and the labels."""


@dataclass(kw_only=True, slots=True)
class EpisodeDataLoaderConfig(BaseDataLoader.Config):
    """Settings of `EpisodeDataLoader`; `dataset_path` is the folder or URL of the dataset."""

    load: dict[str, Any] = field(default_factory=dict)
    """The loader config; `block_size` must equal `seq_len`, and `batch_size` must equal `global_batch_size`."""
    split: str = "train"
    epochs: int | None = None
    """Number of epochs; None repeats the data indefinitely."""
    infinite: bool = True
    """Whether to repeat the data. If false, each row of the split is read once, in stored order, as for validation."""
    audit_dir: str | None = None
    """Folder for the audit log; None disables the audit log."""
    audit_steps: int = 100
    """Maximum number of steps that one digest in the audit log covers."""


class EpisodeDataLoader(BaseDataLoader):
    """A torchtitan dataloader that returns the batches of an `EpisodeLoader` for one data parallel rank.

    A saved dataloader state can be loaded with a different number of ranks. If torchtitan takes an optimizer step after
    more or fewer rows than `batch_size`, the run stops with an error.
    """

    Config = EpisodeDataLoaderConfig

    def __init__(
        self,
        config: EpisodeDataLoaderConfig,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **_: Any,
    ) -> None:
        """Create the dataloader with the arguments that torchtitan passes; `tokenizer` and `snapshot_every_n_steps` are
        ignored.
        """
        if not config.dataset_path:
            raise UsageError("dataloader.dataset_path is missing; expected the folder of a dataset")
        load = LoadConfig.from_mapping(config.load)
        self._batches = _batches_of_a_step(load, dp_world_size, seq_len, local_batch_size)
        self._config = config
        self._loader = EpisodeLoader(
            config.dataset_path,
            load,
            split=config.split,
            rank=dp_rank,
            world_size=dp_world_size,
            epochs=config.epochs,
        )
        if load.use_loss_mask:
            for source in self._loader.sources:
                _check_weights(source, config.split)
        self._state = self._loader.state_dict()
        """Position in the data after the last complete step."""
        self._audit: Audit | None = None
        self._audit_state: Mapping[str, Any] | None = None
        self._is_audited = False

    def __iter__(self) -> Iterator[TitanBatch]:
        if self._config.infinite and self._config.split == "train":
            return self._train_batches()
        loader, config = self._loader, self._config
        batches = loader if config.infinite else loader.one_pass(config.split)
        return (_inputs_and_labels(part) for batch in batches for part in batch.split(self._batches))

    def _train_batches(self) -> Iterator[TitanBatch]:
        """Yield batches from the current position on; raise `UsageError` if torchtitan does not take an optimizer step
        after every `self._batches` batches.
        """
        self._open_audit()
        steps = 0

        def count(*_: Any) -> None:
            nonlocal steps
            steps += 1

        hook = register_optimizer_step_post_hook(count)
        try:
            for batch in self._loader:
                for number, part in enumerate(batch.split(self._batches), start=1):
                    if number == self._batches:
                        self._state = self._loader.state_dict()
                    steps = 0
                    yield _inputs_and_labels(part)
                    if bool(steps) != (number == self._batches):
                        raise UsageError(
                            f"torchtitan took {'a' if steps else 'no'} step after {number} batches on each rank, but "
                            f"a step of batch_size {self._loader.config.batch_size} has {self._batches}; set "
                            f"training.global_batch_size to {self._loader.config.batch_size}"
                        )
        finally:
            hook.remove()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a dict with one JSON string, because torchtitan restores only keys that are also in the
        state of a new dataloader.
        """
        state = dict(self._state)
        if self._is_audited:
            audits = [None if self._audit is None else self._audit.checkpoint()]
            if dist.is_initialized():
                dist.broadcast_object_list(audits)
            state["audit"] = audits[0]
        return {"chatmill": json.dumps(state)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        # torchtitan passes an empty dict if the dataloader state is excluded from loading.
        if not state_dict:
            return
        if "chatmill" not in state_dict:
            raise UsageError(
                "the checkpoint is from a run with another dataloader; use that dataloader, or do not load its state"
            )
        state = json.loads(state_dict["chatmill"])
        self._loader.load_state_dict(state)
        self._state, self._audit_state = self._loader.state_dict(), state.get("audit")

    def close(self) -> None:
        """Close the audit log and stop the prefetching threads. All ranks must call `close`."""
        if self._audit is not None:
            self._audit.close()
        self._audit, self._is_audited = None, False
        self._loader.close()

    # Audit log.

    def _open_audit(self) -> None:
        """Start an audit log, or continue the audit log of the checkpoint.

        If several ranks read the same rows, as with tensor parallelism, only rank 0 writes a log, which covers only its
        own rows.
        """
        config, world_size = self._config, dist.get_world_size() if dist.is_initialized() else 1
        if config.audit_dir is None:
            return
        self._is_audited = True
        is_data_parallel = self._loader.world_size == world_size
        if is_data_parallel or dist.get_rank() == 0:
            reduce = _sum_over_ranks if is_data_parallel and world_size > 1 else None
            state = self._audit_state
            self._audit = Audit(config.audit_dir, every=config.audit_steps, state=state, reduce=reduce)
            self._loader.listen(self._audit)


def _batches_of_a_step(load: LoadConfig, dp_world_size: int, seq_len: int, local_batch_size: int) -> int:
    """Return the number of batches per optimizer step on each rank; raise `UsageError` if the batch sizes are
    inconsistent.
    """
    size, per_rank = load.block_size, load.batch_size // dp_world_size
    if size != seq_len:
        raise UsageError(f"block_size is {size}, but training.seq_len is {seq_len}; set training.seq_len to {size}")
    if load.batch_size % dp_world_size:
        raise UsageError(
            f"batch_size is {load.batch_size} on {dp_world_size} ranks; expected a multiple of {dp_world_size}"
        )
    batches, remainder = divmod(per_rank, local_batch_size)
    if remainder or not batches:
        raise UsageError(
            f"batch_size is {load.batch_size}, but local_batch_size is {local_batch_size} on {dp_world_size} ranks; "
            f"set training.local_batch_size to {per_rank} or one of its divisors, and training.global_batch_size to "
            f"{load.batch_size}"
        )
    if load.gradient_accumulation_steps not in (1, batches):
        raise UsageError(
            f"gradient_accumulation_steps is {load.gradient_accumulation_steps}, but batch_size {load.batch_size} "
            f"takes {batches} batches of {local_batch_size} rows on {dp_world_size} ranks; remove the key"
        )
    return batches


def _check_weights(source: DataSource, split: str) -> None:
    if split not in source or not isinstance(source.path, Path):
        return
    _refuse_fractions(source.weights(split), f"{source.path}: ")


def _inputs_and_labels(batch: Batch) -> TitanBatch:
    _refuse_fractions(batch.weights.unique().numpy())
    return {"input": batch.x, "positions": batch.positions.long()}, batch.y


def _refuse_fractions(weights: NDArray[Any], place: str = "") -> None:
    others = weights[(weights != 0) & (weights != 1)]
    if len(others):
        raise DataError(
            f"{place}a trained token has the weight {others[0]:g}, but torchtitan's loss does not support weights; "
            "use chatmill train, or reweigh the dataset so that all weights are 0 or 1"
        )


def _sum_over_ranks(values: NDArray[np.int64]) -> NDArray[np.int64]:
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    total = torch.from_numpy(values.copy()).to(device)
    dist.all_reduce(total)
    return total.cpu().numpy()
