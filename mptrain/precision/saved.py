"""What emulated operations keep for the backward pass: the stored 16-bit tensor, not its FP32 image."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor


class Sources:
    """Which tensor every image was made of, while one operation runs."""

    def __init__(self, image: Callable[[Tensor], Tensor]):
        self._image = image
        self._of: dict[int, tuple[Tensor, Tensor]] = {}
        # Hooks are forbidden within torch.func's transforms; there the images themselves are kept.
        self._enabled = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]

    def add(self, stored: Tensor, image: Tensor) -> Tensor:
        """Notes that `image` is `self.image(stored)`; returns it."""
        if self._enabled and image.layout == torch.strided:
            self._of[image.untyped_storage()._cdata] = (stored, image)
        return image

    def clear(self) -> None:
        """Lets the images go; the hooks live on in the graph."""
        self._of.clear()

    def needed(self) -> bool:
        """Whether anything will be saved that hooks may see."""
        return torch.is_grad_enabled() and any(image.requires_grad for _, image in self._of.values())

    def saved(self) -> AbstractContextManager:
        """Keeps the stored tensor wherever autograd saves its image, or a view of it, and makes the image again when
        backward needs it.

        Hooks that were there before (gradient checkpointing, save_on_cpu) get the stored tensor to deal with. torch's
        check that nobody changed a saved tensor in place does not reach through hooks, so it is made here.
        """
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)

        def pack(saved: Tensor):
            place = None
            if saved.layout == torch.strided:
                source = self._of.get(saved.untyped_storage()._cdata)
                if source is not None and saved.dtype == source[1].dtype:
                    place = saved.size(), saved.stride(), saved.storage_offset()
                    saved = source[0].detach()
            if outer is not None:
                return outer[0](saved), place, None
            return saved, place, saved._version

        def unpack(packed) -> Tensor:
            kept, place, version = packed
            saved = kept if outer is None else outer[1](kept)
            if version is not None and saved._version != version:
                raise RuntimeError(
                    "a tensor needed for backward was changed in place after the operation that used it "
                    f"(shape {tuple(saved.shape)}, version {saved._version}, expected {version})"
                )
            return saved if place is None else self._image(saved).as_strided(*place)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
