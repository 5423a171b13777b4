"""Activation offload: activation checkpointing that keeps the inputs of all blocks in host memory.

    forward    block 0 | block 1 | block 2            backward   block 2 | block 1 | block 0
    copies       in 0      in 1      in 2  to host    copies       in 1      in 0            to the GPU

Copies between GPU and host run on a separate CUDA stream and overlap with computation. The GPU holds at most two block
inputs at once: the input of the current block, and another input while it is being copied.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from chatmill.train.memory import check_memory


class ActivationOffload:
    """Activation checkpointing like `torch.utils.checkpoint`, but with the inputs in pinned host memory.

    Host buffers are reused, because pinning memory takes longer than a training step. All copies run on one stream, so
    a buffer is overwritten only after its previous content has been copied out.
    """

    def __init__(self, *, device_types: tuple[str, ...] = ("cuda",)) -> None:
        """Offload only inputs on devices of the types in `device_types`."""
        self._device_types = device_types
        self._streams: dict[torch.device, Any] = {}
        self._free: list[Tensor] = []
        self._newest: Callable[[], SavedInput | None] = lambda: None

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `function(*args, **kwargs)`, and recompute its activations in the backward pass."""
        # Move only tensors that require gradients; masks and rotary angles are shared by all blocks and stay on the
        # GPU.
        moved = [index for index, arg in enumerate(args) if isinstance(arg, Tensor) and arg.requires_grad]
        shared = [None if index in moved else arg for index, arg in enumerate(args)]

        def run(*inputs: Tensor) -> Any:
            given = list(shared)
            for index, tensor in zip(moved, inputs, strict=True):
                given[index] = tensor
            return function(*given, **kwargs)

        # `checkpoint` installs its own hooks while `run` executes, so `_pack` and `_unpack` see only the inputs that
        # `checkpoint` saves.
        with saved_tensors_hooks(self._pack, self._unpack):
            return checkpoint(run, *(args[index] for index in moved), use_reentrant=False)

    def _pack(self, tensor: Tensor) -> Tensor | SavedInput:
        # Skip the empty tensor that `checkpoint` also saves in torch before 2.13.
        if tensor.device.type not in self._device_types or not tensor.is_contiguous() or not tensor.numel():
            return tensor
        previous = self._newest()
        saved = SavedInput(tensor, self._buffer(tensor.nbytes, tensor.device), self._stream(tensor.device), self._free)
        saved.previous = self._newest
        self._newest = weakref.ref(saved)
        if previous is not None:
            previous.drop()
        return saved

    def _unpack(self, saved: Tensor | SavedInput) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        tensor = saved.take()
        if (previous := saved.previous()) is not None and not previous.taken:
            previous.fetch()
        return tensor

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.get_device_module(device).Stream()
        return self._streams[device]

    def _buffer(self, size: int, device: torch.device) -> Tensor:
        """Return a free buffer of at least `size` bytes. If all free buffers are too small, replace one of them."""
        fitting = [index for index, buffer in enumerate(self._free) if buffer.nbytes >= size]
        if fitting:
            return self._free.pop(min(fitting, key=lambda index: self._free[index].nbytes))
        if self._free:
            self._free.pop()
        check_memory(size, "activation_offload", what="a layer input in host memory")
        return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


class SavedInput:
    """A block input in a host buffer. The device also has a copy until `drop` is called, and between `fetch` and
    `take`.

    Device memory is allocated and freed on the compute stream. The compute stream waits until a copy is finished before
    it reads or frees the tensor, so memory is never reused while it is being copied.
    """

    previous: Callable[[], SavedInput | None]
    """Returns the input saved before this input, which the backward pass needs next, or None if it was freed."""

    def __init__(self, tensor: Tensor, buffer: Tensor, stream: Any, free: list[Tensor]) -> None:
        self._buffer, self._stream, self._free = buffer, stream, free
        self._host = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._device: Any = torch.get_device_module(tensor.device)
        self._where = tensor.device
        self._tensor: Tensor | None = tensor
        self.taken = False
        self._copied = self._copy(self._host, tensor)

    def fetch(self) -> None:
        """Start copying the input to the device, unless it is already there."""
        if self._tensor is None:
            self._tensor = torch.empty_like(self._host, device=self._where, pin_memory=False)
            self._copied = self._copy(self._tensor, self._host)

    def take(self) -> Tensor:
        """Return the input on the device; the compute stream waits for the copy."""
        self.fetch()
        tensor = self._tensor
        assert tensor is not None
        self.drop()
        self.taken = True
        return tensor

    def drop(self) -> None:
        """Free the device memory of the input once the current copy is done."""
        self._device.current_stream(self._where).wait_event(self._copied)
        self._tensor = None

    def _copy(self, target: Tensor, source: Tensor) -> Any:
        # Wait until the source is computed and the memory of the target is no longer in use.
        self._stream.wait_stream(self._device.current_stream(self._where))
        with self._device.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def __del__(self) -> None:
        if self._tensor is not None:
            self.drop()
        self._free.append(self._buffer)
