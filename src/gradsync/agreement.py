"""Before anything is synchronised: every rank examines its model, and all agree on it or all raise.

No rank may find out alone that something is wrong, or the others would wait for it; so findings are exchanged first, as
digests and text (never pickled objects), and raised together.
"""

from __future__ import annotations

import fnmatch
import hashlib
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .bucket import TensorSpec, describe_specs, model_digest, trainable_parameters
from .comm import Group, LocalGroup, TorchGroup
from .engine import Engine, Planner
from .plan import Plan
from .planner import default_plan

DEFAULT_TIMEOUT_S = 600.0

_attached: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def agreed_engine(
    model: nn.Module,
    plan: Plan | Planner | None,
    process_group: dist.ProcessGroup | None,
    timeout_s: float,
    exclude: Sequence[str] = (),
) -> tuple[Engine, dict[str, nn.Parameter]]:
    """An engine for the model's parameters, on all ranks or on none; and these parameters by name.

    Raises:
        RuntimeError, ValueError: as `gradsync.attach` says.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialised; call torch.distributed.init_process_group() first "
            "(torchrun sets the environment it needs)"
        )
    group: Group
    if dist.get_world_size(process_group) == 1:
        group = LocalGroup.world(1)[0]
    else:
        group = TorchGroup(process_group, timeout_s=timeout_s)
    try:
        parameters = _agree(group, partial(_examine, model, plan, exclude, group.size), plan, timeout_s)
        sparse_names = _sparse_tables(unwrapped(model))
        engine = Engine(parameters, group, plan or default_plan, timeout_s=timeout_s, sparse_names=sparse_names)
    except BaseException:
        group.close()
        raise
    _attached.update(model.modules())
    return engine, parameters


def forget(modules: Sequence[weakref.ref[nn.Module]]) -> None:
    """The modules may be attached again."""
    for reference in modules:
        module = reference()
        if module is not None:
            _attached.discard(module)


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own model: inside of DistributedDataParallel, else the model itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _examine(
    model: nn.Module, plan: Plan | Planner | None, exclude: Sequence[str], world_size: int
) -> dict[str, nn.Parameter]:
    """The parameters to synchronise; raises for whatever is wrong on this rank."""
    if any(module in _attached for module in model.modules()):
        raise RuntimeError("gradsync is attached to this model, or to a part of it, already; call detach() on it first")
    if torch._C._current_graph_task_id() != -1:
        raise RuntimeError("attach() was called during backward; call it before the forward of a step")
    if any("FullyShardedDataParallel" in c.__name__ or c.__name__ == "FSDPModule" for c in _classes(model)):
        raise RuntimeError("FSDP models are not supported yet: FSDP synchronises its gradients itself")
    parameters = {n: p for n, p in trainable_parameters(unwrapped(model)).items() if not matches(n, exclude)}
    for pattern in exclude:
        if not any(fnmatch.fnmatchcase(name, pattern) for name, _ in unwrapped(model).named_parameters()):
            raise ValueError(f"exclude names {pattern!r}, which no parameter of the model matches")
    for name, parameter in parameters.items():
        if parameter.is_complex():
            raise ValueError(f"{name!r} is complex ({parameter.dtype}), which is not supported; exclude it")
        if type(parameter.data).__name__ == "DTensor":
            raise RuntimeError(f"{name!r} is a DTensor (FSDP2 or tensor parallel), which is not supported yet")
    devices = {str(p.device) for p in parameters.values()}
    if len(devices) > 1:
        raise ValueError(f"the parameters sit on several devices, {', '.join(sorted(devices))}; one is supported")
    if isinstance(plan, Plan):
        plan.check({name: TensorSpec.of(p) for name, p in parameters.items()}, world_size)
    return parameters


def _agree(
    group: Group,
    examine: Callable[[], dict[str, nn.Parameter]],
    plan: Plan | Planner | None,
    timeout_s: float,
) -> dict[str, nn.Parameter]:
    """Examines the model on every rank; returns if all succeeded and agree, else raises on every rank."""
    problem: Exception | None = None
    parameters: dict[str, nn.Parameter] = {}
    try:
        parameters = examine()
    except (ValueError, RuntimeError) as error:
        problem = error
    specs = {name: TensorSpec.of(p) for name, p in parameters.items()}
    plan_text = plan.to_json() if isinstance(plan, Plan) else f"made by {getattr(plan, '__qualname__', plan)}"
    digests = f"{model_digest(specs)} {hashlib.sha256(plan_text.encode()).hexdigest()}"
    texts = exchange_texts(group, f"error {problem}" if problem else f"ready {digests}", timeout_s)
    if problem is not None:
        raise problem
    for rank, text in enumerate(texts):
        if text.startswith("error "):
            raise RuntimeError(f"rank {rank} could not attach: {text.removeprefix('error ')}")
    if len(set(texts)) > 1:
        model_lines = exchange_texts(group, "\n".join(describe_specs(specs)), timeout_s)
        plan_lines = exchange_texts(group, plan_text, timeout_s)
        raise ValueError(_first_difference(texts, model_lines, plan_lines))
    return parameters


def exchange_texts(group: Group, text: str, timeout_s: float) -> list[str]:
    """Every rank's text, by rank, as UTF-8 bytes."""
    device = torch.device("cuda", torch.cuda.current_device()) if _needs_cuda(group) else torch.device("cpu")
    mine = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8).to(device)
    sizes = group.all_gather(torch.tensor([mine.numel()], device=device)).wait(timeout_s)
    parts = group.all_gather(mine, [int(size) for size in sizes]).wait(timeout_s)
    return [bytes(part.cpu().numpy().tobytes()).decode() for part in parts]


def _needs_cuda(group: Group) -> bool:
    return isinstance(group, TorchGroup) and group.backend == "nccl"


def _first_difference(digests: list[str], models: list[str], plans: list[str]) -> str:
    """Which two ranks differ first, in what: the same text on every rank."""
    rank = next(r for r, text in enumerate(digests) if text != digests[0])
    (_, mine, my_plan), (_, other, other_plan) = digests[0].split(), digests[rank].split()
    if mine != other:
        what, texts, pair = "models", models, (mine, other)
    else:
        what, texts, pair = "plans", plans, (my_plan, other_plan)
    lines = [texts[0].splitlines(), texts[rank].splitlines()]
    longest = max(len(lines[0]), len(lines[1]))
    first, second = (part + ["(nothing)"] * (longest - len(part)) for part in lines)
    at = next(i for i in range(longest) if first[i] != second[i])
    return (
        f"the {what} differ between the ranks: rank 0 has {pair[0][:12]}, rank {rank} has {pair[1][:12]}; first "
        f"difference, line {at + 1}: rank 0 has {first[at].strip()!r}, rank {rank} has {second[at].strip()!r}"
    )


def _classes(model: nn.Module) -> set[type]:
    return {c for module in model.modules() for c in type(module).__mro__}


def matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _sparse_tables(model: nn.Module) -> frozenset[str]:
    """Names of embedding tables that announce sparse gradients."""
    return frozenset(
        f"{prefix}.weight" if prefix else "weight"
        for prefix, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    )
