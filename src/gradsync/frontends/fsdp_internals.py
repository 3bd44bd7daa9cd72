"""Private parts of torch's `fully_shard` and `replicate` that gradsync reads or replaces, all of them in this module.

torch may change them in any release. `TESTED_TORCH` lists the releases on which the tests ran. Before a user's model is
touched, `fsdp_probe.py` trains a small one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

TESTED_TORCH = ("2.11", "2.13")  # the releases of torch that gradsync's tests ran with


def is_root_in_shards(model: nn.Module) -> bool:
    """Whether `fully_shard` or `replicate` was applied to the model itself; looks at names, to avoid the import."""
    return any(c.__name__ == "FSDPModule" for c in type(model).__mro__)


def root_in_shards(model: nn.Module) -> nn.Module | None:
    """Returns the module with all parameters and buffers of the model that `fully_shard` or `replicate` was applied to.

    It is the model itself, or inside of it where the model is a wrapper, such as Fabric's. None: there is none.
    """
    if is_root_in_shards(model):
        return model
    root = next(filter(is_root_in_shards, model.modules()), None)
    if root is None or {*model.parameters(), *model.buffers()} - {*root.parameters(), *root.buffers()}:
        return None
    return root


def is_tested_torch() -> bool:
    """Whether this release of torch is one that the tests ran on."""
    return any(torch.__version__.startswith(f"{release}.") for release in TESTED_TORCH)


@dataclass(frozen=True)
class Mesh:
    """The mesh of one FSDP module, as far as gradients go.

    Attributes:
        ranks: all ranks of the mesh by their coordinates, as text.
        shard: this rank's shard coordinate.
        shards: the number of shards.
        shard_group: the ranks of one replica; None: no shards, as of `replicate`.
        replicate_group: the ranks with the same shard, between which torch averages; None: the mesh has one replica.
    """

    ranks: str
    shard: int
    shards: int
    shard_group: dist.ProcessGroup | None
    replicate_group: dist.ProcessGroup | None


class ShardedParameter:
    """One parameter in shards (torch's `FSDPParam`), held weakly, as it refers to the model."""

    def __init__(self, parameter: Any) -> None:
        self._parameter = weakref.ref(parameter)

    @property
    def parameter(self) -> Any:
        """The DTensor parameter, whose `.grad` optimisers read; torch may replace it (`FSDPParam.sharded_param`)."""
        return self._param.sharded_param

    @property
    def forms(self) -> list[Any]:
        """All that a module may have as this parameter: the shard, the whole, and a shard kept after a forward."""
        names = ("sharded_param", "_unsharded_param", "_sharded_post_forward_param")
        return [getattr(self._param, name, None) for name in names]

    @property
    def local(self) -> Tensor:
        """This rank's shard, in the parameter's memory, shape and dtype; on many ranks with fewer or no rows."""
        local: Tensor = self.parameter._local_tensor  # private: to_local() would be part of a graph
        return local.detach()

    def range_of(self, mesh: Mesh) -> tuple[int, int, int] | None:
        """Returns the range [start, stop) of the flattened whole parameter that is the shard, and the whole's numel.

        None: the shard is not a range, as torch cut another than the first dimension. Each shard has as many rows as
        the first, but those at the end.
        """
        whole = self.parameter
        if any(placement.is_shard() and placement.dim != 0 for placement in whole.placements):
            return None
        rows = -(-whole.shape[0] // mesh.shards)
        start = min(mesh.shard * rows * (whole.numel() // max(whole.shape[0], 1)), whole.numel())
        return start, start + self.local.numel(), int(whole.numel())

    @property
    def padded_numel(self) -> int:
        """The number of elements that the shard takes among reduced gradients: FSDP pads shards to equal sizes."""
        return int(self._param.padded_sharded_param_size.numel())

    @property
    def held_bytes(self) -> int:
        """The bytes that FSDP holds for the whole parameter, or for a shard that it has copied after forward."""
        param = self._param
        copied = getattr(param, "_sharded_post_forward_param_data", None)
        held: list[Tensor] = [*param.all_gather_outputs, *([] if copied is None else [copied])]
        return sum(tensor.untyped_storage().nbytes() for tensor in held)

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether the parameter was a DTensor before `fully_shard`: `FSDPParam.is_dtensor`."""
        return bool(self._param.is_dtensor)

    def has_gradient(self) -> bool:
        """Whether the whole parameter has a gradient that FSDP is about to reduce, as in its `post_backward`.

        Before its first forward there is no whole parameter (`_unsharded_param`). Backwards without synchronisation
        may have moved the gradient to `unsharded_accumulated_grad`.
        """
        whole = getattr(self._param, "_unsharded_param", None)
        return whole is not None and (self._param.unsharded_accumulated_grad is not None or whole.grad is not None)

    def is_reduced_without(self) -> bool:
        """Whether FSDP would reduce zeros for this parameter without gradient, where it was asked to."""
        whole = getattr(self._param, "_unsharded_param", None)
        return whole is not None and bool(whole.requires_grad)

    def as_gradient(self, local: Tensor) -> Tensor:
        """Returns a local gradient, of the shard's shape, as a DTensor like the parameter's: `to_sharded_dtensor`."""
        gradient: Tensor = self._param.to_sharded_dtensor(local)
        return gradient

    @property
    def _param(self) -> Any:
        found = self._parameter()
        assert found is not None
        return found


class ParameterGroup:
    """The parameters of one FSDP module, which are communicated together (torch's `FSDPParamGroup`), held weakly."""

    def __init__(self, name: str, group: Any) -> None:
        self.name = name
        self._group = weakref.ref(group)
        self.parameters = [ShardedParameter(each) for each in group.fsdp_params]
        self.mesh = _mesh_of(group.mesh_info)
        self._before: tuple[Any, Any] | None = None  # mesh infos, once the all-reduce was taken out
        self._hook: Callable[[Tensor], None] | None = None

    def refusal(self) -> str:
        """Returns why gradsync cannot exchange this group's gradients, or ""."""
        from torch.distributed.fsdp import CPUOffloadPolicy

        group, info = self._found, self._mesh_info
        post = group.post_forward_mesh_info
        if isinstance(group.offload_policy, CPUOffloadPolicy):
            return (
                "CPU offload moves gradients to the host before gradsync could exchange them: leave offload_policy out"
            )
        if why := self.why_not_reduced():
            return why
        if group._partial_reduce_output is not None:
            return (
                "gradients of an earlier backward wait for one that exchanges them (set_requires_all_reduce(False)): "
                "attach before these backwards, or behind that one"
            )
        if getattr(info, "is_spmd_mesh", False) or any(p.is_tensor_parallel for p in self.parameters):
            return "it is on a mesh with further dimensions (tensor parallel), which is not supported yet"
        if self.mesh.replicate_group is not None and post is not None and post is not info:
            return "reshard_after_forward=<int> is not supported yet on a mesh with replicas: give True or False"
        return ""

    def why_not_reduced(self) -> str:
        """Returns which setting, also one made since `attach`, gives gradsync's hook other values than means, or ""."""
        group = self._found
        if group.gradient_divide_factor is not None:
            return "a custom gradient divide factor is set (set_gradient_divide_factor); only means are supported yet"
        if group.force_sum_reduction_for_comms:
            return "set_force_sum_reduction_for_comms(True) is not supported yet: leave it out"
        if group._all_reduce_hook is not self._hook:
            return "it has an all-reduce hook of its own (set_all_reduce_hook), which is gradsync's place: leave it out"
        return ""

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """The element type of reduced gradients, by the mixed precision policy; None: the parameters'."""
        policy = self._found.mp_policy
        dtype: torch.dtype | None = policy.reduce_dtype or policy.param_dtype
        return dtype

    def post_divide_factor(self, dtype: torch.dtype) -> float:
        """Returns by what FSDP divides after the hook, where float16 might overflow; torch's own function says it."""
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

        group = self.mesh.shard_group
        _, factor, _, _ = _get_gradient_divide_factors(group, None, dtype, self._found.device.type)
        return factor or 1.0

    @property
    def reduces(self) -> bool:
        """Whether backward reduces gradients: `set_requires_gradient_sync`."""
        return bool(self._found.reduce_grads)

    @reduces.setter
    def reduces(self, value: bool) -> None:
        self._found.reduce_grads = value

    @property
    def exchanges(self) -> bool:
        """Whether reduced gradients are averaged over replicas: `set_requires_all_reduce`."""
        return bool(self._found.all_reduce_grads)

    def reduced(self) -> list[ShardedParameter]:
        """Returns the parameters whose gradients FSDP is about to reduce, in the order in which they will lie there."""
        keeps_unused = getattr(self._found, "reduce_scatter_unused_params", False)  # which torch 2.11 lacks
        return [p for p in self.parameters if p.has_gradient() or (keeps_unused and p.is_reduced_without())]

    def connect(
        self,
        before: Callable[[], None],
        reduced: Callable[[Tensor], None],
        after: Callable[[], None],
        reset: Callable[[], None],
    ) -> None:
        """Calls `before()` and `after()` around `post_backward`, and `reduced(flat)` with reduced gradients in it.

        All run on autograd's thread. When `after()` is called, `.grad` has what FSDP has made of `flat`. The hook does
        not say which parameters' gradients it got, and these are taken away before it: so `post_backward` is replaced
        on the object. `reset()` is called when the user throws away what earlier backwards gave (`reset_iter_state`).
        """
        found = self._found
        torchs = type(found).post_backward

        def post_backward(*unused: Any) -> None:
            alive = group()
            if alive is not None:
                before()
                try:
                    torchs(alive, *unused)
                finally:
                    after()

        def reset_iter_state() -> None:
            alive = group()
            if alive is not None:
                reset()
                type(alive)._reset_iter_state(alive)

        group = self._group
        found.post_backward = torch.compiler.disable(post_backward)
        if hasattr(found, "_reset_iter_state"):  # which torch 2.11 lacks
            found._reset_iter_state = reset_iter_state
        self._set_hook(reduced)

    @property
    def wrap(self) -> Callable[[nn.Module], Any]:
        """A function that puts another module into shards on the same mesh, as this one was, in its element type."""
        mesh = self._mesh_info.mesh
        if self.mesh.shard_group is None:
            from torch.distributed._composable.replicate_with_fsdp import replicate

            return lambda module: replicate(module, mesh=mesh)
        from torch.distributed.fsdp import fully_shard

        return lambda module: fully_shard(module, mesh=mesh, reshard_after_forward=True)

    def disconnect(self) -> None:
        """Undoes `connect` and `take_out_all_reduce`; nothing is left if the model is gone."""
        found = self._group()
        if found is None:
            return
        for replaced in ("post_backward", "_reset_iter_state"):
            vars(found).pop(replaced, None)
        self._set_hook(None)
        if self._before is not None:
            before, present = self._before
            if found.post_forward_mesh_info is present:
                found.post_forward_mesh_info = before
            if hasattr(before, "reduce_scatter_process_group"):
                before.reduce_scatter_process_group = present.reduce_scatter_process_group
            found.mesh_info, self._before = before, None

    def is_of(self, others: Iterable[ParameterGroup]) -> bool:
        """Whether the module's group of parameters is one of these."""
        return any(other._group() is self._group() for other in others)

    def take_out_all_reduce(self) -> None:
        """Makes torch reduce within a replica only: it averages over replicas if `mesh_info` says that there are any.

        The mesh info of shards alone, or for `replicate` of neither, has the same ranks and groups else. The one for
        resharding after forward must be the same object, or each reshard would copy a shard.
        """
        from torch.distributed.fsdp._fully_shard._fsdp_common import DataParallelMeshInfo, FSDPMeshInfo

        found, before = self._found, self._mesh_info
        present: Any
        if hasattr(before, "shard_process_group"):
            name = before.mesh.mesh_dim_names[before.shard_mesh_dim]
            present = FSDPMeshInfo(mesh=before.mesh[name], shard_mesh_dim=0)
            if hasattr(before, "reduce_scatter_process_group"):  # torch 2.11 has the shards' group alone
                present.reduce_scatter_process_group = before.reduce_scatter_process_group
        else:
            present = DataParallelMeshInfo(mesh=before.mesh, replicate_mesh_dim=before.replicate_mesh_dim)
        found.mesh_info, self._before = present, (before, present)
        if found.post_forward_mesh_info is before:
            found.post_forward_mesh_info = present

    def _set_hook(self, hook: Callable[[Tensor], None] | None) -> None:
        self._found._all_reduce_hook = self._hook = hook  # what set_all_reduce_hook sets, which takes no None

    @property
    def _mesh_info(self) -> Any:
        return self._found.mesh_info

    @property
    def _found(self) -> Any:
        found = self._group()
        assert found is not None
        return found


def groups_of(model: nn.Module) -> list[ParameterGroup]:
    """Returns the groups of parameters of all FSDP modules in the model, each with the name of its module.

    Raises:
        ValueError: for a module with several groups.
        RuntimeError: for a model that is a part of a larger one in shards.
    """
    found: list[ParameterGroup] = []
    known: set[int] = set()  # several modules may share one state
    for name, module in model.named_modules():
        if not is_root_in_shards(module):
            continue
        state = _state_of(module)
        if id(state) in known:
            continue
        known.add(id(state))
        if module is model and state._is_root is False:  # known from the first forward on
            raise RuntimeError("the model is a part of a larger one in shards: attach to that")
        groups = _groups_in(state)
        if len(groups) > 1:
            raise ValueError(
                f"{name or 'the model'!r} has {len(groups)} groups of parameters on meshes of their "
                "own (shard_placement_fn), for which torch has no hook: give all parameters of a module one mesh"
            )
        found += [ParameterGroup(name or "the model", group) for group in groups]
    return found


def _state_of(module: Any) -> Any:
    """Returns what torch keeps of a module that `fully_shard` or `replicate` was applied to."""
    return module._get_fsdp_state()


def _groups_in(state: Any) -> list[Any]:
    """Returns the groups of parameters of a module: torch 2.11 has one at most, under another name."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [group for group in (state._fsdp_param_group,) if group is not None]


def is_amid_step(model: nn.Module) -> bool:
    """Whether a forward or backward of the model has begun and not ended, as one that raised leaves it."""
    states = [_state_of(module) for module in model.modules() if is_root_in_shards(module)]
    return any(s._training_state.name != "IDLE" or s._state_ctx.post_backward_final_callback_queued for s in states)


def at_end_of_reduction(model: nn.Module, call: Callable[[], None]) -> Callable[[], None]:
    """Calls `call()` each time when FSDP has reduced all gradients of a backward; returns a function that ends this.

    Autograd makes FSDP do so at the end of backward. Pipeline schedules do so themselves, behind several backwards.
    """
    state = _state_of(model)
    alive = weakref.ref(state)

    def final_callback() -> None:
        if (found := alive()) is not None:
            type(found)._root_post_backward_final_callback(found)
            call()

    def undo() -> None:
        if (found := alive()) is not None:
            vars(found).pop("_root_post_backward_final_callback", None)

    state._root_post_backward_final_callback = torch.compiler.disable(final_callback)
    return undo


def reshard(model: nn.Module) -> None:
    """Lets each module have its shards as parameters, where a forward without backward has left whole ones."""
    for module in model.modules():
        if is_root_in_shards(module):
            module.reshard()  # type: ignore[operator]  # of FSDPModule, which only its name tells of


def names_of(model: nn.Module, groups: Iterable[ParameterGroup]) -> dict[str, tuple[ParameterGroup, ShardedParameter]]:
    """Returns groups and parameters by the names that the model has for them, in the model's order."""
    places = {id(p.parameter): (group, p) for group in groups for p in group.parameters}
    return {name: places[id(p)] for name, p in model.named_parameters() if id(p) in places}


def _mesh_of(info: Any) -> Mesh:
    """Returns the mesh that torch describes by one of three classes: `FSDPMeshInfo`, `DDPMeshInfo`, `HSDPMeshInfo`."""
    return Mesh(
        str(info.mesh.mesh.tolist()),
        getattr(info, "shard_mesh_rank", 0),
        getattr(info, "shard_mesh_size", 1),
        getattr(info, "shard_process_group", None),
        getattr(info, "replicate_process_group", None),
    )
