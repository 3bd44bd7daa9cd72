"""Settings of the tier that runs torch's own tests of DDP."""

from __future__ import annotations

import pytest

from tests.torch_ddp import ranks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ranks", type=int, default=2, help="the number of ranks that torch's tests run on")


def pytest_configure(config: pytest.Config) -> None:
    ranks.set_environment(config.getoption("--ranks"))
