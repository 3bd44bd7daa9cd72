"""Measures the peak memory of the torch tensors that an operation allocates."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Storages(TorchDispatchMode):
    """Tracks the bytes of live tensor storages that torch operations on this thread have allocated."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._given = {tensor.untyped_storage()._cdata for tensor in given}
        self._live: dict[int, weakref.ref[UntypedStorage]] = {}
        self.peak_bytes: int = 0

    def __torch_dispatch__(
        self,
        operation: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf.untyped_storage())
        return result

    def _note(self, storage: UntypedStorage) -> None:
        key = storage._cdata
        if key in self._given or key in self._live or not storage.nbytes():
            return
        self._live[key] = weakref.ref(storage)
        weakref.finalize(storage, self._live.pop, key, None)
        live = (each() for each in list(self._live.values()))
        self.peak_bytes = max(self.peak_bytes, sum(each.nbytes() for each in live if each is not None))


def peak_bytes(run: Callable[[], object], given: Sequence[Tensor]) -> int:
    """Returns the most bytes that tensors made by `run` take at once; storages of `given` tensors do not count.

    Messages and results count; working memory inside native kernels and the transport does not.
    """
    storages = _Storages(given)
    with storages:
        run()
    return storages.peak_bytes
