"""Plain TCP traffic between nodes, to measure and to load links. A script that imports nothing of the package.

probe.py receive PORT SECONDS              prints bytes received per second over the middle of the time
probe.py send HOST PORT SECONDS RATE       RATE bytes per second, 0 for as fast as possible
probe.py echo PORT / ping HOST PORT N      prints the median round trip of a small message in seconds
"""

from __future__ import annotations

import socket
import statistics
import sys
import time

CHUNK = bytes(256 << 10)
CONNECT_PATIENCE_S = 10.0
SETTLE_SHARE = 0.2  # of the time, for slow start


def connect(host: str, port: int) -> socket.socket:
    deadline = time.monotonic() + CONNECT_PATIENCE_S
    while True:
        try:
            stream = socket.create_connection((host, port), timeout=CONNECT_PATIENCE_S)
            stream.settimeout(None)  # a link may be down for long and come back
            return stream
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def accept(port: int) -> socket.socket:
    with socket.create_server(("", port)) as server:
        server.settimeout(CONNECT_PATIENCE_S)
        return server.accept()[0]


def receive(port: int, seconds: float) -> None:
    with accept(port) as stream:
        began = time.monotonic()
        settled, total = None, 0
        while data := stream.recv(1 << 20):
            now = time.monotonic()
            if now - began > seconds:
                break
            if settled is None and now - began > seconds * SETTLE_SHARE:
                settled = now
            elif settled is not None:
                total += len(data)
        print(total / max(time.monotonic() - (settled or began), 1e-9))


def send(host: str, port: int, seconds: float, rate: float) -> None:
    with connect(host, port) as stream:
        if rate:
            stream.setsockopt(socket.SOL_SOCKET, 47, int(rate))  # SO_MAX_PACING_RATE
        deadline = time.monotonic() + seconds + 1.0
        try:
            while time.monotonic() < deadline:
                stream.sendall(CHUNK)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the receiver has enough and closed the connection


def echo(port: int) -> None:
    with accept(port) as stream:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := stream.recv(64):
            stream.sendall(data)


def ping(host: str, port: int, count: int) -> None:
    with connect(host, port) as stream:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times = []
        for _ in range(count):
            began = time.perf_counter()
            stream.sendall(b"0123456789abcdef")
            stream.recv(64)
            times.append(time.perf_counter() - began)
        print(statistics.median(times))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["receive", port, seconds]:
            receive(int(port), float(seconds))
        case ["send", host, port, seconds, rate]:
            send(host, int(port), float(seconds), float(rate))
        case ["echo", port]:
            echo(int(port))
        case ["ping", host, port, count]:
            ping(host, int(port), int(count))
        case _:
            sys.exit(__doc__)
