"""Agreement of ranks before training: every rank examines its model, and all agree on it or all raise.

No rank may find out alone that something is wrong, or the others would wait for it. So ranks first exchange their
findings, as digests and text (never pickled objects), and then raise together.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]  # a class of torch that its stub lacks
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ..comm import Group, GroupError, LocalGroup, gather_bytes, torch_group
from ..engine.engine import Engine
from ..engine.guard import Verification
from ..engine.plan_control import Planner
from ..optim.momentum import MomentumCheck
from ..plans.plan import Plan
from ..tensors.bucket import TensorSpec, describe_specs, matches, trainable_parameters
from .arguments import Communicator
from .buffers import describe_buffers, why_not_broadcast
from .wrappers import warn_if_alone, why_not_alone

T = TypeVar("T")

# The calls for which ranks meet, in error messages.
GRADIENTS = "attach() with a plan of gradients"
PARAMETERS = "attach() with a plan of parameters"
PLANNING = "attach() with an AveragingPlanner"
HOOK = "attach() behind a DDP model"

FSDP = (
    "FSDP models are not supported yet: FSDP synchronises its gradients itself (a model whose root fully_shard() was "
    "applied to is supported, by gradsync.attach)"
)
PART_IN_SHARDS = (
    "FSDP models are not supported yet in this place: a part of the model is in shards; apply fully_shard() to the "
    "whole model at the end, and give that to gradsync.attach, with a plan of gradients"
)
# Attributes by which other libraries mark parameters that ranks have parts of: the value that says so, and the library.
PARTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "tensor_model_parallel": (lambda marked: marked is True, "Megatron-LM's tensor parallelism"),
    "allreduce": (lambda marked: marked is False, "Megatron-LM's expert parallelism"),
    "ds_id": (lambda marked: marked is not None, "DeepSpeed's ZeRO-3"),
}

_attached: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_attached_parameters = WeakIdKeyDictionary()  # keys only; two engines that write one gradient would race


@contextmanager
def agreed_engine(
    model: nn.Module,
    plan: Plan | Planner,
    process_group: dist.ProcessGroup | None,
    timeout_s: float,
    exclude: Sequence[str] = (),
    settings: str = "",
    optimizer: Optimizer | None = None,
    refusal: str = "",
    also: Mapping[str, Tensor] | None = None,
    *,
    what: str = GRADIENTS,
    in_backward: bool = False,
    verification: Verification,
    communicator: Communicator = "own",
    parameters: Mapping[str, nn.Parameter] | None = None,
    guarded: Mapping[str, Tensor] | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
) -> Iterator[tuple[Engine, dict[str, nn.Parameter]]]:
    """Yields a new engine, which exchanges tensors, and the parameters that it synchronises, by name. Collective.

    If model, plan or settings are wrong on some rank, or differ, all ranks raise. In the `with` block the caller
    installs the hooks that call the engine. If the block raises, the engine is closed, and the model is free again.

    Args:
        model: the model, perhaps in DDP.
        plan: the plan, or the function that makes one.
        process_group: the ranks that share the model; None: all.
        timeout_s: seconds after which a rank that waits for the others raises.
        exclude: names or shell patterns of parameters and buffers that are left alone.
        settings: the caller's settings as text, which must be equal on all ranks.
        optimizer: checked for momentum that a compressor has as well; None: no check.
        refusal: what is wrong with the settings on this rank, or "".
        also: further tensors that the engine synchronises, by name.
        what: the call that all ranks make, for error messages; ranks that make different ones all raise.
        in_backward: all ranks call this inside a backward, as DDP's hook does.
        verification: how ranks compare parameters during training.
        communicator: as in `gradsync.attach`, the same on all ranks.
        parameters: tensors in place of the model's own, by name, which the caller has examined (those of a model in
            shards); None: the parameters that `parameters_of` finds.
        guarded: the tensors that ranks compare during training, by name; None: the engine's.
        grad_scaler: the scaler of the loss, which the engine follows; None: there is none.

    Raises:
        RuntimeError, ValueError, GroupError: as `gradsync.attach`.
    """
    settings = f"{settings}, timeout={timeout_s:g}, {verification}"
    found: dict[str, nn.Parameter] = {}
    engines: list[Engine] = []

    def build() -> Engine:
        engines.append(
            Engine(
                {**found, **(also or {})},
                group,
                plan,
                timeout_s=timeout_s,
                sparse_names=sparse_tables(unwrapped(model)),
                verification=verification,
                guarded=guarded,
            )
        )
        if optimizer is not None:
            MomentumCheck(found).check(engines[0].plan, optimizer)
        if grad_scaler is not None:
            engines[0].follow_loss_scale(grad_scaler)
        return engines[0]

    def close() -> None:
        (engines[0] if engines else group).close()  # an engine closes its group

    with ExitStack() as undo:
        group = group_of(process_group, timeout_s, what, device_of(model), communicator)
        undo.callback(close)
        if parameters is None:  # the caller knows better who should be there
            warn_if_alone(process_group)
        with announcing(group, what):
            examine = partial(_examine, model, plan, exclude, group.size, refusal, also or {}, in_backward, parameters)
            found = _agree(group, examine, partial(_texts, model, plan, exclude, settings), timeout_s)
            engine = _agree(group, build, lambda engine: {"plans": engine.plan.to_json()}, timeout_s)
        engine.follow()
        undo.callback(forget, list(model.modules()), list(found.values()))
        _attached.update(model.modules())
        _attached_parameters.update({p: True for p in found.values()})
        yield engine, found
        undo.pop_all()


@contextmanager
def announcing(group: Group, what: str) -> Iterator[None]:
    """Tells the other ranks if a collective fails, or the user interrupts this rank, in the `with` block.

    `what` names the block in error messages. Other exceptions pass: the ranks tell each other of these themselves.

    Raises:
        GroupError: for collectives that failed, with `what` in front of its text.
    """
    try:
        yield
    except GroupError as error:
        placed = error.at(what)
        group.announce_failure(str(placed), placed.ranks)
        raise placed from None
    except Exception:  # of which the ranks told each other
        raise
    except BaseException as error:
        group.announce_failure(f"{what}: {type(error).__name__}")
        raise


def device_of(model: nn.Module) -> torch.device:
    """Returns the device of the model's first trainable parameter; the CPU if it has none."""
    return next((p.device for p in model.parameters() if p.requires_grad), torch.device("cpu"))


def group_of(
    process_group: dist.ProcessGroup | None,
    timeout_s: float,
    what: str,
    device: torch.device,
    communicator: Communicator = "own",
    *,
    measures: bool = True,
) -> Group:
    """Makes a communicator over the ranks of `process_group` (None: all), which all call this for `what`.

    Args:
        timeout_s: seconds after which a rank that waits for the others raises.
        what: the purpose, for error messages.
        device: of the tensors that the ranks will exchange.
        communicator: as in `gradsync.attach`.
        measures: as in `torch_group`.

    Raises:
        ValueError: if the process group has no backend for the device.
        GroupError: where another rank does not come in time, comes for something else, died or stopped.
        RuntimeError: if torch.distributed is not initialised, or this rank is no member of `process_group`.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialised; call torch.distributed.init_process_group() first "
            "(torchrun sets the environment it needs); where a framework does that, attach after it, to the model that "
            "it has wrapped (Lightning: gradsync.attach(self.trainer.strategy.model) in on_fit_start)"
        )
    if dist.get_rank(process_group) < 0:
        raise RuntimeError("this rank is not a member of process_group; call attach() on its members only")
    if dist.get_world_size(process_group) == 1:
        return LocalGroup.world(1)[0]
    shared = communicator == "shared"
    if shared:  # ranks that come with another one are told so before they issue anything
        what = f"{what} with communicator='shared'"
    return torch_group(
        process_group, timeout_s=timeout_s, device=device, what=what, on_calling_thread=shared, measures=measures
    )


def forget(modules: Iterable[nn.Module], parameters: Iterable[Tensor]) -> None:
    """Forgets that gradsync is attached to these modules and parameters, so that `attach` takes them again."""
    for module in modules:
        _attached.discard(module)
    for parameter in parameters:
        _attached_parameters.pop(parameter, None)


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the user's own model: the module inside DistributedDataParallel, else the model itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _examine(
    model: nn.Module,
    plan: Plan | Planner,
    exclude: Sequence[str],
    world_size: int,
    refusal: str,
    also: Mapping[str, Tensor],
    in_backward: bool,
    given: Mapping[str, nn.Parameter] | None,
) -> dict[str, nn.Parameter]:
    """Returns the parameters to synchronise, by name; raises if model, plan or settings are wrong on this rank."""
    if refusal:
        raise ValueError(refusal)
    if not isinstance(plan, Plan) and not callable(plan):
        raise TypeError(
            f"plan must be a Plan (see Plan.load), a function that makes one, 'auto', or None; got {plan!r}"
        )
    if not in_backward and torch._C._current_graph_task_id() != -1:
        raise RuntimeError("attach() was called during backward; call it before the forward of a step")
    parameters = parameters_of(model, exclude) if given is None else dict(given)
    if isinstance(plan, Plan):
        specs = {name: TensorSpec.of(p) for name, p in {**parameters, **also}.items()}
        plan.check(specs, world_size, next((p.device.type for p in parameters.values()), None))
    return parameters


def parameters_of(model: nn.Module, exclude: Sequence[str]) -> dict[str, nn.Parameter]:
    """Returns the parameters of a model that gradsync can synchronise, by name.

    Raises:
        RuntimeError: where gradsync is attached to the model, DDP or torchft averages its gradients as well, it is in
            shards (FSDP), or parameters have no values.
        ValueError: for complex parameters and those on several devices, and for a pattern in `exclude` without a match.
    """
    require_unattached(model)
    if any("FullyShardedDataParallel" in c.__name__ for c in _classes(model)):
        raise RuntimeError(FSDP)
    if any(c.__name__ == "FSDPModule" for c in _classes(model)):
        raise RuntimeError(PART_IN_SHARDS)
    if isinstance(model, DistributedDataParallel) and getattr(model, "skip_all_reduce_unused_params", False):
        raise ValueError(  # and so does the end of the step, behind the last bucket
            "the model is in DistributedDataParallel(skip_all_reduce_unused_params=True), which keeps buckets of "
            "unused parameters from its hook; gradsync needs all of them: leave the argument out"
        )
    inner = unwrapped(model)
    names = [name for name, _ in (*inner.named_parameters(), *inner.named_buffers())]
    for pattern in exclude:
        if not any(matches(name, [pattern]) for name in names):
            raise ValueError(f"exclude names {pattern!r}, which no parameter or buffer of the model matches")
    require_values(inner, exclude)
    parameters = {n: p for n, p in trainable_parameters(inner).items() if not matches(n, exclude)}
    for name, parameter in parameters.items():
        if parameter in _attached_parameters:
            raise RuntimeError(f"{name!r} is shared with a model that gradsync is attached to already; exclude it here")
        if parameter.is_complex():
            raise ValueError(f"{name!r} is complex ({parameter.dtype}), which is not supported; exclude it")
        if type(parameter.data).__name__ == "DTensor":
            raise RuntimeError(f"{name!r} is a DTensor (FSDP2 or tensor parallel), which is not supported yet")
    for name, buffer in buffers_of(model, exclude).items():
        if why := why_not_broadcast(name, buffer):
            raise ValueError(why)
    if why := why_not_alone(model, parameters):
        raise RuntimeError(why)
    devices = {str(p.device) for p in parameters.values()}
    if len(devices) > 1:
        raise ValueError(f"the parameters sit on several devices, {', '.join(sorted(devices))}; one is supported")
    return parameters


def why_not_replicas(model: nn.Module, exclude: Sequence[str]) -> str:
    """Returns an error text if a parameter is marked as a rank's own part of a larger one; else "".

    Parts may have equal names and shapes on all ranks, as replicas have, and would be overwritten by the first rank's.
    """
    for name, parameter in trainable_parameters(unwrapped(model)).items():
        for attribute, (says_so, whose) in PARTS.items():
            if says_so(getattr(parameter, attribute, None)) and not matches(name, exclude):
                return (
                    f"{name!r} is marked (by its attribute {attribute}) as a part under {whose}, so other ranks have "
                    "other parts: give attach() the ranks with the same parts as its process_group, or exclude it"
                )
    return ""


def require_unattached(model: nn.Module) -> None:
    """Raises RuntimeError where gradsync is attached to the model, or to a part of it, already."""
    if any(module in _attached for module in model.modules()):
        raise RuntimeError(
            "gradsync is attached to this model, or to a part of it, already; call detach() on it first "
            "(gradsync.attachment_of(model) returns it)"
        )


def require_values(model: nn.Module, exclude: Sequence[str]) -> None:
    """Raises if a parameter, frozen or not, has no values (lazy, or on meta) or is sparse; excluded ones may be so."""
    for name, parameter in model.named_parameters():
        if matches(name, exclude):
            continue
        if isinstance(parameter, UninitializedTensorMixin):
            raise RuntimeError(
                f"{name!r} is not initialised yet, as its lazy module has seen no input: run a forward with an input "
                "like those of training on every rank, then attach"
            )
        if parameter.is_meta:
            raise RuntimeError(
                f"{name!r} is on the meta device and has no values: call model.to_empty(device=...) and initialise or "
                "load the parameters, then attach"
            )
        if parameter.layout is not torch.strided:
            raise ValueError(
                f"{name!r} is a sparse parameter (layout {parameter.layout}), which is not supported: make it dense "
                "(only gradients may be sparse, as of nn.Embedding(sparse=True)), or exclude it"
            )


def buffers_of(model: nn.Module, exclude: Sequence[str]) -> dict[str, Tensor]:
    """Returns the buffers that gradsync broadcasts, by name, in any shape and dtype; {} for a model in DDP.

    DDP broadcasts its buffers itself. `exclude`: names or shell patterns of buffers to leave out.
    """
    if isinstance(model, DistributedDataParallel):
        return {}
    return {name: buffer for name, buffer in model.named_buffers() if not matches(name, exclude)}


def exclusions(model: nn.Module, exclude: Sequence[str], *, has_buffers: bool = True) -> tuple[str, ...]:
    """Returns `exclude` with the names of parameters and buffers added that DDP is told to ignore (by torch's own API).

    With `has_buffers=False` the names of all buffers are added as well.
    """
    if isinstance(model, DistributedDataParallel):
        # DDP compares the name "." + key with those of parameters that belong to the outermost module itself.
        ignored = {name for name in model.parameters_to_ignore if "." in name}
    else:
        ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    inner = unwrapped(model)
    buffers = [name for name, _ in inner.named_buffers()]
    names = [*(name for name, _ in inner.named_parameters()), *buffers]
    found = [name for name in names if name in ignored]
    return (*exclude, *found, *(() if has_buffers else buffers))


def _texts(
    model: nn.Module,
    plan: Plan | Planner,
    exclude: Sequence[str],
    settings: str,
    parameters: dict[str, nn.Parameter],
) -> dict[str, str]:
    """Returns texts on model, plan and settings, by subject, which ranks compare before they build an engine."""
    inner = unwrapped(model)
    others = {n: p for n, p in inner.named_parameters() if n not in parameters and not matches(n, exclude)}
    lines = describe_specs({name: TensorSpec.of(p) for name, p in parameters.items()})
    # Gradients are summed as they lie in memory, so channels-last on one rank only would add up the wrong elements.
    lines += [f"{name}: strides {p.stride()}" for name, p in parameters.items() if not p.is_contiguous()]
    lines += [f"{line} (frozen)" for line in describe_specs({n: TensorSpec.of(p) for n, p in others.items()})]
    lines += [f"{name}: sparse gradients" for name in sorted(sparse_tables(inner) & parameters.keys())]
    lines += [f"{line} (buffer)" for line in describe_buffers(buffers_of(model, exclude))]
    plan_text = plan.to_json() if isinstance(plan, Plan) else f"made by {_planner_name(plan)}"
    return {"models": "\n".join(lines), "plans": plan_text, "settings of attach": settings}


def _agree(group: Group, make: Callable[[], T], describe: Callable[[T], dict[str, str]], timeout_s: float) -> T:
    """Runs `make` on every rank; returns its result if all succeed with equal `describe` texts, else raises on all."""
    problem: Exception | None = None
    words: dict[str, str] = {}
    try:
        made = make()
        words = describe(made)
    except Exception as error:  # told to all, then raised
        problem = error
    digests = [hashlib.sha256(text.encode()).hexdigest() for text in words.values()]
    texts = gather_texts(group, f"error {problem}" if problem else " ".join(["ready", *digests]), timeout_s)
    if problem is not None:
        raise problem
    for rank, text in enumerate(texts):
        if text.startswith("error "):
            raise RuntimeError(f"rank {rank} could not attach: {text.removeprefix('error ')}")
    if len(set(texts)) > 1:
        everyone = {what: gather_texts(group, mine, timeout_s) for what, mine in words.items()}
        raise ValueError(_first_difference(everyone))
    return made


def gather_texts(group: Group, text: str, timeout_s: float) -> list[str]:
    """Returns the `text` of every rank, in the order of ranks. Collective."""
    return [content.decode() for content in gather_bytes(group, text.encode() or b" ", timeout_s)]


def _first_difference(everyone: dict[str, list[str]]) -> str:
    """Returns an error text: the first rank whose text differs from rank 0's, and the line; the same on every rank."""
    what = next(what for what, texts in everyone.items() if len(set(texts)) > 1)
    texts = everyone[what]
    rank = next(rank for rank, text in enumerate(texts) if text != texts[0])
    pair = [hashlib.sha256(texts[r].encode()).hexdigest()[:12] for r in (0, rank)]
    lines = zip_longest(texts[0].splitlines(), texts[rank].splitlines(), fillvalue="(nothing)")
    at, first, second = next((i, a.strip(), b.strip()) for i, (a, b) in enumerate(lines) if a != b)
    return (
        f"the {what} differ between the ranks: rank 0 has {pair[0]}, rank {rank} has {pair[1]}; first "
        f"difference, line {at + 1}: rank 0 has {first!r}, rank {rank} has {second!r}"
    )


def _planner_name(planner: Planner) -> str:
    """Returns a planner's name, the same on every rank, unlike a `repr` with an address."""
    function = planner.func if isinstance(planner, partial) else planner
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _classes(model: nn.Module) -> set[type]:
    return {c for module in model.modules() for c in type(module).__mro__}


def sparse_tables(model: nn.Module) -> frozenset[str]:
    """Returns the names of embedding weights with sparse gradients, as all modules that have them say."""
    sparse: dict[int, bool] = {}
    for module in model.modules():
        table = module if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse else None
        for parameter in module.parameters(recurse=False):
            says = table is not None and parameter is table.weight
            sparse[id(parameter)] = says and sparse.get(id(parameter), True)  # dense if tied to a dense layer
    return frozenset(name for name, parameter in model.named_parameters() if sparse[id(parameter)])
