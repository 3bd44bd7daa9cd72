"""`Lab`, an emulated cluster: builds a scenario's namespaces, starts ranks in them, measures links, causes faults."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import IO, Any, BinaryIO

from .awake import awake
from .counters import NODE_INTERFACE
from .disturb import disturbances
from .keeper import tbf
from .processors import confined, shares_of_nodes
from .scenario import UNSHAPED, Scenario, rate_bytes_per_s

HERE = Path(__file__).parent
MASTER_PORT = 29511  # free in a fresh namespace
PROBE_PORT = 29600
BACKGROUND_PORT = 29700
PINGS = 50
FOREVER_S = 1e7
GRACE_S = 10.0  # after one rank failed, the others get this long to end by themselves
ECHO_PATIENCE_S = 2.0  # for output after a rank's end; processes that the rank left running may hold its pipe open
CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21


class LabUnavailableError(RuntimeError):
    """Raised where this machine, or this user, cannot make network namespaces; the text says what is missing."""


DEFAULT_ENVIRONMENT = {  # environment variables of a rank, unless set
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # torch warns that a node's address has no host name
}


@dataclass(frozen=True)
class LinkRate:
    """The measured rate from one node to another while all other links are loaded too."""

    source: int
    target: int
    configured_bytes_per_s: float | None
    measured_bytes_per_s: float
    round_trip_s: float


class Lab:
    """An emulated cluster, as a context manager: built on entry, removed on exit, also when this process is killed.

    Works as root, and as an ordinary user where user namespaces are allowed (there the ranks see themselves as root);
    `user_namespace=True` uses a user namespace as root too. Any number of labs can exist at once. On exit every process
    that still runs in the nodes is killed. While the lab exists, a virtual machine's processors are kept awake
    (`awake.py`). The machine's processors are divided among the nodes where they divide evenly (`processors.py`).

    Raises:
        LabUnavailableError: on entry, saying what is missing and how to get it.

    Example:
        >>> with Lab(Scenario(nodes=4, link="1gbit")) as lab:       # doctest: +SKIP
        ...     codes = lab.run([sys.executable, "train.py"])
    """

    def __init__(self, scenario: Scenario, *, user_namespace: bool | None = None) -> None:
        self.scenario = scenario
        self.addresses = [f"10.77.0.{node + 1}" for node in range(scenario.nodes)]
        self.ranks: dict[int, subprocess.Popen[Any]] = {}
        self.first_failed: int | None = None  # rank that failed first in the latest `run`
        self._user_namespace = user_namespace
        self._keeper: subprocess.Popen[str] | None = None
        self._talk = threading.Lock()
        self._pids: list[int] = []
        self._observed: dict[str, Any] = {}
        self._processors = shares_of_nodes(scenario.nodes)
        self._awake, self._disturbances = ExitStack(), ExitStack()
        self._is_awake = False
        self._flows: dict[tuple[int, int], list[subprocess.Popen[Any]]] = {}
        self._flow_ports = count(BACKGROUND_PORT)

    def __enter__(self) -> Lab:
        self._require_linux()
        if self._user_namespace is None:
            self._user_namespace = not _may_make_networks()
        keep = [sys.executable, str(HERE / "keeper.py"), "keep"]
        self._keeper = subprocess.Popen(keep, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            built = self._tell(self._specification())
        except RuntimeError as error:
            self._close()
            raise LabUnavailableError(_advice(str(error))) from None
        self._pids, self._observed = built["pids"], built["observed"]
        self._is_awake = self._awake.enter_context(awake())
        for source, target, rate in self.scenario.background:
            self.start_background(source, target, rate)
        self._disturbances.enter_context(disturbances(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._disturbances.close()
        finally:
            for process in [*self.ranks.values(), *(p for flow in self._flows.values() for p in flow)]:
                end(process)
            self._close()

    # Processes.

    def spawn(
        self, rank: int, argv: Sequence[str], env: Mapping[str, str] | None = None, **popen: Any
    ) -> subprocess.Popen[Any]:
        """Starts a rank on its node, with the environment variables that torchrun would set.

        The process dies with the thread that started it.

        Args:
            popen: further arguments of `subprocess.Popen`.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.scenario.world_size:
            raise ValueError(f"there is no rank {rank}: the ranks are 0..{self.scenario.world_size - 1}")
        node = rank // self.scenario.ranks_per_node
        environment = {**DEFAULT_ENVIRONMENT, **os.environ, **self._torchrun(rank), **(env or {})}
        with confined(self._processors, node):
            process = self._start(node, argv, env=environment, **popen)
        self.ranks[rank] = process
        return process

    def door(self, node: int) -> tuple[int, int]:
        """Returns the arguments of `keeper.go_inside` for a process that shall move into the node by itself."""
        assert self._keeper is not None
        return self._keeper.pid if self._user_namespace else 0, self._pids[self._known(node)]

    def run(
        self, argv: Sequence[str], env: Mapping[str, str] | None = None, timeout_s: float | None = None
    ) -> list[int]:
        """Runs a command as every rank, prints the ranks' output behind `[rank]`, and returns their exit codes.

        All output goes where `sys.stdout` is now, also that of processes which ranks leave running.
        When a rank fails, the others get `GRACE_S` seconds to end by themselves and are then killed; after `timeout_s`,
        all are killed at once. `first_failed` then is the rank that failed first; None when all went well or the time
        was up.
        """
        ranks = [
            self.spawn(rank, argv, env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            for rank in range(self.scenario.world_size)
        ]
        to = sys.stdout.buffer
        echoes = [
            threading.Thread(target=_echo, args=(rank, p.stdout, to), daemon=True) for rank, p in enumerate(ranks)
        ]
        for thread in echoes:
            thread.start()
        self.first_failed = first_failure(ranks, timeout_s)
        deadline = time.monotonic() + (0.0 if self.first_failed is None else GRACE_S)
        for process in ranks:
            end(process, patience_s=_until(deadline))
        deadline = time.monotonic() + ECHO_PATIENCE_S
        for thread in echoes:
            thread.join(_until(deadline))
        return [process.returncode for process in ranks]

    # Measurement.

    def check(self, seconds: float = 3.0) -> list[LinkRate]:
        """Loads every link in both directions at once; returns the rates that arrive, and round trips of idle links.

        Args:
            seconds: how long the links are loaded.

        Raises:
            ValueError: the lab has fewer than two nodes.
        """
        n = self.scenario.nodes
        if n < 2:
            raise ValueError("a check needs at least two nodes")
        targets = [(node + 1) % n for node in range(n)]
        with ExitStack() as stack:
            receivers = [stack.enter_context(self._probe(t, "receive", PROBE_PORT, seconds)) for t in targets]
            for source, target in enumerate(targets):
                stack.enter_context(self._probe(source, "send", self.addresses[target], PROBE_PORT, seconds, 0))
            rates = [_figure(receiver) for receiver in receivers]
        trips = [self._round_trip_s(source, target) for source, target in enumerate(targets)]
        return [
            LinkRate(source, target, self._slowest(source, target), rates[source], trips[source])
            for source, target in enumerate(targets)
        ]

    def uplink_bytes(self) -> list[tuple[int, int]]:
        """Returns the (sent, received) bytes of each rack over the trunk until now; empty where there is one rack."""
        return [(sent, received) for sent, received in self._tell({"do": "uplinks"})["uplinks"]]

    def describe(self) -> dict[str, Any]:
        """Returns the links' settings, for a record.

        Congestion control and off-loads were read in node 0 when the lab was built.
        """
        shapers = {
            rate: tbf(value)
            for rate in {self.scenario.link, *self.scenario.slow.values(), self.scenario.trunk or UNSHAPED}
            if (value := rate_bytes_per_s(rate)) is not None
        }
        return {
            "links": {k: v for k, v in asdict(self.scenario).items() if v not in (None, {}, (), 0)},
            "shaping": {"kind": "tbf, both directions", **{rate: shapers[rate] for rate in sorted(shapers)}},
            "congestion_control": self._observed.get("congestion_control"),
            "segmentation_offload": self._observed.get("segmentation_offload"),
            "lab": "user namespace" if self._user_namespace else "root",
            "kernel": platform.release(),
            "processors_kept_awake": self._is_awake,
            "processors_of_nodes": self._processors,
        }

    # Faults while a job runs.

    def link_down(self, node: int) -> None:
        """Disconnects the node from the network."""
        self._tell({"do": "down", "node": self._known(node)})

    def link_up(self, node: int) -> None:
        """Reconnects the node; connections that did not give up meanwhile go on after TCP's next retransmission."""
        self._tell({"do": "up", "node": self._known(node)})

    def set_rate(self, node: int, rate: str) -> None:
        """Changes the rate of the node's link in both directions; `unshaped` removes the limit."""
        self._tell({"do": "rate", "node": self._known(node), "rate": rate_bytes_per_s(rate)})

    def set_loss(self, node: int, share: float) -> None:
        """Makes the node's link lose this share of the packets at random, in both directions; 0 loses none.

        Raises:
            ValueError: for a share outside of [0, 1).
            RuntimeError: where the kernel has no nftables for bridges.
        """
        if not 0 <= share < 1:
            raise ValueError(f"a link loses a share of its packets in [0, 1), got {share}")
        self._tell({"do": "loss", "node": self._known(node), "share": share})

    def start_background(self, source: int, target: int, rate: str) -> None:
        """Starts a TCP flow of this rate (`unshaped`: unlimited), until `stop_background` or the end of the lab."""
        if (self._known(source), self._known(target)) in self._flows:
            raise ValueError(f"background traffic {source}->{target} runs already: stop it first")
        port = next(self._flow_ports)
        pace = rate_bytes_per_s(rate) or 0
        receiver = self._start(target, self._probe_argv("receive", port, FOREVER_S), stdout=subprocess.DEVNULL)
        sender = self._start(source, self._probe_argv("send", self.addresses[target], port, FOREVER_S, pace))
        self._flows[source, target] = [sender, receiver]

    def stop_background(self, source: int, target: int) -> None:
        if (source, target) not in self._flows:
            raise ValueError(f"there is no background traffic {source}->{target} to stop")
        for process in self._flows.pop((source, target)):
            end(process)

    def pause(self, rank: int) -> None:
        """Stops a rank (SIGSTOP), as a process stops that is swapped out or debugged."""
        self.ranks[rank].send_signal(signal.SIGSTOP)

    def resume(self, rank: int) -> None:
        self.ranks[rank].send_signal(signal.SIGCONT)

    def kill(self, rank: int) -> None:
        self.ranks[rank].kill()

    # Implementation.

    @staticmethod
    def _require_linux() -> None:
        if not sys.platform.startswith("linux"):
            raise LabUnavailableError(f"the lab needs Linux's network namespaces, this is {sys.platform}")
        try:
            import pyroute2  # noqa: F401 (the keeper needs it; here it can be said how to get it)
        except ImportError:
            raise LabUnavailableError("the lab needs pyroute2: pip install pyroute2") from None

    def _known(self, node: int) -> int:
        if not 0 <= node < self.scenario.nodes:
            raise ValueError(f"there is no node {node}: the nodes are 0..{self.scenario.nodes - 1}")
        return node

    def _specification(self) -> dict[str, Any]:
        nodes = range(self.scenario.nodes)
        return {
            "root": not self._user_namespace,
            "nodes": self.scenario.nodes,
            "racks": self.scenario.racks,
            "rack_of": [self.scenario.rack_of(node) for node in nodes],
            "trunk": rate_bytes_per_s(self.scenario.trunk or UNSHAPED),
            "rates": [self.scenario.rate_of(node) for node in nodes],
            "addresses": self.addresses,
            "interface": NODE_INTERFACE,
        }

    def _tell(self, what: dict[str, Any]) -> dict[str, Any]:
        keeper = self._keeper
        if keeper is None or keeper.stdin is None or keeper.stdout is None:
            raise RuntimeError("the lab is not entered: use it in a with statement")
        try:
            with self._talk:  # faults may come from other threads than the one that runs the job
                keeper.stdin.write(json.dumps(what) + "\n")
                keeper.stdin.flush()
                line = keeper.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the lab's keeper has ended"}
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def _close(self) -> None:
        self._awake.close()
        if self._keeper is not None:
            assert self._keeper.stdin is not None and self._keeper.stdout is not None
            with suppress(BrokenPipeError):
                self._keeper.stdin.close()
            end(self._keeper, patience_s=5.0)
            self._keeper.stdout.close()
            self._keeper = None

    def _start(self, node: int, argv: Sequence[str], **popen: Any) -> subprocess.Popen[Any]:
        if self._keeper is None:
            raise RuntimeError("the lab is not entered: use it in a with statement")
        enter = [sys.executable, str(HERE / "keeper.py"), "enter", *map(str, self.door(node))]
        return subprocess.Popen([*enter, *argv], **popen)

    def _torchrun(self, rank: int) -> dict[str, str]:
        per_node = self.scenario.ranks_per_node
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % per_node),
            "GROUP_RANK": str(rank // per_node),
            "WORLD_SIZE": str(self.scenario.world_size),
            "LOCAL_WORLD_SIZE": str(per_node),
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": str(MASTER_PORT),
            "GLOO_SOCKET_IFNAME": NODE_INTERFACE,
            "TP_SOCKET_IFNAME": NODE_INTERFACE,
        }

    @staticmethod
    def _probe_argv(*arguments: object) -> list[str]:
        return [sys.executable, str(HERE / "probe.py"), *map(str, arguments)]

    @contextmanager
    def _probe(self, node: int, *arguments: object) -> Iterator[subprocess.Popen[Any]]:
        process = self._start(node, self._probe_argv(*arguments), stdout=subprocess.PIPE, text=True)
        try:
            yield process
        finally:
            end(process)
            if process.stdout is not None:
                process.stdout.close()

    def _round_trip_s(self, source: int, target: int) -> float:
        with (
            self._probe(target, "echo", PROBE_PORT + 1),
            self._probe(source, "ping", self.addresses[target], PROBE_PORT + 1, PINGS) as ping,
        ):
            return _figure(ping)

    def _slowest(self, source: int, target: int) -> float | None:
        """Returns the lowest rate of a link or trunk on the path in bytes per second; None if unlimited.

        A trunk counts with its whole rate, though flows of one direction share it.
        """
        rates = [self.scenario.rate_of(source), self.scenario.rate_of(target)]
        racks = self.scenario.rack_of(source), self.scenario.rack_of(target)
        if self.scenario.trunk is not None and racks[0] != racks[1]:
            rates.append(rate_bytes_per_s(self.scenario.trunk))
        shaped = [rate for rate in rates if rate is not None]
        return min(shaped) if shaped else None


def free_port() -> int:
    """Returns a TCP port of this machine that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _figure(process: subprocess.Popen[Any]) -> float:
    output, _ = process.communicate(timeout=120)
    if process.returncode != 0:
        raise RuntimeError("a probe of the lab's links failed; see its output above")
    return float(output)


def end(process: subprocess.Popen[Any], patience_s: float = 0.0) -> None:
    """Waits up to `patience_s` seconds for the process to end by itself, then kills it."""
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _until(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.0)


def first_failure(ranks: list[subprocess.Popen[Any]], timeout_s: float | None = None) -> int | None:
    """Waits for the first rank to fail and returns it; None when all have ended well or the time is up."""
    ended = threading.Condition()
    open_ranks = set(range(len(ranks)))
    bad: list[int] = []

    def watch(rank: int) -> None:
        code = ranks[rank].wait()
        with ended:
            open_ranks.discard(rank)
            if code != 0:
                bad.append(rank)
            ended.notify_all()

    for rank in range(len(ranks)):
        threading.Thread(target=watch, args=(rank,), daemon=True).start()
    with ended:
        ended.wait_for(lambda: bool(bad) or not open_ranks, timeout_s)
        return bad[0] if bad else None


def _echo(rank: int, stream: IO[bytes], to: BinaryIO) -> None:
    with stream:
        for line in stream:
            to.write(f"[{rank}] ".encode() + line)
            to.flush()


def _may_make_networks() -> bool:
    """Whether this process has root's rights over networks; root in a container often lacks them."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    held = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    capabilities = int(held[1], 16) if held else 0
    return all(capabilities >> needed & 1 for needed in (CAP_NET_ADMIN, CAP_SYS_ADMIN))


def _advice(problem: str) -> str:
    if "PermissionError" in problem or "unshare" in problem:
        return (
            f"network namespaces cannot be made here ({problem}); run as root, or allow user namespaces: "
            "user.max_user_namespaces above 0 and, where the system has them, kernel.unprivileged_userns_clone=1 and "
            "kernel.apparmor_restrict_unprivileged_userns=0 (sysctl)"
        )
    return (
        f"the lab's network cannot be built here ({problem}); it needs the kernel modules bridge, veth and sch_tbf "
        "(modprobe as root)"
    )
