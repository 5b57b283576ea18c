"""Runs a stage on the nodes of an AWS Batch job: `python -m services.<stage> batch [OPTION ...] -- COMMAND`.

COMMAND is the stage's usual command: `python -m services.<stage> --recipe FILE --root DIR ...`. The container of every
node runs this program. The main node starts Ray's head, waits until all nodes have joined it, and runs COMMAND with
RAY_ADDRESS set; the other nodes join, and leave when COMMAND has ended. Batch uses the exit code of the main node
alone: that of COMMAND, or 75 where a node did not join or was lost. In a job of one node COMMAND replaces this program.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.common.errors import TryAgain, WorkersLost
from services.common.launch.batch.node import (
    BatchNode,
    StageCommand,
    deliver_recipe,
    find_node,
    find_own_address,
    read_command,
    require_root,
)
from services.common.launch.batch.ray_process import HEAD_PORT, NODE_LABEL, ray_resources, running_ray
from services.common.launch.batch.ray_token import offering_token, read_token
from services.common.problem_list import list_names
from services.common.process.command_line import make_app, run_app
from services.common.process.entry_point import run_program
from services.common.process.shutdown import Stopped, name_signal, on_stop_signal
from services.common.recipe.schema import WEBHOOK_VARIABLE

if TYPE_CHECKING:
    from services.common.launch.batch.ray_nodes import RayNodes

JOIN_SECONDS = 900
"""Seconds in which all nodes have to join, from the first container on; the last one may still pull many GB."""
SILENT_SECONDS = 30.0
"""Seconds without an answer after which the head counts as lost; Ray's library ends a process after 60 s."""
OVER_SECONDS = 6.0
"""Seconds without an answer of the head after which a node that got a stop signal takes the job for ended."""
LOST_SECONDS = 60.0
"""Seconds in which a stage that has lost a node has to end; then it is killed."""
LEAVE_SECONDS = 15.0
"""Seconds for which the main node waits for the other nodes to leave."""
POLL_SECONDS = 0.5
PROBE_SECONDS = 2.0


app = make_app()


def main(argv: list[str]) -> int:
    return run_app(app, argv, "services.STAGE batch")


@app.command()
def run_node(
    words: Annotated[list[str], typer.Argument(metavar="-- python -m services.STAGE --recipe FILE --root DIR ...")],
    cpus: Annotated[int | None, typer.Option(min=1, help="CPUs that Ray uses on this node (default: all)")] = None,
    neuron_cores: Annotated[int, typer.Option(min=0, help="NeuronCores of this node")] = 0,
    join_seconds: Annotated[
        int, typer.Option(min=1, help="seconds in which all nodes have to join; then the job ends with 75")
    ] = JOIN_SECONDS,
) -> int:
    """Run a stage's command on the nodes of an AWS Batch job. Every container of the job runs this."""
    command = read_command(words)
    node = find_node(os.environ)
    require_root(command.root)
    if node.is_main:
        deliver_recipe(command, os.environ)
    if node.num_nodes == 1:
        os.execvp(command.words[0], command.words)  # nosec B606 # it replaces itself by the stage
    resources = ray_resources(command.stage, cpus, neuron_cores)
    # Batch gives a secret to all nodes. The stage's command alone sends notices; workers inherit Ray's environment.
    webhook = os.environ.pop(WEBHOOK_VARIABLE, "")
    if node.is_main:
        return _run_main_node(node, command, resources, join_seconds, webhook)
    return _run_child(node, command, resources, join_seconds)


def _run_main_node(
    node: BatchNode, command: StageCommand, resources: list[str], join_seconds: float, webhook: str
) -> int:
    host = find_own_address()
    address = f"{host}:{HEAD_PORT}"
    _say(node, f"attempt {node.attempt} of job {node.job_id}: starting the Ray head at {address}")
    with offering_token(command.root, node) as token:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        # The head has no dashboard, for which Ray Train's record of runs would wait a minute.
        os.environ["RAY_TRAIN_ENABLE_STATE_TRACKING"] = "0"
        with running_ray([*resources, f"--labels={NODE_LABEL}={node.index}"], host, head=None) as ray:
            deadline = time.monotonic() + join_seconds
            while not _answers(host):
                _require_running(ray, "did not start")
                _require_time(deadline, "Ray's head did not answer")
            nodes = _connect(address)
            try:
                _wait_for_nodes(node, nodes, ray, deadline, join_seconds)
                _say(node, f"all {node.num_nodes} nodes have joined; running {shlex.join(command.words)}")
                exit_code = _run_stage(node, command, _NodeWatch(node, nodes, ray), address, webhook)
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


def _run_stage(node: BatchNode, command: StageCommand, watch: _NodeWatch, address: str, webhook: str) -> int:
    """Run the stage's command with the webhook's URL, or "", forward every stop signal to it, and return its exit code.

    Raises `WorkersLost` when a node was lost, unless the command succeeded nevertheless.
    """
    signals: list[int] = []
    started: list[subprocess.Popen[bytes]] = []

    def forward(signum: int) -> None:
        signals.append(signum)
        _say(node, f"{name_signal(signum)}: forwarded to the stage, which stops where it can continue later")
        for each in started:
            each.send_signal(signum)

    lost, lost_at = "", 0.0
    with on_stop_signal(forward, again=forward):
        notices = {WEBHOOK_VARIABLE: webhook} if webhook else {}
        stage = subprocess.Popen(command.words, env={**os.environ, **notices, "RAY_ADDRESS": address})
        started.append(stage)
        if signals:  # a stop signal came while the stage was being started
            stage.terminate()
        while True:
            with suppress(subprocess.TimeoutExpired):
                exit_code = stage.wait(POLL_SECONDS if lost else PROBE_SECONDS)
                break
            if not lost and (lost := watch.find_lost()):
                lost_at = time.monotonic()
                _say(node, f"lost {lost}; ending the stage")
                if not signals:
                    stage.terminate()
            # A stage that got a stop signal before is not killed: Batch limits its time. The other nodes get the signal
            # too, and leave as soon as nothing runs on them, so that their loss is no failure.
            if lost and not signals and time.monotonic() - lost_at > LOST_SECONDS:
                stage.kill()
    if lost and exit_code and not (signals and exit_code == TryAgain.exit_code):
        raise WorkersLost(f"the job lost {lost}. Batch runs the same command again, which continues committed work.")
    # A stage that was killed by a signal counts as lost, for instance where memory ran out.
    return exit_code if exit_code >= 0 else TryAgain.exit_code


class _NodeWatch:
    """Watches the nodes that have joined."""

    def __init__(self, node: BatchNode, nodes: RayNodes, ray: subprocess.Popen[bytes]) -> None:
        self._node, self._nodes, self._ray = node, nodes, ray
        self._heard_at = time.monotonic()

    def find_lost(self) -> str:
        """Name the nodes that Ray has given up, 6 to 16 s after their last sign of life; empty while all are alive."""
        if self._ray.poll() is not None:
            return "Ray on the main node"
        try:
            missing = set(range(self._node.num_nodes)) - self._nodes.live_indices()
        except ConnectionError:  # the head may answer late on a busy machine
            return "Ray's head" if time.monotonic() - self._heard_at > SILENT_SECONDS else ""
        self._heard_at = time.monotonic()
        return _names(missing) if missing else ""


def _let_children_leave(node: BatchNode, nodes: RayNodes) -> None:
    """Wait until the other nodes have left, so that they end with 0: Batch kills the rest after the main node's end."""
    with on_stop_signal(lambda signum: None), suppress(ConnectionError):
        nodes.announce_end()
        deadline = time.monotonic() + LEAVE_SECONDS
        while nodes.live_indices() - {node.index} and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)


def _run_child(node: BatchNode, command: StageCommand, resources: list[str], join_seconds: float) -> int:
    """Join the main node's Ray and return 0 when the main node says that the stage finished.

    Raises `TryAgain` when the main node does not answer.
    """
    host, address = node.main_address, f"{node.main_address}:{HEAD_PORT}"
    deadline = time.monotonic() + join_seconds
    _say(node, f"attempt {node.attempt} of job {node.job_id}: waiting for the Ray head at {address}")
    while not _answers(host) or not (token := read_token(command.root, node)):
        _require_time(deadline, f"the main node's Ray did not answer at {address} for {join_seconds:.0f} s")
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    signals: list[int] = []
    options = [*resources, f"--labels={NODE_LABEL}={node.index}"]
    with running_ray(options, find_own_address(), head=address) as ray, _draining(node, ray, signals):
        nodes, heard_at = _connect(address), time.monotonic()
        while True:
            try:
                if _answers(host):
                    if nodes.is_over():
                        _say(node, "stage finished")
                        nodes.say_left(node.index)
                        return 0
                    heard_at = time.monotonic()
            except ConnectionError:  # the head listens and does not answer
                pass
            silent_seconds = time.monotonic() - heard_at
            if silent_seconds > SILENT_SECONDS:
                raise TryAgain(f"the main node at {address} did not answer for {SILENT_SECONDS:.0f} s: it was lost.")
            if signals and (ray.poll() is not None or silent_seconds > OVER_SECONDS):
                raise Stopped(signals[0], f"Stopped by {name_signal(signals[0])}: no work of the stage runs here now.")
            if ray.poll() is not None and silent_seconds < OVER_SECONDS:
                raise TryAgain(f"Ray on this node ended with {ray.returncode}. Its logs were in {_ray_logs()}.")
            time.sleep(PROBE_SECONDS)


@contextmanager
def _draining(node: BatchNode, ray: subprocess.Popen[bytes], signals: list[int]) -> Iterator[None]:
    """Drain this Ray node at a stop signal, as at the end of a pod: Ray notifies the stage."""

    def drain(signum: int) -> None:
        signals.append(signum)
        _say(node, f"{name_signal(signum)}: draining this node; Ray notifies the stage")
        ray.terminate()

    with on_stop_signal(drain, again=lambda signum: None):
        yield


def _ray_logs() -> str:
    base = Path(os.environ.get("RAY_TMPDIR", "/tmp"))  # nosec B108 # Ray's own default
    return str(base / "ray" / "session_latest" / "logs")


def _connect(address: str) -> RayNodes:
    # Imported here, because Ray's library reads the token when it is loaded.
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
        raise TryAgain(f"{what}. The same command continues committed work.")
    time.sleep(POLL_SECONDS)


def _names(indices: set[int]) -> str:
    return f"node{'s' if len(indices) > 1 else ''} {list_names(map(str, sorted(indices)))}"


def _say(node: BatchNode, text: str) -> None:
    print(f"batch: {node.name}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_program(main)
