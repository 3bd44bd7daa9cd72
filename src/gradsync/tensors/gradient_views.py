"""`GradientViews`: the views of bucket memory in which parameters' gradients live, so that nothing is copied.

A gradient is recognised by its address and strides, never by the tensor object: users replace `p.grad`, assign to
`p.grad.data` or move the model, and objects say nothing of that. Memory that user code refers to is never written to
unexpectedly: a bucket whose old gradients are still held takes fresh memory, and a gradient in memory of the user's
stays there, the synchronised one being copied into it. So references see what they see with plain DDP.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .gradients import FlatGradients, Gradients

MOST_LENT_BYTES = 64 << 10  # below, autograd adds into zeroed memory, which saves a call; above, a copy moves less


class GradientView:
    """The view of bucket memory in which one parameter's gradient may live, so that it need not be copied there."""

    __slots__ = ("_address", "_strides", "memory", "name", "parameter", "tensor")

    tensor: Tensor  # the bucket's own; `parameter.grad` gets aliases, as users may assign to a gradient's data
    _address: int
    _strides: tuple[int, ...]

    def __init__(self, name: str, parameter: nn.Parameter, memory: FlatGradients, tensor: Tensor) -> None:
        self.name, self.parameter, self.memory = name, parameter, memory
        self.move_to(tensor)

    def move_to(self, tensor: Tensor) -> None:
        """Makes `tensor`, of the parameter's shape and dtype, the view; copies nothing, and keeps `param.grad`."""
        self.tensor, self._address, self._strides = tensor, tensor.data_ptr(), tensor.stride()

    def holds(self, gradient: Tensor) -> bool:
        """Returns whether a gradient, of the parameter's shape and dtype, is this view: same address and strides."""
        is_dense = gradient.layout is torch.strided
        return is_dense and gradient.data_ptr() == self._address and gradient.stride() == self._strides

    def holds_gradient(self) -> bool:
        """Returns whether the parameter has a gradient and this gradient lies in the view."""
        gradient = self.parameter.grad
        return gradient is not None and self.holds(gradient)

    def fits(self) -> bool:
        """Returns whether the view has the strides that autograd gives the parameter's gradients.

        The strides differ after the model has been converted to another memory format.
        """
        parameter, strides = self.parameter, self._strides
        return parameter.stride() == strides or torch.empty_like(parameter, device="meta").stride() == strides

    def give(self) -> None:
        """Sets `param.grad` to the view, so that the gradient lives in the bucket's memory."""
        self.parameter.grad = self.tensor.detach()


class GradientViews:
    """The views of a plan's buckets (windows into their memory) in which parameters' gradients can live without a copy.

    It knows which gradients live there, and when memory that other code refers to must not be overwritten.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, GradientView] = {}
        self._by_bucket: list[list[GradientView]] = []
        self._lendable: set[str] = set()  # parameters whose gradients autograd makes dense and small
        self._borrowed: set[str] = set()  # parameters without a gradient that borrow their place in this step
        self._unrenewed: dict[str, Tensor] = {}  # values of gradients that stay if no rank renews them in this step
        # Parameters with gradients in memory of the plan before that nothing else refers to.
        self._movable: set[str] = set()
        self._unfit: set[str] = set()  # parameters that went over to another memory format than their places have

    def __len__(self) -> int:
        return len(self._by_name)

    def get(self, name: str) -> GradientView | None:
        """Returns the view in which the parameter's gradient may live, or None.

        None if the plan cuts the parameter, sends its elements in another order than they have in memory, or exchanges
        it as a row-sparse table.
        """
        return self._by_name.get(name)

    def move_out(self) -> None:
        """Drops the views of a plan that is to be replaced.

        The gradients that live in its memory, and that nothing but the parameter refers to, are remembered for
        `may_move`.
        """
        self._movable = {
            view.name
            for views in self._by_bucket
            if views and views[0].memory.references <= sum(view.holds_gradient() for view in views)
            for view in views
            if view.holds_gradient() and not _is_held(view.parameter)
        }
        self._by_name, self._by_bucket = {}, []

    def move_in(self, memories: Iterable[Gradients], parameters: Mapping[str, nn.Parameter]) -> None:
        """Makes a view for each whole parameter in the flat buckets of a new plan.

        Args:
            memories: the memory of each bucket, in the plan's order.
            parameters: the model's parameters by name.
        """
        for memory in memories:
            views: list[GradientView] = []
            if isinstance(memory, FlatGradients):
                for name in dict.fromkeys(memory.bucket.names):
                    tensor = memory.view(name)
                    if tensor is not None:
                        views.append(GradientView(name, parameters[name], memory, tensor))
            self._by_bucket.append(views)
            self._by_name |= {view.name: view for view in views}
        self.refit()

    def refit(self) -> None:
        """Marks the views whose strides no longer fit their parameter, as after a change of memory format.

        `begin` and `settle` leave marked views out.
        """
        self._unfit = {name for name, view in self._by_name.items() if not view.fits()}

    def begin(self) -> Iterator[list[str]]:
        """Begins a training step: where a small parameter has no gradient, sets `param.grad` to its zeroed view.

        Yields, bucket by bucket, the names of these and of other small parameters, whose gradients live in their views
        already. Gradients of more than 64 KiB are cheaper to copy into their views later.
        """
        self._borrowed.clear()
        self._unrenewed.clear()
        for views in self._by_bucket:
            yield self._lend(views) if views else []

    def may_move(self, name: str) -> bool:
        """Returns whether the gradient still lies in the memory of the plan before, and nothing else refers to it.

        Such a gradient may be moved into its view in the new plan's memory.
        """
        return name in self._movable

    def keep_values(self, name: str) -> None:
        """Saves the values of a gradient that lives in its view, and that the exchange of this step will overwrite.

        `restore` writes them back if no rank turns out to have used the parameter.
        """
        view = self._by_name.get(name)
        if view is not None and name not in self._borrowed and view.holds_gradient():
            self._unrenewed[name] = view.tensor.clone()

    def restore(self, name: str) -> None:
        """Sets the gradient of a parameter that no rank used back to None, or to its values before this step."""
        view = self._by_name.get(name)
        if name in self._borrowed and view is not None:
            view.parameter.grad = None
        elif name in self._unrenewed and view is not None:
            view.tensor.copy_(self._unrenewed[name])

    def is_empty_loan(self, name: str) -> bool:
        """Returns whether the gradient is a place that this step lent to the parameter, and still has zeros alone.

        The host waits for the device.
        """
        view = self._by_name.get(name)
        if view is None or name not in self._borrowed or not view.holds_gradient():
            return False
        return not bool(view.tensor.any())

    def settle(self, view: GradientView, produced: Tensor | None) -> None:
        """Sets `param.grad` to its bucket view, which has its values already, unless other code holds the old tensor.

        Call it after the values of `param.grad` were copied into the view. The caller must not refer to the gradient
        itself.

        Args:
            view: the parameter's view.
            produced: the tensor that autograd just accumulated, with the parameter's shape and dtype; None: unknown.
        """
        if view.tensor.nbytes <= MOST_LENT_BYTES:
            self._lendable.add(view.name)
        gradient = view.parameter.grad
        if gradient is not None and gradient.requires_grad:  # create_graph=True: as with DDP, values alone are averaged
            view.give()
            return
        del gradient
        if view.name not in self._unfit and (view.name in self._movable or _is_unshared(view.parameter, produced)):
            view.give()

    def deliver(self, view: GradientView) -> None:
        """Copies the synchronised values from the view into `param.grad`, unless that is the view itself.

        A gradient that is missing, sparse or part of an autograd graph is replaced by the view.
        """
        gradient = view.parameter.grad
        if gradient is None or gradient.requires_grad or gradient.layout is not torch.strided:
            view.give()
        elif not view.holds(gradient):
            gradient.copy_(view.tensor)

    def hold_all(self, names: Iterable[str] | None = None) -> bool:
        """Returns whether the gradients of these parameters (None: of all with a view) lie in their views.

        The check is quick, and returns False where it cannot tell.
        """
        return _all_hold(self._by_name.values() if names is None else [self._by_name[name] for name in names])

    def end(self) -> None:
        """Ends a training step: forgets which gradients lie in the previous plan's memory, for `may_move`."""
        self._movable.clear()

    def _lend(self, views: Sequence[GradientView]) -> list[str]:
        memory = views[0].memory
        free = [view for view in views if view.parameter.grad is None]
        lived_in = [view for view in views if view.parameter.grad is not None] if len(free) < len(views) else []
        if lived_in and not _all_hold(lived_in):
            lived_in = [view for view in lived_in if view.holds_gradient()]
        if len(lived_in) < len(views) and memory.references > len(lived_in):
            memory.renew()
            lived_in = []
            for view in views:
                tensor = memory.view(view.name)
                assert tensor is not None
                view.move_to(tensor)
        lendable = self._lendable - self._unfit
        if not lendable:
            return []
        borrowed = [view for view in free if view.name in lendable and view.parameter.requires_grad]
        stayed = [view.name for view in lived_in if view.name in lendable and view.parameter.requires_grad]
        if len(borrowed) == len(memory.bucket.segments):
            memory.clear()
        elif borrowed:
            torch._foreach_zero_([view.tensor for view in borrowed])
        for view in borrowed:
            view.parameter.grad = view.tensor.detach()
        names = [view.name for view in borrowed]
        self._borrowed.update(names)
        return names + stayed


def _all_hold(views: Iterable[GradientView]) -> bool:
    """Returns whether all parameters' gradients are their views, quickly: same storage, offset and strides.

    Where a storage of other code's has the same memory, it returns False, and `GradientView.holds` True.
    """
    gradients: Any = [view.parameter.grad for view in views]
    try:
        return all(map(Tensor.is_set_to, gradients, [view.tensor for view in views]))
    except (TypeError, RuntimeError):  # no gradient, or a sparse one
        return False


def _object_references(parameter: nn.Parameter) -> int:
    """Returns the number of references to the object that is the parameter's gradient, from Python and from C++."""
    gradient: Any = parameter.grad
    return sys.getrefcount(gradient) + int(gradient._use_count())


def _memory_references(tensor: Tensor) -> int:
    """Returns the use count of the tensor's storage, in which each tensor on it counts, and each storage object."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def _fewest_references() -> tuple[int, int]:
    """Returns the object and memory references of a gradient that only its parameter refers to.

    They are measured, as versions of torch count differently.
    """
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    return _object_references(parameter), _memory_references(parameter.grad)


_FEWEST_OBJECT_REFERENCES, _FEWEST_MEMORY_REFERENCES = _fewest_references()


def _is_held(parameter: nn.Parameter) -> bool:
    """Returns whether anything but the parameter refers to the tensor object that is its gradient."""
    return _object_references(parameter) > _FEWEST_OBJECT_REFERENCES


def _is_unshared(parameter: nn.Parameter, produced: Tensor | None) -> bool:
    """Returns whether nothing but the parameter refers to its gradient or to that gradient's memory.

    `produced`: the tensor that autograd handed to the accumulation, which may be in the same memory.
    """
    gradient: Any = parameter.grad
    known = _FEWEST_MEMORY_REFERENCES
    if produced is not None and torch._C._is_alias_of(produced, gradient):  # type: ignore[attr-defined]  # private
        known += 2 if produced._is_view() else 1  # a view and its base
    if torch._C._storage_Use_Count(gradient.untyped_storage()._cdata) > known:
        return False
    return sys.getrefcount(gradient) + int(gradient._use_count()) <= _FEWEST_OBJECT_REFERENCES
