"""Process groups of `torch.distributed` that only their members make, by a name that the members share."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

CPU = torch.device("cpu")
GLOO_SHARED = "gradsync_gloo"  # the backend of communicators that share gloo's devices with another process group
THREADS_A_DEVICE = 2  # as torch has by default
_naming = threading.Lock()  # several threads may make communicators


def is_open(communicator: dist.ProcessGroup) -> bool:
    """Whether this process group of gradsync's still exists: the user's `destroy_process_group()` ends all of them."""
    return dist.is_initialized() and communicator in distributed_c10d._world.pg_map


def backend_for(process_group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Returns the name of the backend that a process group (None: the default one) has for tensors on the device.

    `init_process_group()` without a backend takes one for each kind of device, as "cpu:gloo,cuda:nccl" does.

    Raises:
        ValueError: if it has none.
    """
    config = dist.get_backend_config(process_group)
    backends = dict(entry.split(":", 1) for entry in config.split(","))
    if device.type not in backends:
        raise ValueError(
            f"the parameters are on {device}, and the process group has no backend for that: its backends are "
            f"{config}; call torch.distributed.init_process_group() without a backend, or with one for "
            f"{device.type!r}"
        )
    return backends[device.type]


def gloo_devices(process_group: dist.ProcessGroup | None, device: torch.device) -> Sequence[Any]:
    """Returns gloo's devices, each a network interface and a thread, of a process group (None: the default one).

    They are those for tensors on the CPU, `device`. Empty for another device, where the process group has another
    backend for the CPU, and where torch checks each operation (TORCH_DISTRIBUTED_DEBUG=DETAIL).
    """
    if device.type != CPU.type or not dist.is_gloo_available():
        return ()
    backend = (process_group or distributed_c10d._get_default_group())._get_backend(CPU)
    if not isinstance(backend, dist.ProcessGroupGloo):
        return ()
    options: Any = backend.options
    devices: Sequence[Any] = options._devices
    return devices


def new_communicator(
    backend: str, members: tuple[int, ...], rank: int, timeout_s: float, name: str, devices: Sequence[Any] = ()
) -> dist.ProcessGroup:
    """Makes a process group of these members with this backend; only the members need to call this, all of them.

    Args:
        backend: the name, as `backend_for` returns it.
        members: the global ranks.
        rank: the index of this process among the members.
        timeout_s: seconds that making it, and later each of its operations, may take.
        name: a name that is the same on all members, and used for no other process group.
        devices: those of gloo that the communicator shares, for tensors on the CPU; (): it has its own. The thread of
            a device wakes up 100 times a second, also where nothing is exchanged.

    Raises:
        RuntimeError: where the members do not connect in time.
    """
    # new_group(use_local_synchronization=True) names the group by how many groups a rank is in: members of different
    # numbers of groups would wait for each other. So this calls what new_group ends with.
    made: dist.ProcessGroup
    with ExitStack() as stack:
        its_backend, options = backend, None
        if devices:
            its_backend, options = GLOO_SHARED, (devices, stack.enter_context(_known_backend()))
        made, _ = distributed_c10d._new_process_group_helper(
            len(members),
            rank,
            list(members),
            its_backend,
            distributed_c10d._get_default_store(),
            name,  # type: ignore[arg-type]  # a NewType of str in some versions
            options,
            timeout=timedelta(seconds=timeout_s),
        )
    distributed_c10d._world.pg_group_ranks[made] = {member: place for place, member in enumerate(members)}
    return made


@contextmanager
def _known_backend() -> Iterator[Callable[[], None]]:
    """Makes torch know the backend `GLOO_SHARED`, and yields the function that ends it; so does the end of the block.

    Groups that other threads make meanwhile would get other defaults, as torch then has a backend beside its own: so it
    ends before this thread waits for other members. One thread at a time has it.
    """
    plugins: Any = dist.Backend._plugins
    held = _naming.acquire()

    def end() -> None:
        nonlocal held
        if held:
            held = False
            del plugins[GLOO_SHARED.upper()]
            _naming.release()

    if GLOO_SHARED in dist.Backend.backend_list:
        plugins[GLOO_SHARED.upper()] = dist.Backend._BackendPlugin(_gloo_sharing, True)
    else:
        dist.Backend.register_backend(GLOO_SHARED, _gloo_sharing, extended_api=True, devices=[CPU.type])
    try:
        yield end
    finally:
        end()


def _gloo_sharing(made: Any, options: tuple[Sequence[Any], Callable[[], None]]) -> Any:
    """Returns gloo for one process group, as torch asks for it, that shares the devices of another.

    `options`: these devices, and what is to be called before this waits for other members.
    """
    devices, known_no_longer = options
    known_no_longer()
    gloo: Any = dist.ProcessGroupGloo
    own = gloo._Options()
    own._devices, own._timeout = list(devices), made.timeout
    own._threads = THREADS_A_DEVICE * len(devices)
    return gloo(made.store, made.group_rank, made.group_size, own)


def set_patience(communicator: dist.ProcessGroup, patience_s: float) -> None:
    """Sets after how many seconds the backend of a process group aborts operations; only gloo and NCCL do so."""
    if dist.get_backend(communicator) in ("gloo", GLOO_SHARED, "nccl"):
        distributed_c10d._set_pg_timeout(timedelta(seconds=patience_s), communicator)


def destroy(communicator: dist.ProcessGroup, *, hanging: bool) -> None:
    """Destroys a process group that gradsync made; `hanging`: some of its operations may not have ended."""
    if not is_open(communicator):
        return
    if hanging and dist.get_backend(communicator) == "nccl":  # to destroy it would wait for what hangs
        distributed_c10d._abort_process_group(communicator)
        return
    dist.destroy_process_group(communicator)
    if hanging:
        # gloo cannot cancel operations: the destructor would wait for their timeouts, in any line that collects
        # garbage or at exit. So the destructor never runs; the end of the process releases what is left.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(communicator))


def keys_of(name: str, size: int) -> Iterator[str]:
    """Yields the keys of the store under which members of a gloo process group left their addresses, to delete them.

    `name`, `size`: the process group's name, and the number of its members.
    """
    for rank in range(size):
        yield f"{name}//cpu//0/{rank}"
        yield f"{name}//cuda//0/{rank}"
