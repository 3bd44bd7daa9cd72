"""One opened workload a session: the real flights, or a skip that says why there are none."""

from __future__ import annotations

import pytest

from gradsync.workloads import DataUnavailableError, DeepFMWorkload, load


@pytest.fixture(scope="session")
def flights() -> DeepFMWorkload:
    try:
        workload = load("deepfm")
    except DataUnavailableError as error:
        pytest.skip(f"needs the real flights: {error}")
    assert isinstance(workload, DeepFMWorkload)
    return workload


@pytest.fixture(scope="session")
def generated() -> DeepFMWorkload:
    workload = load("deepfm", data="zipf", batch_size=256)
    assert isinstance(workload, DeepFMWorkload)
    return workload
