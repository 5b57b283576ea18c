"""A multi-node parallel job as AWS Batch runs it: its containers' variables, how an attempt ends, what is tried again.

An attempt ends when the main node's container does, with that exit code; what is left of the others is stopped. A lost
child ends nothing. https://docs.aws.amazon.com/batch/latest/userguide/multi-node-parallel-jobs.html
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from infra.tests.batchsim.container import Container
from infra.tests.batchsim.network import Network
from services.common.testing.waiting import wait_until

POLL_SECONDS = 0.1


def matches(rule: Mapping[str, str], exit_code: int | None, status_reason: str) -> bool:
    """Whether a rule of a job definition applies: all its patterns match, which may end with an asterisk."""
    code = "" if exit_code is None else str(exit_code)
    patterns = rule.get("onExitCode", "*"), rule.get("onStatusReason", "*")
    return fnmatchcase(code, patterns[0]) and fnmatchcase(status_reason, patterns[1])


@dataclass(frozen=True)
class JobDefinition:
    command: tuple[str, ...]
    """The container's command, before which Batch puts the image's entry point."""
    evaluate_on_exit: Sequence[Mapping[str, str]]
    num_nodes: int = 2
    environment: Mapping[str, str] = field(default_factory=dict)
    attempts: int = 3
    stop_timeout_seconds: float = 120.0
    absent_nodes: frozenset[int] = frozenset()
    """Nodes whose container never starts: an image that cannot be pulled, a host that does not come."""


def node_variables(job_id: str, attempt: int, index: int, addresses: Sequence[str]) -> dict[str, str]:
    """Variables that Batch sets in a node's container: https://docs.aws.amazon.com/batch/latest/userguide/mnp-env-vars.html"""
    variables = {
        "AWS_BATCH_JOB_ID": f"{job_id}#{index}",
        "AWS_BATCH_JOB_ATTEMPT": str(attempt),
        "AWS_BATCH_JOB_NUM_NODES": str(len(addresses)),
        "AWS_BATCH_JOB_NODE_INDEX": str(index),
        "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
        "AWS_BATCH_CE_NAME": "batchsim",
        "AWS_BATCH_JQ_NAME": "batchsim",
    }
    if index:  # the main node is not told its own address
        variables["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = addresses[0]
    return variables


class Attempt:
    """The containers of one attempt; a test may stop or lose some."""

    def __init__(self, job: Job, number: int) -> None:
        definition = job.definition
        self.number = number
        self.exit_code: int | None = None
        self.status_reason = ""
        addresses = [job.network.reserve_address() for _ in range(definition.num_nodes)]
        self.nodes: dict[int, Container] = {}
        for index, address in enumerate(addresses):
            if index in definition.absent_nodes:
                continue
            variables = node_variables(job.id, number, index, addresses)
            folder = job.folder / f"{number}-{index}"
            environment = {**definition.environment, **variables}
            self.nodes[index] = Container(job.network, address, definition.command, environment, folder)

    def lose_host(self, index: int) -> None:
        """The instance is gone, without a word to the container."""
        if index == 0:
            self.status_reason = "Host EC2 (instance i-0123456789abcdef0) terminated."
        self.nodes[index].kill()

    def wait(self, stop_timeout_seconds: float, is_terminated: threading.Event) -> None:
        """Waits until the main node has ended, and with it all others."""
        while (code := self.nodes[0].poll()) is None and not is_terminated.is_set():
            time.sleep(POLL_SECONDS)
        if is_terminated.is_set():
            stops = [threading.Thread(target=node.stop, args=(stop_timeout_seconds,)) for node in self.nodes.values()]
            for each in stops:
                each.start()
            for each in stops:
                each.join()
            code = self.nodes[0].poll()
        self.exit_code = None if self.status_reason else code
        self.status_reason = self.status_reason or "Essential container in task exited"
        for node in self.nodes.values():
            node.stop(stop_timeout_seconds)

    @property
    def logs(self) -> str:
        return "\n".join(f"--- node {index}\n{node.log}" for index, node in self.nodes.items())


class Job:
    """Runs from its creation on, in a thread; `wait` for its end."""

    def __init__(self, network: Network, definition: JobDefinition) -> None:
        self.network, self.definition = network, definition
        self.id = str(uuid.uuid4())
        self.folder = Path(tempfile.mkdtemp(prefix="b", dir="/tmp"))
        self.attempts: list[Attempt] = []
        self.status: Literal["RUNNING", "SUCCEEDED", "FAILED"] = "RUNNING"
        self._is_terminated = threading.Event()
        self._thread = threading.Thread(target=self._run, name="batchsim")
        self._thread.start()

    def _run(self) -> None:
        try:
            while self.status == "RUNNING":
                attempt = Attempt(self, len(self.attempts) + 1)
                self.attempts.append(attempt)
                attempt.wait(self.definition.stop_timeout_seconds, self._is_terminated)
                if attempt.exit_code == 0:
                    self.status = "SUCCEEDED"
                elif not self._is_tried_again(attempt):
                    self.status = "FAILED"
        finally:
            if self.status == "RUNNING":
                self.status = "FAILED"

    def _is_tried_again(self, attempt: Attempt) -> bool:
        if self._is_terminated.is_set() or attempt.number >= self.definition.attempts:
            return False
        matching = [
            rule["action"]
            for rule in self.definition.evaluate_on_exit
            if matches(rule, attempt.exit_code, attempt.status_reason)
        ]
        return [*matching, "RETRY"][0] == "RETRY"  # what no rule matches is tried again

    def wait(self, seconds: float) -> str:
        """The job's status when it has ended."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"the job did not end in {seconds:g} s:\n{self.logs}"
        return self.status

    def terminate(self) -> None:
        """Ends the job like TerminateJob: stops every container, without another attempt."""
        self._is_terminated.set()

    def close(self) -> None:
        """End what is left."""
        self._is_terminated.set()
        for attempt in self.attempts:
            for node in attempt.nodes.values():
                node.kill()
        self._thread.join()
        shutil.rmtree(self.folder, ignore_errors=True)

    def wait_for_attempt(self, number: int, seconds: float = 600.0) -> Attempt:
        """The attempt, once its containers run."""
        wait_until(lambda: len(self.attempts) >= number or not self._thread.is_alive(), seconds)
        assert len(self.attempts) >= number, self.logs
        return self.attempts[number - 1]

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    @property
    def exit_codes(self) -> list[int | None]:
        return [attempt.exit_code for attempt in self.attempts]

    @property
    def logs(self) -> str:
        return "\n".join(f"=== attempt {each.number}: {each.exit_code}\n{each.logs}" for each in self.attempts)
