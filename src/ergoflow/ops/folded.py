"""What is made of weights alone is made once: casts, sums, products and rows of weights, a hundred launches of `a3m`.

A step that is recorded and replayed a thousand times would make them anew at every replay.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Folded(TorchDispatchMode):
    """Within the block operations on `weights`, and on what came of them, are run once and their results kept.

    Nobody may write to the weights any more; writing to a kept result raises. A recording begun in the block reads the
    kept results, so whoever replays it must hold on to this object.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self._kept: list[Tensor] = []
        # A tensor has a name by what it was made of: equal names, equal numbers.
        self._names: dict[int, Hashable] = {}
        self._results: dict[Hashable, Any] = {}
        for number, weight in enumerate(weights):
            self._name(weight, number)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            if any(id(tensor) in self._names for tensor in _written(func, args, kwargs)):
                raise RuntimeError(f"what is made of weights must not be written to, got {func}; copy it first")
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(id(tensor) not in self._names for tensor in tensors) or not _is_function(func, tensors):
            return func(*args, **kwargs)
        name = (func, self._spelled(args), self._spelled(sorted(kwargs.items())))
        if name in self._results:
            return self._results[name]
        result = func(*args, **kwargs)
        made = tree_leaves(result)
        # A view costs nothing, and torch asks for a new one each time.
        if not {_place(leaf) for leaf in made} & {_place(tensor) for tensor in tensors}:
            self._results[name] = result
        for number, leaf in enumerate(made):
            self._name(leaf, (name, number))
        return result

    def _spelled(self, value: Any) -> Hashable:
        """Return an argument as a part of a name; 1, 1.0 and True are different ones."""
        if isinstance(value, Tensor):
            return self._names[id(value)]
        if isinstance(value, list | tuple):
            return tuple(self._spelled(part) for part in value)
        return type(value), value

    def _name(self, tensor: Tensor, name: Hashable) -> None:
        # Kept, so that no other tensor can have its address.
        self._kept.append(tensor)
        self._names[id(tensor)] = name


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_function(func: Any, tensors: list[Tensor]) -> bool:
    """Whether the result is determined by the arguments, and not memory to be filled or a copy to be written to."""
    name = func.overloadpacket.__name__
    if not tensors:
        return name in ("arange", "linspace")
    fresh = name in ("clone", "lift_fresh") or name.startswith(("new_", "empty")) or name.endswith("_like")
    return not fresh and torch.Tag.nondeterministic_seeded not in func.tags


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a mutable operation writes to."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    targets = [
        given.get(argument.name)
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [leaf for leaf in tree_leaves(targets) if isinstance(leaf, Tensor)]
