"""A store of `torch.distributed` for ranks on this machine that asks no name server."""

from __future__ import annotations

import socket

from torch._C._distributed_c10d import TCPStore


def new_store(address: str = "127.0.0.1") -> TCPStore:
    """Returns a new store that listens on `address`, an IPv4 address of this machine, at a free `port`.

    A store asks for the name of each client's address before it serves the next client. For IPv4 on loopback the file
    of hosts knows it. torch's own listener takes IPv6, whose form of these addresses only a name server may know; if
    that is silent, the resolver waits some 5 s for it.
    """
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    # The store closes the listener.
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
