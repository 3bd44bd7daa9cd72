"""Opens one workload a session: the real flights, or a skip with the reason."""

from __future__ import annotations

import pytest

from gradsync_lab.workloads import DeepFMWorkload
from lab.tests.workloads.training import opened, opened_or_skip


@pytest.fixture(scope="session")
def flights() -> DeepFMWorkload:
    return opened_or_skip(DeepFMWorkload)


@pytest.fixture(scope="session")
def generated() -> DeepFMWorkload:
    return opened(DeepFMWorkload, data="zipf", batch_size=256)
