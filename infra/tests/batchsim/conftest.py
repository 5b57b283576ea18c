"""A network for simulated jobs, where this machine can have one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from infra.tests.batchsim.job import Job, JobDefinition
from infra.tests.batchsim.network import Network, find_obstacle

Submit = Callable[[JobDefinition], Job]


@pytest.fixture(scope="session")
def network() -> Iterator[Network]:
    if obstacle := find_obstacle():
        pytest.skip(obstacle)
    made = Network()
    yield made
    made.close()


@pytest.fixture
def submit(network: Network) -> Iterator[Submit]:
    jobs: list[Job] = []

    def begin(definition: JobDefinition) -> Job:
        jobs.append(Job(network, definition))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.close()
