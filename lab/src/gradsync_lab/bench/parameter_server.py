"""Parameter servers: asynchronous training (ASP), and asynchronous training with bounded staleness (SSP).

ASP and SSP emulate other systems here and are re-implemented for comparison. Every rank is a worker and serves a stripe
of the parameters. After its backward a worker pushes to each server its stripe of the gradients, and copies the
parameters that the servers return. A server steps its stripe once for each push, in the order in which pushes arrive.

In ASP no worker waits for another. In SSP a worker that is ahead of the slowest one by more steps than a bound gets its
answers when the slowest has caught up (Ho et al., 2013). Wire: 2 (N-1)/N times the parameters in each direction per
rank and step, once as gradients and once as parameters, dense, after backward and not during it.
"""

from __future__ import annotations

import inspect
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from .rivals import Rival, average_, flattened, float_buffers, put

USUAL_STALENESS = 3  # of SSP
IDLE_S = 30 * 86400.0  # servers wait for pushes as long as others train; a rank that ends closes the connection
END_S = 2.0  # time for the threads to end once the other ranks close their connections
KINDS: tuple[type[Optimizer], ...] = (SGD, Adagrad, Adam, AdamW)


def divide_steps(kind: type[Optimizer], groups: Sequence[dict[str, Any]], pushes: int) -> float:
    """Scales settings so that `pushes` steps by one gradient each move as far as one step by the mean of all.

    Learning rates are divided by `pushes`. With SGD that equals dividing gradients and weight decay: plain summed
    asynchronous SGD. Adagrad keeps its rate, as its sums of squares grow with each push: there the gradients are
    divided, so that sums and steps are as large as those by mean gradients.

    Args:
        groups: parameter groups of an optimiser of this kind, with all settings, which are overwritten.

    Returns:
        The factor to multiply gradients by.

    Raises:
        ValueError: the optimiser is none of `KINDS`, for which the rule is known.
    """
    if kind not in KINDS:
        known = ", ".join(each.__name__ for each in KINDS)
        raise ValueError(
            f"a parameter server steps stripes of the parameters, one worker's gradients at a time, by {known}; "
            f"got {kind.__name__}"
        )
    for group in groups:
        for setting in ("weight_decay", "lr_decay") if kind is Adagrad else ("lr",):
            group[setting] /= pushes
    return 1 / pushes if kind is Adagrad else 1.0


class Server:
    """A parameter server's stripe of the parameters and its optimiser; a thread per worker calls it, one at a time."""

    def __init__(self, stripe: Tensor, optimizer: Optimizer | None, workers: int, staleness: int | None) -> None:
        self.clocks = [0] * workers  # pushes of each worker
        self._stripe, self._optimizer, self._staleness = stripe, optimizer, staleness
        self._closed = False
        self._turn = threading.Condition()
        self._gradient = torch.zeros_like(stripe)
        for group in optimizer.param_groups if optimizer is not None else ():
            for part in group["params"]:
                start = part.storage_offset() - stripe.storage_offset()
                part.grad = self._gradient[start : start + part.numel()]

    @torch.no_grad()
    def push(self, worker: int, gradient: Tensor) -> None:
        """Makes one optimiser step with a worker's gradient, (stripe,) float32."""
        with self._turn:
            if self._optimizer is not None:
                self._gradient.copy_(gradient)
                self._optimizer.step()
            self.clocks[worker] += 1
            self._turn.notify_all()

    def pull(self, worker: int, out: Tensor, timeout_s: float | None = None) -> bool:
        """Copies the parameters to `out`, (stripe,) float32, once the worker is within the staleness bound.

        Returns:
            False if the worker is still too far ahead after `timeout_s`, or the server closes.
        """
        with self._turn:
            if not self._turn.wait_for(lambda: self._closed or self._may_go_on(worker), timeout_s) or self._closed:
                return False
            out.copy_(self._stripe)
            return True

    def read(self, out: Tensor) -> None:
        """Overwrites `out`, (stripe,) float32, with the current parameters."""
        with self._turn:
            out.copy_(self._stripe)

    def _may_go_on(self, worker: int) -> bool:
        return self._staleness is None or self.clocks[worker] - min(self.clocks) <= self._staleness

    def close(self) -> None:
        """Closes the server, which makes all waiting `pull` calls return False."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()


class ParameterServers(Rival):
    """Emulates ASP or, with a bound on staleness, SSP: replaces the optimiser's steps on one model.

    Gradients are pushed when the optimiser is about to step, and `param.grad` is None then, so that the optimiser does
    nothing itself. Servers begin without momentum, and with the optimiser's rates at the start. A parameter without a
    gradient counts as one with a zero gradient. Where all rates are 0, as with emulated computation, servers step
    nothing.

    Each worker talks to each server on a process group of the two, used by one thread on either side: two threads on
    one communicator of gloo read each other's messages.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, timeout: timedelta, *, staleness: int | None = None
    ) -> None:
        self._model, self._timeout_s, self._staleness = model, timeout.total_seconds(), staleness
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        groups = [
            {**group, "params": [p for p in group["params"] if p.requires_grad]} for group in optimizer.param_groups
        ]
        self._parameters: list[nn.Parameter] = [p for group in groups for p in group["params"]]
        if {(p.dtype, p.device.type) for p in self._parameters} != {(torch.float32, "cpu")}:
            found = sorted({f"{p.dtype} on {p.device.type}" for p in self._parameters})
            raise ValueError(f"parameter servers hold float32 on the CPU, got {', '.join(found) or 'no parameters'}")
        self._numels = [p.numel() for p in self._parameters]
        self._stripe_numel = -(-sum(self._numels) // self._size)
        stripe = torch.zeros(self._stripe_numel)
        stepped, self._scale = _of_stripe(optimizer, groups, stripe, self._rank * self._stripe_numel, self._size)
        self._server = Server(stripe, stepped, self._size, staleness)
        self._step = 0
        self._gradient = torch.zeros(self._size, self._stripe_numel)
        self._answer = torch.zeros(self._size, self._stripe_numel)
        self._everyone: dist.ProcessGroup = dist.new_group(timeout=timeout)
        self._level(stripe)
        self._servers, threads = self._connect(timeout)
        self._hook = optimizer.register_step_pre_hook(self._before_step)
        self._release = weakref.finalize(self, _close, self._server, self._everyone, self._servers, threads)

    def _level(self, stripe: Tensor) -> None:
        """Copies rank 0's model to all ranks, and each server's part of its parameters to `stripe`."""
        for tensors in (self._parameters, float_buffers(self._model)):
            if tensors:
                flat = flattened(tensors)
                dist.broadcast(flat, 0, group=self._everyone)
                put(flat, tensors)
        start = self._rank * self._stripe_numel
        mine = flattened(self._parameters)[start : start + self._stripe_numel]
        stripe[: mine.numel()] = mine

    def _connect(self, timeout: timedelta) -> tuple[dict[int, dist.ProcessGroup], list[threading.Thread]]:
        """Returns this worker's connection to each server, and the threads that serve the other workers."""
        servers: dict[int, dist.ProcessGroup] = {}
        threads = []
        for server in range(self._size):  # all ranks make all groups, in one order
            for worker in range(self._size):
                if worker == server:
                    continue
                group = dist.new_group([worker, server], timeout=timeout)
                if self._rank == worker:
                    servers[server] = group
                elif self._rank == server:
                    arguments = (self._server, worker, group, self._stripe_numel, self._timeout_s)
                    threads.append(threading.Thread(target=_serve, args=arguments, daemon=True))
        for thread in threads:
            thread.start()
        return servers, threads

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Pushes the gradients to the servers and overwrites the model with their parameters; an optimiser pre-hook."""
        parts = self._gradient.view(-1)[: sum(self._numels)].split(self._numels)
        for parameter, part in zip(self._parameters, parts, strict=True):
            if parameter.grad is None:
                part.zero_()
            else:
                torch.mul(parameter.grad.reshape(-1), self._scale, out=part)
                parameter.grad = None
        self._exchange()
        put(self._answer.view(-1), self._parameters)
        self._step += 1

    def _exchange(self) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        failures: dict[int, str] = {}
        # Push
        works = [_issue(dist.isend, self._gradient[server], server, group) for server, group in self._servers.items()]
        # Pull
        works += [_issue(dist.irecv, self._answer[server], server, group) for server, group in self._servers.items()]
        self._server.push(self._rank, self._gradient[self._rank])
        if not self._server.pull(self._rank, self._answer[self._rank], self._timeout_s):
            clocks = self._server.clocks
            slowest = clocks.index(min(clocks))
            failures[self._rank] = (
                f"rank {self._rank} is {clocks[self._rank] - clocks[slowest]} steps ahead of rank {slowest}, which did "
                f"not come further within {self._timeout_s:g} s"
            )
        for server, work in zip((*self._servers, *self._servers), works, strict=True):
            # Wait to the end, also after a failure: gloo writes into the answers until then.
            if (failure := _failure(work, deadline_s)) is not None:
                failures.setdefault(server, f"no answer from the server on rank {server}: {failure}")
        if failures:
            raise RuntimeError(f"step {self._step}: {next(iter(failures.values()))}")

    def consensus(self) -> None:
        """Sets every rank's model to the servers' parameters, and its float buffers to their mean over the ranks."""
        # A step ends with the answers to its pushes: when all ranks are here, no message is on its way.
        dist.barrier(group=self._everyone)
        self._server.read(mine := torch.empty(self._stripe_numel))
        dist.all_gather(list(self._answer.unbind()), mine, group=self._everyone)
        put(self._answer.view(-1), self._parameters)
        average_(float_buffers(self._model), self._everyone)

    def detach(self) -> None:
        """Closes the connections; this rank serves other workers no longer."""
        self._hook.remove()
        self._release()

    def explain(self) -> list[str]:
        bound = "" if self._staleness is None else f", {self._staleness} steps ahead of the slowest at most"
        return [f"{self._size} servers of {self._stripe_numel:,} parameters each, a step for each worker's push{bound}"]


def parameter_servers(
    model: nn.Module, optimizer: Optimizer, timeout: timedelta, *, staleness: int | None
) -> tuple[nn.Module, ParameterServers]:
    """Starts parameter servers for the model; returns the model unchanged, and the object that synchronises it.

    Args:
        staleness: SSP's bound in steps; None: ASP.
    """
    return model, ParameterServers(model, optimizer, timeout, staleness=staleness)


def _of_stripe(
    optimizer: Optimizer, groups: Sequence[dict[str, Any]], stripe: Tensor, start: int, pushes: int
) -> tuple[Optimizer | None, float]:
    """Returns an optimiser of `optimizer`'s class for the stripe, and the factor for gradients before they are pushed.

    The optimiser is None if the stripe has no parameters to step, or all rates are 0. `start` is the place of the
    stripe's first element among those of all parameters. Settings in `groups` are scaled for `pushes` steps in place
    of one, see `divide_steps`.
    """
    if all(group["lr"] == 0 for group in groups):
        return None, 1.0
    scale = divide_steps(type(optimizer), groups, pushes)
    of_stripe, end = [], -start
    for group in groups:
        begin, end = end, end + sum(p.numel() for p in group["params"])
        part = stripe[max(begin, 0) : max(end, 0)]
        if part.numel():
            of_stripe.append({**group, "params": [nn.Parameter(part)]})
    asks = inspect.signature(type(optimizer)).parameters
    settings = {name: value for name, value in optimizer.defaults.items() if name in asks}
    return type(optimizer)(of_stripe, **settings) if of_stripe else None, scale


def _serve(server: Server, worker: int, group: dist.ProcessGroup, numel: int, timeout_s: float) -> None:
    """Receives one worker's pushes and sends parameters back, until the worker closes the connection."""
    gradient, answer = torch.empty(numel), torch.empty(numel)
    while _failure(_issue(dist.irecv, gradient, worker, group), time.monotonic() + IDLE_S) is None:
        server.push(worker, gradient)
        if not server.pull(worker, answer):
            break
        if _failure(_issue(dist.isend, answer, worker, group), time.monotonic() + timeout_s) is not None:
            break
    _end(group)


def _issue(operation: Callable[..., Any], tensor: Tensor, peer: int, group: dist.ProcessGroup) -> Any:
    """Issues `dist.isend` or `dist.irecv`; returns its work, or the error if the connection is closed."""
    try:
        return operation(tensor, peer, group=group)
    except RuntimeError as error:
        return error


def _failure(work: Any, deadline_s: float) -> str | None:
    """Waits until issued work ends; returns the error message if it failed."""
    try:
        if isinstance(work, RuntimeError):
            raise work
        work.wait(timedelta(seconds=max(deadline_s - time.monotonic(), 1e-3)))
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def _end(group: dist.ProcessGroup) -> None:
    """Destroys the process group, unless all groups were destroyed before."""
    if dist.is_initialized() and group in distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)


def _close(
    server: Server,
    everyone: dist.ProcessGroup,
    servers: dict[int, dist.ProcessGroup],
    threads: Sequence[threading.Thread],
) -> None:
    """Closes this rank's server and connections, which also ends the threads that serve it on other ranks."""
    server.close()
    _end(everyone)
    while servers:
        _end(servers.popitem()[1])
    deadline_s = time.monotonic() + END_S
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(deadline_s - time.monotonic(), 0.0))
