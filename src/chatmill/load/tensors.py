"""Batches as tensors: as they are, in pinned memory, or on a device, moved there before they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from chatmill.load.batch import Batch


class Tensors:
    """Turns arrays into tensors. For a GPU they are pinned and copied on a stream of their own.

    What is called when a batch is handed out makes the stream that computes wait for the copy, and keeps the memory
    from being reused before that stream is done with it.
    """

    def __init__(self, device: Any = None, *, pin_memory: bool = False) -> None:
        self.device = None if device is None else torch.device(device)
        self._to_gpu = self.device is not None and self.device.type == "cuda"
        self._pin = pin_memory or self._to_gpu
        self._stream: Any = None

    def __call__(self, batch: Batch) -> tuple[Batch, Callable[[], None] | None]:
        made = batch.each(torch.from_numpy)
        if self._pin:
            made = made.each(lambda tensor: tensor.pin_memory())
        if self.device is None:
            return made, None
        if not self._to_gpu:
            return made.each(lambda tensor: tensor.to(self.device)), None
        with torch.cuda.device(self.device):
            if self._stream is None:
                self._stream = torch.cuda.Stream()
            with torch.cuda.stream(self._stream):
                moved = made.each(lambda tensor: tensor.to(self.device, non_blocking=True))
                copied = self._stream.record_event()

        def ready() -> None:
            computing = torch.cuda.current_stream(self.device)
            computing.wait_event(copied)
            for tensor in moved:
                tensor.record_stream(computing)

        return moved, ready

    def __getstate__(self) -> dict[str, Any]:
        """What travels to another process: a stream stays in the one that made it."""
        return {**vars(self), "_stream": None}
