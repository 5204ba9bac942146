"""Parameters whose weights are elsewhere: touching one gathers it or says how to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class Owner(Protocol):
    """Know a partitioned parameter."""

    @property
    def name(self) -> str:
        """Return the parameter's name in the model."""

    def touch(self) -> bool:
        """Gather the parameter if the model is running; tell whether its weights are here now."""


OWNERS: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Which Owner a parameter belongs to. Here and not as an attribute of the user's tensors."""

# What can be asked of a parameter without its weights.
_METADATA = {
    "size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "storage_offset",
    "is_floating_point", "is_complex", "is_signed", "is_contiguous", "get_device", "type",
    "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "__hash__", "__len__",
    "__reduce_ex__",
}  # fmt: skip
_ATTRIBUTES = {
    getattr(torch.Tensor, name).__get__
    for name in (
        "shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad", "is_leaf", "grad_fn",
        "names", "is_cpu", "is_cuda", "is_meta", "is_mps", "is_xla", "is_sparse", "is_quantized",
        "is_nested", "is_mkldnn", "_version", "_backward_hooks", "_base", "output_nr", "itemsize",
        "nbytes", "is_sparse_csr", "is_vulkan", "is_ipu", "is_xpu", "is_maia", "is_mtia",
        "_post_accumulate_grad_hooks", "retains_grad", "name",
    )
    if hasattr(torch.Tensor, name)
}  # fmt: skip
_SETTERS = {
    getattr(getattr(torch.Tensor, name), method)
    for name, method in (("grad", "__set__"), ("grad", "__delete__"), ("requires_grad", "__set__"))
}


class ReleasedParameter(nn.Parameter):
    """Stand for a parameter whose weights are released; its class is swapped back at the gather."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Pass what needs no weights; gather inside the model's run; else raise with the cure."""
        kwargs = kwargs or {}
        if func in _ATTRIBUTES or func in _SETTERS or func.__name__ in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        released = [leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is cls]
        for parameter in released:
            owner: Owner = OWNERS[parameter]
            if not owner.touch():
                raise RuntimeError(
                    f"parameter {owner.name!r} of shape {tuple(parameter.shape)} is "
                    f"partitioned over the ranks and released; {func.__name__} needs its values: "
                    "wrap the access in `with hpczero.GatheredParameters([parameter]):` on all "
                    "ranks, or use engine.full_state_dict()"
                )
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        """Describe the parameter without its weights."""
        return f"ReleasedParameter(shape={tuple(self.shape)}, dtype={self.dtype})"
