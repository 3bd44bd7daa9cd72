"""The script that builds and holds an emulated cluster's network, and runs commands inside its nodes.

The script imports nothing of the package, which makes it start fast.

    keeper.py keep                                builds what the first line of its input says (JSON), then takes
        commands
    keeper.py enter KEEPER_PID NODE_PID CMD ...   runs a command inside a node; KEEPER_PID 0 for root's lab

The keeper lives in a network namespace of its own (the switch; for an ordinary user also in a user namespace), with a
forked process for each node that does nothing but hold the node's namespace. When its input is closed or its parent
dies, the keeper ends all processes in the nodes and itself. No namespace has a name: with the last process in it, the
kernel removes the namespace and its links, also when the keeper itself was killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1

CONGESTION_CONTROL = "cubic"  # BBR, the default of some kernels, does not suit shaped links
NETWORK = "10.77.0.0/24"
NOBODY = ("10.77.0.254", 9)  # an address of the network without a listener
PACKET_BYTES = (4 << 10, 64 << 10)  # the smallest and the largest segmentation-offload packet
BURST_S = 0.001  # tokens kept, in time at full rate: below a timer tick the rate is not reached
BURST_PACKETS = 1.5  # at least so many segmentation-offload packets, with their headers, must fit into a burst
QUEUE_S = 0.020  # how long a packet may wait in the shaper before it is dropped

LOSS_TABLE, LOSS_CHAIN = "loss", "forward"  # of nftables, in the switch
BRIDGE_FAMILY = 7  # NFPROTO_BRIDGE
META_IN_NAME, META_OUT_NAME, META_RANDOM = 6, 7, 24  # linux/netfilter/nf_tables.h
COMPARE_EQUAL, COMPARE_LESS = 0, 2
DROP = 0
NAME_BYTES = 16  # IFNAMSIZ

SIOCETHTOOL = 0x8946
ETHTOOL_GET = {"tso": 0x1E, "gso": 0x23, "gro": 0x2B}  # linux/ethtool.h

KILL_PATIENCE_S = 3.0  # for processes to be gone after they were killed
COMMAND_NOT_FOUND = 127  # the exit code of shells

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Moves this process into new namespaces of the kinds that `flags` name, as CLONE_NEWNET."""
    check(libc.unshare(flags), "unshare")


def join(pid: int, kind: str, flag: int) -> None:
    """Moves this process into the namespace of kind `kind`, such as "net", in which the process `pid` is."""
    fd = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY)
    try:
        check(libc.setns(fd, flag), f"setns {kind}")
    finally:
        os.close(fd)


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Makes the kernel send this process a signal when its parent (the thread that started it) dies."""
    parent = os.getppid()
    check(libc.prctl(PR_SET_PDEATHSIG, by), "prctl")
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def packet_bytes(rate_bytes_per_s: float | None) -> int:
    """Returns the size in bytes of the largest segmentation-offload packet on a link of this rate.

    The packet is small on slow links, as a burst of the token bucket must hold it.
    """
    least, most = PACKET_BYTES
    return most if rate_bytes_per_s is None else min(max(int(rate_bytes_per_s * BURST_S / BURST_PACKETS), least), most)


def tbf(rate_bytes_per_s: float) -> dict[str, int]:
    """Returns the token bucket's settings for a rate, as the integers that netlink needs."""
    burst = int(max(BURST_PACKETS * packet_bytes(rate_bytes_per_s), rate_bytes_per_s * BURST_S))
    return {"rate": int(rate_bytes_per_s), "burst": burst, "limit": int(rate_bytes_per_s * QUEUE_S) + burst}


def become_root_of_own_namespace() -> None:
    """Enters a new user namespace, in which an ordinary user's process may build networks."""
    uid, gid = os.getuid(), os.getgid()
    unshare(CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1", encoding="ascii")


def offload(interface: str) -> dict[str, bool]:
    """Returns which segmentation off-loads the interface has switched on, in this process' network namespace."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for name, command in ETHTOOL_GET.items():
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))  # struct ethtool_value
            request = struct.pack("16sP16x", interface.encode(), ctypes.addressof(value))  # struct ifreq
            fcntl.ioctl(any_socket, SIOCETHTOOL, request)
            found[name] = bool(struct.unpack_from("II", value)[1])
    return found


def congestion_control() -> str:
    """Returns the congestion control of a connection to another node, from this process' network namespace."""
    with socket.socket() as stream:
        stream.setblocking(False)
        stream.connect_ex(NOBODY)
        return stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def hold_namespace() -> int:
    """Forks a process that holds a new network namespace, and returns its pid."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        die_with_parent()
        unshare(CLONE_NEWNET)
        os.close(0)  # the keeper's input must not be held open here
        os.write(writer, b"!")
        os.close(writer)
        while True:
            signal.pause()
    os.close(writer)
    held = os.read(reader, 1)
    os.close(reader)
    if held != b"!":
        raise OSError("a node's network namespace could not be made")
    return pid


class NamespaceNetwork:
    """A lab's network: the bridges in this process' namespace, and each node's end of its link."""

    def __init__(self, spec: dict[str, Any]) -> None:
        from pyroute2 import IPRoute

        self.pids = [hold_namespace() for _ in range(spec["nodes"])]
        self.spaces = {network_namespace(pid) for pid in self.pids}  # which a holder may leave before us
        self.home = os.open("/proc/self/ns/net", os.O_RDONLY)
        self.switch = IPRoute()
        self.nodes = [self._socket_inside(pid) for pid in self.pids]
        self._shaped: set[tuple[int, int]] = set()
        self._lossy: Any = None  # the socket of nftables, once some link has lost packets
        self.set_up(self.switch, "lo")
        bridges = [self._add_bridge(f"rack{rack}") for rack in range(spec["racks"])]
        if spec["racks"] > 1:
            core = self._add_bridge("core")
            for rack, bridge in enumerate(bridges):
                self._add_trunk(rack, bridge, core, spec["trunk"])
        for node, pid in enumerate(self.pids):
            self._add_node(node, pid, bridges[spec["rack_of"][node]], spec)

    def _socket_inside(self, pid: int) -> Any:
        """Opens a netlink socket that stays in the node's namespace, also when this process leaves the namespace."""
        from pyroute2 import IPRoute

        join(pid, "net", CLONE_NEWNET)
        socket = IPRoute()
        socket.get_links()
        self._go_home()
        return socket

    def _go_home(self) -> None:
        check(libc.setns(self.home, CLONE_NEWNET), "setns")

    def _add_bridge(self, name: str) -> int:
        self.switch.link("add", ifname=name, kind="bridge")
        return self.set_up(self.switch, name)

    def _add_trunk(self, rack: int, bridge: int, core: int, rate: float | None) -> None:
        self.switch.link("add", ifname=f"up{rack}", kind="veth", peer=f"down{rack}")
        for name, master in ((f"up{rack}", bridge), (f"down{rack}", core)):
            index = self.set_up(self.switch, name)
            self.switch.link("set", index=index, master=master)
            self.shape(self.switch, index, rate)

    def _add_node(self, node: int, pid: int, bridge: int, spec: dict[str, Any]) -> None:
        from pyroute2.netlink.exceptions import NetlinkError

        inside, interface = self.nodes[node], spec["interface"]
        self.switch.link("add", ifname=f"port{node}", kind="veth", peer=f"node{node}")
        far = self.index(self.switch, f"node{node}")
        self.switch.link("set", index=far, net_ns_pid=pid)
        port = self.set_up(self.switch, f"port{node}")
        self.switch.link("set", index=port, master=bridge)
        inside.link("set", index=self.index(inside, f"node{node}"), ifname=interface)
        self.set_up(inside, "lo")
        index = self.set_up(inside, interface)
        inside.addr("add", index=index, address=spec["addresses"][node], prefixlen=24)
        # By route: a namespace may not choose a congestion control that the machine does not allow to everybody.
        # The route replaces the one that came with the address and must look like it (protocol kernel, scope link).
        route = {"dst": NETWORK, "oif": index, "proto": 2, "scope": 253, "prefsrc": spec["addresses"][node]}
        with contextlib.suppress(NetlinkError):  # the kernel lacks this one: `observe` says which is used instead
            inside.route("replace", **route, metrics={"cc_algo": CONGESTION_CONTROL})
        self.set_rate(node, spec["rates"][node], spec["interface"])

    @staticmethod
    def index(socket: Any, name: str) -> int:
        return int(socket.link_lookup(ifname=name)[0])

    def set_up(self, socket: Any, name: str) -> int:
        index = self.index(socket, name)
        socket.link("set", index=index, state="up")
        return index

    def shape(self, socket: Any, index: int, rate: float | None) -> None:
        key = (id(socket), index)
        if key in self._shaped:
            socket.tc("del", index=index, root=True)
            self._shaped.discard(key)
        socket.link("set", index=index, gso_max_size=packet_bytes(rate))
        if rate is not None:
            socket.tc("add", "tbf", index=index, handle="1:", **tbf(rate))
            self._shaped.add(key)

    def set_rate(self, node: int, rate: float | None, interface: str) -> None:
        """Limits both directions of the node's link to `rate` bytes per second; None removes the limit."""
        self.shape(self.switch, self.index(self.switch, f"port{node}"), rate)
        self.shape(self.nodes[node], self.index(self.nodes[node], interface), rate)

    def set_loss(self, node: int, share: float) -> None:
        """Drops this share of the packets to and from the node, at random, and of no other node's; 0 drops none."""
        from pyroute2.nftables.expressions import genex, verdict
        from pyroute2.nftables.main import NFTables

        if self._lossy is None:
            self._lossy = NFTables(nfgen_family=BRIDGE_FAMILY)
            self._lossy.table("add", name=LOSS_TABLE)
        else:
            self._lossy.chain("del", table=LOSS_TABLE, name=LOSS_CHAIN)
        self._lossy.chain("add", table=LOSS_TABLE, name=LOSS_CHAIN, hook="forward", policy=1)

        def compared(operation: int, value: bytes) -> dict[str, Any]:
            data = {"attrs": [("NFTA_DATA_VALUE", value)]}
            found: dict[str, Any] = genex("cmp", {"sreg": 1, "op": operation, "data": data})
            return found

        port = f"port{node}".encode().ljust(NAME_BYTES, b"\0")
        for side in (META_IN_NAME, META_OUT_NAME) if share else ():
            is_nodes = [genex("meta", {"key": side, "dreg": 1}), compared(COMPARE_EQUAL, port)]
            is_drawn = [
                genex("meta", {"key": META_RANDOM, "dreg": 1}),
                compared(COMPARE_LESS, struct.pack(">I", int(share * 2**32))),
            ]
            self._lossy.rule("add", table=LOSS_TABLE, chain=LOSS_CHAIN, expressions=(is_nodes, is_drawn, verdict(DROP)))

    def uplinks(self, racks: int) -> list[tuple[int, int]]:
        """Returns the bytes that have left each rack, and entered it, over its end of the trunk; empty for one rack."""
        found = []
        for rack in range(racks) if racks > 1 else ():
            (link,) = self.switch.get_links(self.index(self.switch, f"up{rack}"))
            counted = link.get_attr("IFLA_STATS64")
            found.append((counted["tx_bytes"], counted["rx_bytes"]))
        return found

    def set_link(self, node: int, state: str) -> None:
        self.switch.link("set", index=self.index(self.switch, f"port{node}"), state=state)

    def observe(self, interface: str) -> dict[str, Any]:
        """Returns the first node's congestion control and segmentation off-loads, for the record."""
        join(self.pids[0], "net", CLONE_NEWNET)
        try:
            return {"congestion_control": congestion_control(), "segmentation_offload": offload(interface)}
        finally:
            self._go_home()

    def leave(self, *_signal: Any) -> NoReturn:
        """Kills all processes in the nodes, whichever process started them, and ends this process.

        Later signals are ignored.
        """
        for again in (signal.SIGTERM, signal.SIGINT):
            signal.signal(again, signal.SIG_IGN)
        deadline = time.monotonic() + KILL_PATIENCE_S
        while time.monotonic() < deadline:  # more than once: a process may fork while its siblings are killed
            inside = [pid for pid in processes_inside(self.spaces) if pid not in self.pids]
            if not inside:
                break
            for pid in inside:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os._exit(0)


def network_namespace(pid: int | str) -> str:
    """Returns the name of the process' network namespace in /proc, like `net:[4026531840]`."""
    return str(Path(f"/proc/{pid}/ns/net").readlink())


def processes_inside(spaces: set[str]) -> list[int]:
    """Returns the pids of the processes in one of these network namespaces."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
                if network_namespace(entry.name) in spaces:
                    found.append(int(entry.name))
    return found


def keep() -> None:
    """Builds the network that the first line of input describes, then executes commands until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the ranks and their parent
    die_with_parent(signal.SIGTERM)
    spec = json.loads(sys.stdin.readline())
    try:
        import pyroute2  # noqa: F401 (before the namespaces change, which may make files unreadable)

        if not spec["root"]:
            become_root_of_own_namespace()
        unshare(CLONE_NEWNET)
        network = NamespaceNetwork(spec)
    except Exception as error:  # told to the caller, who raises it
        answer(error=f"{type(error).__name__}: {error}")
        return
    signal.signal(signal.SIGTERM, network.leave)
    answer(pids=network.pids, observed=network.observe(spec["interface"]))
    for line in sys.stdin:
        command = json.loads(line)
        try:
            told: dict[str, Any] = {}
            if command["do"] == "uplinks":
                told["uplinks"] = network.uplinks(spec["racks"])
            elif command["do"] == "rate":
                network.set_rate(command["node"], command["rate"], spec["interface"])
            elif command["do"] == "loss":
                network.set_loss(command["node"], command["share"])
            else:
                network.set_link(command["node"], command["do"])
            answer(**told)
        except Exception as error:  # told to the caller, who raises it
            answer(error=f"{type(error).__name__}: {error}")
    network.leave()


def answer(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def go_inside(keeper_pid: int, node_pid: int) -> None:
    """Moves this process, which must have one thread, into the node; `keeper_pid` 0: into root's lab."""
    if keeper_pid:
        join(keeper_pid, "user", CLONE_NEWUSER)
    join(node_pid, "net", CLONE_NEWNET)


def enter(keeper_pid: int, node_pid: int, command: list[str]) -> None:
    """Replaces this process by `command`, running inside the node."""
    die_with_parent()
    go_inside(keeper_pid, node_pid)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.exit(COMMAND_NOT_FOUND)


if __name__ == "__main__":
    if sys.argv[1] == "keep":
        keep()
    else:
        enter(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
