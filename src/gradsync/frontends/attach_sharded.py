"""`attach` for a model in shards (FSDP2, HSDP, `replicate`): all its ranks agree, or all raise."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ..comm import Group, LocalGroup
from ..engine.engine import Engine
from ..engine.plan_control import Planner
from ..inputs.settings import shown
from ..planner import AveragingPlanner
from ..plans.plan import Plan, What
from ..schemes import Scheme
from ..tensors.bucket import matches
from .agreement import (
    agreed_engine,
    announcing,
    buffers_of,
    device_of,
    gather_texts,
    group_of,
    require_unattached,
    require_values,
    sparse_tables,
)
from .arguments import Arguments, Communicator
from .fsdp_internals import (
    TESTED_TORCH,
    Mesh,
    ParameterGroup,
    ShardedParameter,
    groups_of,
    is_amid_step,
    is_tested_torch,
    names_of,
    reshard,
)
from .fsdp_probe import probe
from .shard_ranks import ShardRanks
from .sharded import AFTER_ACCUMULATION, FREEZES, ShardedGradients, stand_ins, why_not_plan
from .switching import Attached, Frontend, FrontendSwitch, level
from .torch_hooks import is_backward

T = TypeVar("T")

logger = logging.getLogger(__name__)

SHARDED = "attach() with a model in shards"
NO_REPLICAS = (
    "the model is on a mesh of shards only: give replicate_group, the process group of the ranks with the same shard "
    "(one of them in each replica), or call fully_shard(..., mesh=) with a mesh of (replicas, shards)"
)
GROUP_OF_MESH = (
    "replicate_group is for models on a mesh of shards only; this model's mesh names its replicas: leave it out"
)
PROCESS_GROUP = (
    "process_group is not for a model in shards, whose ranks its mesh names: leave it out, or give replicate_group. "
    "gradsync.DistributedDataParallel, which always has one, keeps whole models: use gradsync.attach, in Lightning's "
    "Trainer GradsyncShardedStrategy"
)
SCALER_BESIDE_EXCLUDED = (
    "grad_scaler is not supported beside {name!r}, which exclude names, on a mesh of shards only: an overflow of its "
    "gradient in one replica would be told to no other, whose loss scale would differ; shard on a mesh of (replicas, "
    "shards), or freeze the parameter"
)
NO_PARAMETERS = "a plan that averages parameters is not supported for a model in shards: give a plan of gradients"


@dataclass(frozen=True)
class Sharding:
    """A model in shards, as `attach` found it on this rank.

    Attributes:
        groups: all groups of parameters in shards.
        shards: the parameters to average between replicas, by name, also those with an empty shard here.
        replicate_group: the ranks with this rank's shard.
        mesh: the mesh of all groups.
    """

    groups: Sequence[ParameterGroup]
    shards: Mapping[str, ShardedParameter]
    replicate_group: dist.ProcessGroup
    mesh: Mesh

    @property
    def replaces_torchs(self) -> bool:
        """Whether torch would average gradients between replicas itself."""
        return self.mesh.replicate_group is not None


def sharded_switch(
    attached: Attached, plan: Plan | Planner | AveragingPlanner, replicate_group: Any, given: Arguments
) -> FrontendSwitch:
    """Installs hooks that average gradients between replicas, and returns the object that holds them. Collective.

    Args:
        plan: as in `attach`.
        replicate_group: as in `attach`.

    Raises:
        TypeError, ValueError, RuntimeError, GroupError: on all ranks of the model, if one of them cannot.
    """
    sharding: Sharding | None = None
    problem: Exception | None = None
    try:
        sharding = _examined(attached, plan, replicate_group, given)
    except Exception as error:  # told to all, then raised
        problem = error
    with ExitStack() as opened:
        meeting = _Meeting(attached, replicate_group, opened)
        meeting.agree(problem, _alike(sharding, given), _places(sharding))
        assert sharding is not None and not isinstance(plan, AveragingPlanner)
        meeting.attempt(lambda: _require_one_shard(attached.model, sharding))
        with ExitStack() as undo:
            replica = meeting.attempt(lambda: _replica_of(attached, sharding, undo))
            meeting.attempt(lambda: probe(sharding.groups[0].wrap, sharding.replicate_group, device_of(attached.model)))
            with ExitStack() as stack:
                switch = meeting.attempt(
                    lambda: stack.enter_context(_installed(attached, plan, sharding, given, replica))
                )
            undo.pop_all()
    return switch


def _require_one_shard(model: nn.Module, sharding: Sharding) -> None:
    """Raises on all ranks of the replicate group where they have several shards, as one given by hand may."""
    shard = sharding.mesh.shard
    bounds = torch.tensor([-shard, shard], device=device_of(model))
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=sharding.replicate_group)
    lowest, highest = -int(bounds[0]), int(bounds[1])
    if lowest != highest:
        raise ValueError(
            f"the ranks of replicate_group have the shards {lowest} to {highest} of {sharding.mesh.shards}; expected "
            "the ranks with the same shard, one of each replica"
        )


def _replica_of(attached: Attached, sharding: Sharding, undo: ExitStack) -> Group:
    """Returns the group of the ranks of this rank's replica; alone where there are no shards. Collective.

    `undo`: gets the call that closes the group.
    """
    if sharding.mesh.shard_group is None:
        return LocalGroup.world(1)[0]
    device = device_of(attached.model)
    group = group_of(
        sharding.mesh.shard_group, attached.timeout_s, SHARDED, device, _communicator(device), measures=False
    )
    undo.callback(group.close)
    return group


def _communicator(device: torch.device) -> Communicator:
    """Returns whose communicators are used: FSDP has collectives, which accelerators want in one order with ours."""
    return "own" if device.type == "cpu" else "shared"


class _Meeting:
    """The ranks of a model in shards, who tell each other what is wrong before any of them goes on.

    They are all ranks of the job, or where it has more than the model, those of this rank's replica and then those with
    this rank's shard.
    """

    def __init__(self, attached: Attached, replicate_group: Any, opened: ExitStack) -> None:
        self._timeout_s, device = attached.timeout_s, device_of(attached.model)
        self._groups: list[Group] = []
        for process_group in _ranks_of(attached.model, replicate_group):
            self._groups.append(group_of(process_group, self._timeout_s, SHARDED, device, measures=False))
            opened.callback(self._groups[-1].close)

    def attempt(self, make: Callable[[], T]) -> T:
        """Returns `make()` if it succeeds on all ranks; else all raise. Collective."""
        problem: Exception | None = None
        try:
            made = make()
        except Exception as error:  # told to all, then raised
            problem = error
        self.agree(problem)
        return made

    def agree(self, problem: Exception | None, alike: str = "", places: Sequence[Sequence[int]] = ()) -> None:
        """Raises on all ranks if one has a problem, its own where this rank has one, or if they differ.

        `alike`: must be the same on all ranks.
        `places`: process groups' ranks, which must be the same on all members of each.
        """
        said = "" if problem is None else f"rank {dist.get_rank()} could not attach: {problem}"
        differs = ""
        for group in self._groups:
            with announcing(group, SHARDED):
                texts = gather_texts(group, json.dumps([said, differs, alike, places]), self._timeout_s)
            told = [json.loads(text) for text in texts]
            said = next((each for each, _, _, _ in told if each), "")
            others = sorted({each for _, _, each, _ in told})
            differs = next((each for _, each, _, _ in told if each), "")
            if len(others) > 1 and not differs:
                differs = f"the ranks differ: {others[0]} on some, {others[1]} on others"
            differs = differs or _overlap([each for _, _, _, each in told])
        if problem is not None:
            raise problem
        if said:
            raise RuntimeError(said)
        if differs:
            raise ValueError(differs)


def _ranks_of(model: nn.Module, replicate_group: Any) -> list[dist.ProcessGroup | None]:
    """Returns the process groups that together have all ranks of the model; None: all ranks of the job.

    A rank that does not know which ranks have the model takes it that all have.
    """
    if not dist.is_available() or not dist.is_initialized():
        return [None]
    try:
        mesh = groups_of(model)[0].mesh
        of_shard = _replicate_group(mesh, replicate_group)
    except Exception:  # which `_examined` tells all ranks
        return [None]
    if mesh.shards * of_shard.size() == dist.get_world_size():
        return [None]
    return [each for each in (mesh.shard_group, of_shard) if each is not None]


def _alike(sharding: Sharding | None, given: Arguments) -> str:
    """Returns what must be the same on all ranks of the model, as text; "" on a rank with a problem."""
    if sharding is None:
        return ""
    mesh = sharding.mesh
    kind = f"{sharding.replicate_group.size()} replicas of {mesh.shards} shards"
    # The mesh of one replica differs from that of others, unless it names them all.
    return f"{kind}{f' on mesh {mesh.ranks}' if sharding.replaces_torchs else ''}, {given}"


def _places(sharding: Sharding | None) -> list[list[int]]:
    """Returns the ranks of this rank's replica, and those with this rank's shard; [] on a rank with a problem."""
    if sharding is None:
        return []
    groups = (sharding.mesh.shard_group, sharding.replicate_group)
    return [[] if group is None else sorted(dist.get_process_group_ranks(group)) for group in groups]


def _overlap(places: Sequence[Sequence[Sequence[int]]]) -> str:
    """Returns why ranks that named these places would wait for each other in vain, or ""."""
    for number, called in enumerate(("a replica", "those with one shard")):
        known: dict[int, Sequence[int]] = {}
        for ranks in [groups[number] for groups in places if groups]:
            for rank in ranks:
                if (other := known.setdefault(rank, ranks)) != ranks:
                    return (
                        f"the ranks differ: ranks {other} are {called} on some, ranks {ranks} on others; shard on the "
                        "same mesh on all ranks"
                    )
    return ""


def _examined(
    attached: Attached, plan: Plan | Planner | AveragingPlanner, replicate_group: Any, given: Arguments
) -> Sharding:
    """Returns what is to be synchronised; raises if model, plan or settings are wrong on this rank."""
    model, exclude = attached.model, attached.exclude
    if why := given.refusal or _why_not_arguments(attached, plan, given):
        raise ValueError(why)
    if is_backward():
        raise RuntimeError("attach() was called during backward; call it before the forward of a step")
    require_unattached(model)
    require_values(model, exclude)
    if is_amid_step(model):
        raise RuntimeError(
            "a forward or backward of the model has begun and not ended (it raised?), and FSDP may reduce nothing any "
            "more: call model.reset_iter_state() first"
        )
    reshard(model)
    groups = groups_of(model)
    if not groups:
        raise ValueError("the model has no parameters in shards")
    for group in groups:
        if why := group.refusal():
            raise ValueError(f"{group.name!r}: {why}")
    mesh = groups[0].mesh
    if any((g.mesh.ranks, g.mesh.shards) != (mesh.ranks, mesh.shards) for g in groups):  # of `replicate`, one shard
        raise ValueError("modules of the model are on several meshes; one is supported")
    named = names_of(model, groups)
    _require_parameters(model, exclude, named)
    trainable = {n: p for n, (_, p) in named.items() if p.parameter.requires_grad}
    shards = {n: p for n, p in trainable.items() if not matches(n, exclude)}
    if given.grad_scaler is not None and mesh.replicate_group is None and len(shards) < len(trainable):
        raise ValueError(SCALER_BESIDE_EXCLUDED.format(name=next(n for n in trainable if n not in shards)))
    return Sharding(groups, shards, _replicate_group(mesh, replicate_group), mesh)


def _why_not_arguments(attached: Attached, plan: Plan | Planner | AveragingPlanner, given: Arguments) -> str:
    if isinstance(plan, AveragingPlanner) or (isinstance(plan, Plan) and plan.what is not What.GRADIENT):
        return NO_PARAMETERS
    if getattr(plan, "averaging", None) is not None:  # of an AutoPlanner, whose module is slow to import
        return NO_PARAMETERS
    if constraints := getattr(plan, "constraints", None):
        if any(isinstance(lossy, Scheme) and lossy.traits.freezes for lossy in constraints.lossy):
            return FREEZES
    if attached.process_group is not None:
        return PROCESS_GROUP
    if given.static_graph or not given.find_unused_parameters:
        return "static_graph and find_unused_parameters have no meaning for a model in shards: leave them out"
    return ""


def _require_parameters(
    model: nn.Module, exclude: Sequence[str], named: Mapping[str, tuple[ParameterGroup, ShardedParameter]]
) -> None:
    """Raises for parameters that gradsync cannot average between replicas."""
    for pattern in exclude:
        known = (*dict(model.named_parameters()), *dict(model.named_buffers()))
        if not any(matches(name, [pattern]) for name in known):
            raise ValueError(f"exclude names {pattern!r}, which no parameter or buffer of the model matches")
    if tables := sorted(sparse_tables(model)):
        raise ValueError(f"{tables[0]!r} gets sparse gradients, which is not supported for a model in shards")
    for name, parameter in model.named_parameters():
        if matches(name, exclude) or not parameter.requires_grad:
            continue
        if name not in named:
            raise ValueError(
                f"{name!r} is in no module that fully_shard() was applied to, so nothing averages its gradient: apply "
                "it to the whole model at the end, or let exclude name this one"
            )
        if parameter.is_complex():
            raise ValueError(f"{name!r} is complex ({parameter.dtype}), which is not supported; freeze it")
        local = type(named[name][1].parameter._local_tensor)
        if local.__name__ not in ("Tensor", "Parameter"):
            raise ValueError(f"the shard of {name!r} is a {local.__name__}, which is not supported yet; freeze it")
        if parameter._post_accumulate_grad_hooks:
            raise ValueError(AFTER_ACCUMULATION.format(name=name))


def _replicate_group(mesh: Mesh, given: Any) -> dist.ProcessGroup:
    """Returns the ranks with this rank's shard; raises if there are none, or they are not one of each replica."""
    if mesh.replicate_group is not None:
        if given is not None:
            raise ValueError(GROUP_OF_MESH)
        if not is_tested_torch():
            raise RuntimeError(
                f"this release of torch ({torch.__version__}) is none of those that gradsync knows the inside of "
                f"({', '.join(TESTED_TORCH)}), which a mesh with replicas needs: shard on a mesh of the shards alone, "
                "and give attach() the replicate_group"
            )
        return mesh.replicate_group
    if given is None:
        raise ValueError(NO_REPLICAS)
    if not isinstance(given, dist.ProcessGroup):
        raise TypeError(f"replicate_group must be a torch.distributed.ProcessGroup, got {shown(given)}")
    if dist.get_rank(given) < 0:
        raise ValueError("this rank is not a member of replicate_group: give each rank the group of its own shard")
    both = set(dist.get_process_group_ranks(given)) & set(dist.get_process_group_ranks(mesh.shard_group))
    if len(both) > 1:
        raise ValueError(
            f"ranks {sorted(both)} are both in replicate_group and in this replica; expected the ranks with the same "
            "shard, one of each replica"
        )
    return given


def _not_joinable() -> NoReturn:
    raise RuntimeError("join() is not supported for a model in shards, whose ranks must all have equally many steps")


@contextmanager
def _installed(
    attached: Attached, plan: Plan | Planner, sharding: Sharding, given: Arguments, replica: Group
) -> Iterator[FrontendSwitch]:
    """Installs the hooks, over the ranks with this rank's shard; removes them if the block raises. Collective.

    `replica`: the ranks of this rank's replica.
    """
    model, optimizer, mesh = attached.model, given.optimizer, sharding.mesh
    guarded = {name: shard.local for name, shard in sharding.shards.items()}  # in the parameters' own element types
    if sharding.replicate_group.size() == 1:
        logger.warning("the model has one replica, so gradsync exchanges nothing")
    with (
        agreed_engine(
            model,
            plan,
            sharding.replicate_group,
            attached.timeout_s,
            attached.exclude,
            f"{given}, shard {mesh.shard} of {mesh.shards}",
            what=SHARDED,
            verification=attached.verification,
            communicator=_communicator(device_of(model)),
            parameters=stand_ins(sharding.shards, sharding.groups),
            guarded=guarded,
            grad_scaler=given.grad_scaler,  # its scale is the same on all ranks: torch tells shards of an overflow
        ) as (engine, _),
        ExitStack() as undo,
    ):
        if why := why_not_plan(engine.plan):
            raise ValueError(why)
        if given.init_sync:
            _level(model, attached.exclude, sharding, engine)
        for group in sharding.groups:
            undo.callback(group.disconnect)
            if sharding.replaces_torchs:
                group.take_out_all_reduce()
        ranks = ShardRanks(engine, replica)
        hooks = ShardedGradients(
            model,
            sharding.groups,
            sharding.shards,
            engine,
            guarded,
            ranks,
            exclude=attached.exclude,
        )
        undo.callback(hooks.remove)
        if optimizer is not None:
            hooks.check_momentum(optimizer)

        def remove() -> None:
            hooks.remove()
            ranks.close()

        yield FrontendSwitch(Frontend(engine, hooks.no_sync, remove, joinable=_not_joinable, sharded=hooks))
        undo.pop_all()


def _level(model: nn.Module, exclude: Sequence[str], sharding: Sharding, engine: Engine) -> None:
    """Overwrites shards, frozen ones too, and buffers by those of the first replica. Collective."""
    locals_ = [p.local for name, (_, p) in names_of(model, sharding.groups).items() if not matches(name, exclude)]
    level(engine, [*(local for local in locals_ if local.numel()), *buffers_of(model, exclude).values()])
