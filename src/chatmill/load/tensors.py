"""Convert batches to torch tensors, optionally in pinned memory or on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from chatmill.load.batch import Batch, split_batches


class Tensors:
    """Converts batches of numpy arrays to tensors. If the device is a GPU, tensors are pinned and copied on a separate
    CUDA stream.

    A call returns the converted batches and, for a GPU, a function that the loader calls before it returns a batch. The
    function makes the current stream wait for the copy, and keeps the memory allocated until that stream has finished.
    """

    def __init__(self, device: Any = None, *, pin_memory: bool = False) -> None:
        self.device = None if device is None else torch.device(device)
        self._to_gpu = self.device is not None and self.device.type == "cuda"
        self._pin = pin_memory or self._to_gpu
        self._stream: Any = None

    def __call__(self, batch: Batch, widths: Sequence[int]) -> tuple[list[Batch], Callable[[], None] | None]:
        if self.device is None and not self._pin:
            # Splitting arrays is faster than splitting tensors.
            return [each.each(torch.from_numpy) for each in split_batches(batch, widths)], None
        tensors = batch.each(torch.from_numpy)
        if self._pin:
            tensors = tensors.each(lambda tensor: tensor.pin_memory())
        if not self._to_gpu:
            return split_batches(tensors.each(lambda tensor: tensor.to(self.device)), widths), None
        with torch.cuda.device(self.device):
            if self._stream is None:
                self._stream = torch.cuda.Stream()
            with torch.cuda.stream(self._stream):
                moved = tensors.each(lambda tensor: tensor.to(self.device, non_blocking=True))
                copied = self._stream.record_event()

        def on_return() -> None:
            computing = torch.cuda.current_stream(self.device)
            computing.wait_event(copied)
            for tensor in moved:
                tensor.record_stream(computing)

        return split_batches(moved, widths), on_return

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling, without the CUDA stream of this process."""
        return {**vars(self), "_stream": None}
