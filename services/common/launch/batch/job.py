"""A stage on the nodes of an AWS Batch job: `python -m services.<stage> batch [OPTION ...] -- COMMAND`.

COMMAND is the stage's own, as everywhere: `python -m services.<stage> --recipe FILE --root DIR ...`. Every node's
container runs this. The main node starts Ray's head, waits until all nodes have joined it, and runs COMMAND with
RAY_ADDRESS set; the others join, and leave when it is over. Batch looks at the main node's exit code alone, which is
COMMAND's, or 75 where a node did not come or was lost. A job of one node runs COMMAND in place of this.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from services.common.artifacts.attempt import ATTEMPT_VARIABLE, Attempt
from services.common.errors import RecipeError, TryAgain, WorkersLost
from services.common.launch.batch.node import (
    BatchNode,
    StageCommand,
    deliver_recipe,
    find_node,
    find_own_address,
    read_command,
    require_program,
    require_recipe,
    require_root,
)
from services.common.launch.batch.ray_process import HEAD_PORT, NODE_LABEL, ray_resources, running_ray
from services.common.launch.batch.ray_token import offering_token, read_token
from services.common.process.entry_point import run_program
from services.common.process.stop_signals import Stopped, name_signal, on_stop_signal

if TYPE_CHECKING:
    from services.common.launch.batch.ray_nodes import RayNodes

JOIN_SECONDS = 900.0  # from the first container on; the last node may still pull an image of many GB
SILENT_SECONDS = 30.0  # Ray's library ends a process after 60 s without the head
OVER_SECONDS = 6.0  # without the head, where this node was told to leave: the job is over then
LOST_SECONDS = 60.0  # in which a stage has to end that has lost a node
LEAVE_SECONDS = 15.0
POLL_SECONDS = 0.5
PROBE_SECONDS = 2.0
MOST_OF_AN_OPTION = 999_999
SHOWN_NODES = 10


def main(argv: list[str]) -> int:
    arguments, command = _parse(argv)
    node = find_node(os.environ)
    require_program(command)
    require_root(command.root)
    if node.is_main:
        deliver_recipe(command, os.environ)
        require_recipe(command)
    # Batch begins an attempt when the one before is over, also where that one's host was lost without a word.
    os.environ[ATTEMPT_VARIABLE] = str(Attempt(node.job_id, node.attempt))
    if node.num_nodes == 1:
        os.execvp(command.words[0], command.words)
    resources = ray_resources(command.stage, arguments.cpus, arguments.neuron_cores)
    run = _run_main_node if node.is_main else _run_child
    return run(node, command, resources, arguments.join_seconds)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RecipeError(f"{message}\n{self.format_usage()}".rstrip())


def _parse(argv: list[str]) -> tuple[argparse.Namespace, StageCommand]:
    parser = _Parser(
        prog="python -m services.STAGE batch",
        usage="%(prog)s [options] -- python -m services.STAGE --recipe FILE --root DIR ...",
        description="Run a stage's command on the nodes of an AWS Batch job. Each of its containers runs this.",
        allow_abbrev=False,
    )
    parser.add_argument("--cpus", type=_positive, metavar="N", help="of this node, in Ray's view (default: all)")
    parser.add_argument("--neuron-cores", type=_positive, default=0, metavar="N", help="of this node (default: none)")
    parser.add_argument(
        "--join-seconds",
        type=_positive,
        default=JOIN_SECONDS,
        metavar="SECONDS",
        help="in which all nodes have to join, else the job ends with 75 (default: %(default)g)",
    )
    at = argv.index("--") if "--" in argv else len(argv)
    return parser.parse_args(argv[:at]), read_command(argv[at + 1 :])


def _positive(text: str) -> int:
    digits = str(len(str(MOST_OF_AN_OPTION)))
    if not re.fullmatch(rf"[0-9]{{1,{digits}}}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text[:60]!a}: expected a whole number from 1 to {MOST_OF_AN_OPTION:,}")
    return int(text)


def _run_main_node(node: BatchNode, command: StageCommand, resources: list[str], join_seconds: float) -> int:
    host = find_own_address()
    address = f"{host}:{HEAD_PORT}"
    _say(node, f"attempt {node.attempt} of job {node.job_id}: starting the Ray head at {address}")
    with offering_token(command.root, node, host, lambda text: _say(node, text)) as token:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        with running_ray([*resources, f"--labels={NODE_LABEL}={node.index}"], host, head=None) as ray:
            deadline = time.monotonic() + join_seconds
            while not _answers(host):
                _require_running(ray, "did not start")
                _require_time(deadline, "Ray's head did not answer")
            nodes = _connect(address)
            try:
                _wait_for_nodes(node, nodes, ray, deadline, join_seconds)
                _say(node, f"all {node.num_nodes} nodes have joined; running {shlex.join(command.words)}")
                exit_code = _run_stage(node, command, _Watch(node, nodes, ray), address)
                _say(node, f"the stage ended with {exit_code}")
            finally:
                _let_children_leave(node, nodes)
    return exit_code


def _wait_for_nodes(
    node: BatchNode, nodes: RayNodes, ray: subprocess.Popen[bytes], deadline: float, join_seconds: float
) -> None:
    while missing := set(range(node.num_nodes)) - nodes.live_indices():
        _require_running(ray, "ended while nodes joined")
        _require_time(
            deadline,
            f"of {node.num_nodes} nodes {_names(missing)} did not join within {join_seconds:.0f} s. The log stream of "
            f"each says why (job id {node.job_id}#<node>); one without a log has not started",
        )


def _run_stage(node: BatchNode, command: StageCommand, watch: _Watch, address: str) -> int:
    """Exit code of the stage's command, which every stop signal to this process is for.

    Raises `WorkersLost` when a node was lost, unless the command was done all the same.
    """
    told: list[int] = []
    started: list[subprocess.Popen[bytes]] = []

    def forward(signum: int) -> None:
        told.append(signum)
        _say(node, f"{name_signal(signum)}: the stage is told to stop where it can go on later")
        for each in started:
            each.send_signal(signum)

    lost, lost_at = "", 0.0
    with on_stop_signal(forward, again=forward):
        stage = subprocess.Popen(command.words, env={**os.environ, "RAY_ADDRESS": address})
        started.append(stage)
        if told:  # while it was being started
            stage.terminate()
        while True:
            with suppress(subprocess.TimeoutExpired):
                exit_code = stage.wait(POLL_SECONDS if lost else PROBE_SECONDS)
                break
            if not lost and (lost := watch.find_lost()):
                lost_at = time.monotonic()
                _say(node, f"lost {lost}; ending the stage")
                if not told:
                    stage.terminate()
            # One that was told to stop before has as long for its checkpoint as Batch gives it: nodes that are told
            # too leave once nothing runs there.
            if lost and not told and time.monotonic() - lost_at > LOST_SECONDS:
                stage.kill()
    if lost and exit_code and not (told and exit_code == TryAgain.exit_code):
        raise WorkersLost(f"{lost} was lost. The same command continues from what was committed; Batch tries it again.")
    # One that a signal killed was lost as a node is, by want of memory for instance.
    return exit_code if exit_code >= 0 else TryAgain.exit_code


class _Watch:
    """Over the nodes that have joined."""

    def __init__(self, node: BatchNode, nodes: RayNodes, ray: subprocess.Popen[bytes]) -> None:
        self._node, self._nodes, self._ray = node, nodes, ray
        self._heard_at = time.monotonic()

    def find_lost(self) -> str:
        """Which nodes Ray has given up, 6 to 16 s after their last sign of life; empty while all are there."""
        if self._ray.poll() is not None:
            return "Ray on the main node"
        try:
            missing = set(range(self._node.num_nodes)) - self._nodes.live_indices()
        except ConnectionError:  # a busy machine may keep it from answering for a while
            return "Ray's head" if time.monotonic() - self._heard_at > SILENT_SECONDS else ""
        self._heard_at = time.monotonic()
        return _names(missing) if missing else ""


def _let_children_leave(node: BatchNode, nodes: RayNodes) -> None:
    """So that they end with 0: Batch ends by force what is there after the main node."""
    with on_stop_signal(lambda signum: None), suppress(ConnectionError):
        nodes.say_over()
        deadline = time.monotonic() + LEAVE_SECONDS
        while nodes.live_indices() - {node.index} and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)


def _run_child(node: BatchNode, command: StageCommand, resources: list[str], join_seconds: float) -> int:
    """0 when the main node says that the work is over. Raises `TryAgain` when it does not answer, or never did."""
    host, address = node.main_address, f"{node.main_address}:{HEAD_PORT}"
    deadline = time.monotonic() + join_seconds
    _say(node, f"attempt {node.attempt} of job {node.job_id}: waiting for the Ray head at {address}")
    while not _answers(host) or not (token := read_token(command.root, node)):
        _require_time(deadline, f"the main node's Ray did not answer at {address} for {join_seconds:.0f} s")
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    told: list[int] = []
    options = [*resources, f"--labels={NODE_LABEL}={node.index}"]
    with running_ray(options, find_own_address(), head=address) as ray, _draining(node, ray, told):
        nodes, heard_at = _connect(address), time.monotonic()
        while True:
            try:
                if _answers(host):
                    if nodes.is_over():
                        _say(node, "the work is over")
                        nodes.say_left(node.index)
                        return 0
                    heard_at = time.monotonic()
            except ConnectionError:  # it listens and does not answer
                pass
            silent_seconds = time.monotonic() - heard_at
            if silent_seconds > SILENT_SECONDS:
                raise TryAgain(f"the main node at {address} did not answer for {SILENT_SECONDS:.0f} s: it was lost.")
            if told and (ray.poll() is not None or silent_seconds > OVER_SECONDS):
                raise Stopped(told[0], f"Stopped by {name_signal(told[0])}: the stage was told, and nothing runs here.")
            if ray.poll() is not None and silent_seconds < OVER_SECONDS:
                raise TryAgain(f"Ray on this node ended with {ray.returncode}. Its logs were in {_ray_logs()}.")
            time.sleep(PROBE_SECONDS)


@contextmanager
def _draining(node: BatchNode, ray: subprocess.Popen[bytes], told: list[int]) -> Iterator[None]:
    """A stop signal lets Ray tell the stage that this node is to leave, as the end of a pod does."""

    def drain(signum: int) -> None:
        told.append(signum)
        _say(node, f"{name_signal(signum)}: this node is to leave, and Ray tells the stage")
        ray.terminate()

    with on_stop_signal(drain, again=lambda signum: None):
        yield


def _ray_logs() -> str:
    return str(Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "session_latest" / "logs")


def _connect(address: str) -> RayNodes:
    # Only now: Ray's library reads the token as it is loaded.
    from services.common.launch.batch.ray_nodes import RayNodes  # noqa: PLC0415

    return RayNodes(address)


def _answers(host: str) -> bool:
    try:
        socket.create_connection((host, HEAD_PORT), timeout=POLL_SECONDS).close()
    except OSError:
        return False
    return True


def _require_running(ray: subprocess.Popen[bytes], what: str) -> None:
    if ray.poll() is not None:
        raise TryAgain(f"Ray on the main node {what}: it ended with {ray.returncode}. Its logs were in {_ray_logs()}.")


def _require_time(deadline: float, what: str) -> None:
    if time.monotonic() > deadline:
        raise TryAgain(f"{what}. The same command continues from what was committed.")
    time.sleep(POLL_SECONDS)


def _names(indices: set[int]) -> str:
    """The first of them, and how many more there are: a line, however many nodes a job has."""
    shown, more = sorted(indices)[:SHOWN_NODES], len(indices) - SHOWN_NODES
    told = f" and {more:,} more" if more > 0 else ""
    return f"node{'s' if len(indices) > 1 else ''} {', '.join(map(str, shown))}{told}"


def _say(node: BatchNode, text: str) -> None:
    print(f"batch: {node.name}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_program(main)
