"""`DistributedDataParallel`: torch's class by name, arguments and behaviour, with gradsync in place of its Reducer."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.optim import Optimizer

from ..comm import finalizer
from ..engine.guard import VERIFY_EVERY
from ..engine.plan_control import Planner
from ..inputs.settings import PositiveFinite, argument
from ..planner import AveragingPlanner
from ..plans.plan import Plan, What
from .agreement import buffers_of, exclusions
from .arguments import DEFAULT_TIMEOUT_S, require_module
from .attach import Attachment, attach
from .switching import level
from .uneven import UnevenInputs

NO_HOOKS = (
    "gradsync.DistributedDataParallel has no {what}: its argument plan= says how gradients are exchanged (a Plan, a "
    "planner, 'auto'), for example a planner.CompressingPlanner in place of a hook that compresses; for a hook of your "
    "own use torch.nn.parallel.DistributedDataParallel"
)
NO_REDUCER = (
    "gradsync.DistributedDataParallel has no Reducer; statistics are in its attachment. Where a framework asks for "
    "one, use the adapter for it (gradsync.integrations), or let it wrap the model in torch's DistributedDataParallel "
    "and call gradsync.attach(ddp_model)"
)
NOT_NEEDED = "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
SUPERSEDED = (
    "the model was wrapped in another DistributedDataParallel since, and this one synchronises no more: use that one, "
    "or wrap the model again"
)
# By model: its newest wrapper, which synchronises it.
_wrappers: weakref.WeakKeyDictionary[nn.Module, weakref.ref[DistributedDataParallel]] = weakref.WeakKeyDictionary()


class DistributedDataParallel(TorchDistributedDataParallel):
    """torch's DistributedDataParallel with gradients averaged by gradsync: a script changes one import.

    It is a subclass of torch's class, and the model is its `module`, so frameworks and checkpoints unwrap it; it has no
    Reducer. A model that is wrapped again is synchronised by its newest wrapper only. A copy, by `copy.deepcopy` or
    pickle, attaches in its first forward with gradients on, which all ranks must make; a copy with all parameters
    frozen, such as a teacher, never attaches.

    Args:
        module: the model, on one device.
        device_ids: None, or the one CUDA device of the model; inputs are moved there.
        init_sync: parameters and buffers start as rank 0's. False: they must be alike on all ranks already.
        process_group, device_mesh: the ranks that share the model; None: all.
        forward_sync_buffers: broadcast rank 0's buffers before each training forward. `broadcast_buffers` is its former
            name, and False for that leaves buffers alone from the start.
        static_graph: each backward adds to each parameter's gradient as often as the first did, which allows re-entrant
            activation checkpointing.
        delay_all_reduce_named_params, param_to_hook_all_reduce: these parameters are averaged like all others.
        plan, timeout, exclude, optimizer, grad_scaler, verify_every, verify_tolerance, communicator: as in
            `gradsync.attach`.
        find_unused_parameters: True: parameters without gradient in the backwards of a forward count as zero. False:
            the next forward raises on all ranks.
        output_device, dim: accepted without effect.
        bucket_cap_mb, bucket_cap_mb_list, gradient_as_bucket_view: accepted without effect on values: the plan decides
            on buckets, and gradients are views.
        skip_all_reduce_unused_params, batched_grad_copy: accepted without effect on values.

    Attributes:
        attachment: the result of `gradsync.attach`: plan, statistics, state for checkpoints.

    Raises:
        RuntimeError, ValueError: as `gradsync.attach`, and for `mixed_precision`, which torch.autocast replaces.

    Example:
        >>> from gradsync import DistributedDataParallel as DDP  # doctest: +SKIP
        >>> model = DDP(model)                                   # doctest: +SKIP
    """

    broadcast_bucket_size = 250 * 2**20  # bytes

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        plan: Plan | Planner | AveragingPlanner | Literal["auto"] | None = None,
        timeout: timedelta | float = DEFAULT_TIMEOUT_S,
        exclude: Sequence[str] = (),
        optimizer: Optimizer | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        verify_every: int = VERIFY_EVERY,
        verify_tolerance: float | None = None,
        communicator: Literal["own", "shared"] = "own",
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        require_module(module)
        _check_flags(static_graph, find_unused_parameters, broadcast_buffers, forward_sync_buffers, mixed_precision)
        argument("bucket_cap_mb_list", bucket_cap_mb_list, tuple[PositiveFinite, ...] | None)
        if (delay_all_reduce_named_params is None) != (param_to_hook_all_reduce is None):
            raise ValueError("delay_all_reduce_named_params and param_to_hook_all_reduce need to be set together")
        _warn_of_deprecated(check_reduction, broadcast_buffers, forward_sync_buffers)
        self.process_group, self.device_mesh = _group_of(process_group, device_mesh), device_mesh
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.device_ids, self.output_device = _devices_of(module, device_ids, output_device)
        self.dim, self.module, self.static_graph, self.mixed_precision = dim, module, static_graph, None
        self.find_unused_parameters, self.gradient_as_bucket_view = find_unused_parameters, gradient_as_bucket_view
        self.logger = None  # torch's class has its Reducer's logger here
        self.require_forward_param_sync = True  # frameworks set it; no effect, as no_sync() decides on buffers, too
        self._module_parameters = [p for n, p in module.named_parameters() if n not in self.parameters_to_ignore]
        self.bucket_bytes_cap_list = [int(mb * 2**20) for mb in bucket_cap_mb_list or ()]  # no effect: the plan decides
        keeps_buffers_apart = forward_sync_buffers is None and broadcast_buffers is False
        self.forward_sync_buffers = not keeps_buffers_apart and forward_sync_buffers is not False
        self._settings: dict[str, Any] = {"plan": plan, "timeout": timeout, "exclude": exclude}
        self._settings |= {"verify_every": verify_every, "verify_tolerance": verify_tolerance}
        self._settings["communicator"] = communicator
        self._hints: dict[str, Any] = {"optimizer": optimizer, "grad_scaler": grad_scaler}  # left out of copies
        self._attachment: Attachment | None = None
        self._synchronizes, self._local = True, ExitStack()
        self._is_superseded = False  # whether the model was wrapped again: this wrapper synchronises no more
        _supersede(_wrappers.get(module, lambda: None)())
        self._attach(init_sync=init_sync, buffers=not keeps_buffers_apart)

    def _attach(self, *, init_sync: bool, buffers: bool) -> None:
        """Calls `gradsync.attach` on the module, on all ranks at once; `buffers`: buffers start as rank 0's."""
        if isinstance(self.module, DistributedDataParallel):  # which averages; once is enough
            self.module._require_attached()
            self._attachment = self.module._attachment
            return
        self._attachment = attachment = attach(
            self.module,
            process_group=self.process_group,
            broadcast_buffers=self.forward_sync_buffers,
            init_sync=init_sync,
            static_graph=self.static_graph,
            find_unused_parameters=self.find_unused_parameters or self.static_graph,
            **self._settings,
            **self._hints,
        )
        with ExitStack() as on_error:
            on_error.callback(attachment.detach)
            if not any(parameter.requires_grad for parameter in self._module_parameters):
                raise RuntimeError(NOT_NEEDED)
            if init_sync and buffers and not self.forward_sync_buffers:
                exclude = exclusions(self.module, self._settings["exclude"])
                level(attachment._engine, list(buffers_of(self.module, exclude).values()))
            on_error.pop_all()
        finalizer(self, attachment.detach).atexit = False
        _wrappers[self.module] = weakref.ref(self)
        self.require_backward_grad_sync = self._synchronizes

    @property
    def attachment(self) -> Attachment:
        """The attachment that `gradsync.attach` returned for the model: plan, statistics, state for checkpoints.

        Raises:
            RuntimeError: for a copy that has made no forward yet.
        """
        if self._attachment is None:
            raise RuntimeError("this copy of a DistributedDataParallel attaches in its first forward with gradients on")
        return self._attachment

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        device: torch.device = next(self.module.parameters()).device
        return device

    @property
    def device_type(self) -> str:
        """The type of the model's device, such as "cuda"."""
        return self.device.type

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Calls the model, with inputs moved to its device."""
        if torch.is_grad_enabled():
            self._require_attached()
        if self.device_ids:
            moved = _to_kwargs(inputs, kwargs, torch.device(self.device_type, self.device_ids[0]), True)
            inputs, kwargs = moved[0][0], moved[1][0]
        return self.module(*inputs, **kwargs)

    def _require_attached(self) -> None:
        if self._is_superseded:
            raise RuntimeError(SUPERSEDED)
        if self._attachment is None and any(parameter.requires_grad for parameter in self._module_parameters):
            self._attach(init_sync=False, buffers=False)

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the backward of the next forward synchronises gradients; False inside `no_sync`."""
        return self._synchronizes

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, wanted: bool) -> None:
        self._synchronizes = bool(wanted)
        self._local.close()
        if not wanted and self._attachment is not None:
            self._local.enter_context(self._attachment.no_sync())

    def _set_static_graph(self) -> None:
        """Attaches again with `static_graph=True`; call it on all ranks, before the first backward."""
        self.static_graph = True
        self.attachment.detach()
        self._attach(init_sync=False, buffers=False)

    def _remove_autograd_hooks(self) -> None:
        """Ends the synchronisation of the model on this rank."""
        self.attachment.detach()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Returns the hook that `torch.distributed.algorithms.Join` calls on ranks without further inputs.

        Such a rank then contributes zeros to the others' gradients. `kwargs`: the arguments of `Join`, which calls
        this.
        """
        self._require_attached()
        joinable = self.attachment.joinable
        assert isinstance(joinable, UnevenInputs)
        return joinable.hook_of(self, **kwargs)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> NoReturn:
        """Raises, as communication hooks are not supported.

        Raises:
            RuntimeError: always; the message says what to do instead.
        """
        raise RuntimeError(NO_HOOKS.format(what="communication hooks"))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> NoReturn:
        raise RuntimeError(NO_HOOKS.format(what="communication hooks"))

    def _register_buffer_comm_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(NO_HOOKS.format(what="hooks for buffers"))

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Returns an empty dict, as there is no Reducer; Lightning's DDPStrategy asks for it when training ends."""
        return {}

    def _register_fused_optim(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(NO_HOOKS.format(what="optimiser inside backward"))

    def __getattr__(self, name: str) -> Any:
        if name == "reducer":
            raise AttributeError(NO_REDUCER)
        return super().__getattr__(name)

    def __getstate__(self) -> dict[str, Any]:
        """Returns everything except what belongs to this process: the attachment and the process group.

        Raises:
            RuntimeError: if the plan averages parameters; as torch's class, for any process group but the default one.
        """
        if self.process_group != dist.group.WORLD:
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group"
            )
        if self._attachment is not None and self._attachment.plan.what is not What.GRADIENT:
            raise RuntimeError("a plan of parameters belongs to one optimiser: copy the module, then wrap the copy")
        left_out = {"process_group", "device_mesh", "_attachment", "_local", "_hints", "_join_config"}
        return {key: value for key, value in self.__dict__.items() if key not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)
        Joinable.__init__(self)
        self.process_group, self.device_mesh = _group_of(None, None), None
        self._attachment, self._local, self._hints = None, ExitStack(), {}


def _check_flags(
    static_graph: object,
    find_unused_parameters: object,
    broadcast_buffers: object,
    forward_sync_buffers: object,
    mixed_precision: object,
) -> None:
    if mixed_precision is not None:
        raise ValueError("mixed_precision is not supported: use torch.autocast, or module.to(torch.bfloat16)")
    argument("static_graph", static_graph, bool)
    argument("find_unused_parameters", find_unused_parameters, bool)
    argument("broadcast_buffers", broadcast_buffers, bool | None)
    argument("forward_sync_buffers", forward_sync_buffers, bool | None)


def _warn_of_deprecated(
    check_reduction: bool, broadcast_buffers: bool | None, forward_sync_buffers: bool | None
) -> None:
    """Warns of deprecated arguments as torch does: torch 2.11 knows `broadcast_buffers` alone, and does not."""
    if check_reduction:
        warnings.warn("check_reduction is deprecated and has no effect", FutureWarning, stacklevel=3)
    replaced = "forward_sync_buffers" in inspect.signature(TorchDistributedDataParallel).parameters
    if broadcast_buffers is None or (forward_sync_buffers is None and not replaced):
        return
    text = (
        "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead, which leaves buffers alone in forwards "
        "only, not at the start."
        if forward_sync_buffers is None
        else "Both `broadcast_buffers` and `forward_sync_buffers` were specified; `broadcast_buffers` is ignored."
    )
    warnings.warn(text, FutureWarning, stacklevel=3)


def _group_of(process_group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None) -> Any:
    if device_mesh is None:
        return dist.group.WORLD if process_group is None else process_group
    if process_group is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
    return device_mesh.get_group(mesh_dim=0)


def _devices_of(
    module: nn.Module, device_ids: Sequence[int | torch.device] | None, output_device: int | torch.device | None
) -> tuple[list[int] | None, Any]:
    """Returns ([index of the device that inputs are moved to], device of the output), or (None, None)."""
    argument("device_ids", device_ids, tuple[int | torch.device, ...] | None)
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(f"device_ids can only be None or contain a single element, got {list(device_ids)}")
    kinds = {parameter.device.type for parameter in module.parameters()}
    if kinds <= {"cpu"} and (device_ids or output_device is not None):
        raise ValueError(
            f"device_ids and output_device are for a module on one GPU, got device_ids {device_ids}, output_device "
            f"{output_device} and a module on the CPU: leave them out"
        )
    if not device_ids:
        return None, None
    index = device_ids[0].index if isinstance(device_ids[0], torch.device) else int(device_ids[0])
    return [index], index if output_device is None else output_device


def _supersede(earlier: DistributedDataParallel | None) -> None:
    """Detaches an earlier wrapper of a model that is wrapped again; its next forward with gradients on raises."""
    if earlier is not None and earlier._attachment is not None:
        earlier._is_superseded = True
        earlier._attachment.detach()
