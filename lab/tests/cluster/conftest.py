"""Checks the lab's requirements by asking the kernel, not the lab, so that a broken lab is no reason to skip."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gradsync_lab.cluster.keeper import CLONE_NEWNET, CLONE_NEWUSER


def allows(flags: int) -> bool:
    """Whether this user may unshare the namespaces that `flags` name."""
    code = f"import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare({flags}) != 0)"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture(scope="session")
def namespaces() -> None:
    if not allows(CLONE_NEWNET) and not allows(CLONE_NEWUSER | CLONE_NEWNET):
        pytest.skip("this user may make no network namespaces, neither directly nor in a user namespace")


@pytest.fixture(scope="session")
def user_namespaces() -> None:
    if not allows(CLONE_NEWUSER | CLONE_NEWNET):
        pytest.skip("this machine does not allow user namespaces")
