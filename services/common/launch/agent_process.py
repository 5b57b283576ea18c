"""The process of an agent that is not the command itself: `python -m services.common.launch.agent_process`.

A launcher starts it on each node and writes its `AgentConfig` to its stdin, as one line. The process is not the
launcher's own: a process of Ray has handlers of signals that are Ray's, and modules that workers must not inherit.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple

from services.common.errors import TryAgain
from services.common.launch import fork_server
from services.common.launch.agent_channel import AgentHello, EndWorkers, NodeIdle, WorkersFailed, connect_agent
from services.common.launch.neuron_environment import find_meeting_point
from services.common.launch.node_agent import NodeAgent, NodeStart, prepare_fork_server
from services.common.process.stop_signals import ignore_stop_signals

END_SECONDS = 30.0
"""Seconds that an agent has to end its workers and itself after the command has closed their connection."""


class AgentConfig(NamedTuple):
    """Tells an agent which node it is on, and where the command is."""

    node_rank: int
    address: str
    """Address of the node, at which other nodes reach it."""
    command: tuple[str, int]
    """Address of the command, and its port for agents."""
    key: str
    """Key of the command's agents, in hexadecimal digits."""
    parent: int
    """Id of the process that started the agent, and with which the agent ends."""
    preload: Sequence[str]
    """See `WorkerGroupSpec.preload`."""

    def to_line(self) -> bytes:
        return json.dumps(self).encode() + b"\n"


def main() -> None:
    config = AgentConfig(*json.loads(sys.stdin.buffer.raw.readline()))  # type: ignore[union-attr]
    fork_server.end_with(config.parent)
    prepare_fork_server(config.preload)  # the server imports while this process connects
    agent = NodeAgent(config.address)
    ignore_stop_signals()  # the run's stop file stops the workers
    try:
        connection = connect_agent(*config.command, bytes.fromhex(config.key))
    except TryAgain as error:
        print(f"millrace: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    threading.Thread(target=_end_with, args=(connection,), name="end-with-command", daemon=True).start()
    meeting = find_meeting_point(config.address)
    try:
        connection.send(AgentHello(config.node_rank, socket.gethostname(), meeting))
        while True:
            _serve(agent, connection, config.address)
    except (EOFError, ConnectionError, TimeoutError):  # the command has ended, or its launcher, or its node is gone
        agent.close()


def _end_with(connection: Connection) -> None:
    """End this process END_SECONDS after the command has closed the connection, whatever the main thread does then.

    The main thread waits without a limit for a worker that the kernel cannot kill, as on a file system whose server is
    gone, and for a fork server that is frozen. The launcher would wait for this process, and the command for the
    launcher. The kernel kills the fork server and its workers with this process.
    """
    poll = select.poll()
    poll.register(connection, getattr(select, "POLLRDHUP", select.POLLHUP))  # POLLRDHUP is Linux's
    poll.poll()
    time.sleep(END_SECONDS)
    os._exit(1)


def _serve(agent: NodeAgent, connection: Connection, address: str) -> None:
    """Wait for a message of the command, and run workers if it is a start. Raises `EOFError` when the command ends."""
    message = connection.recv()
    if not isinstance(message, NodeStart):  # `EndWorkers` for workers that have ended already
        return
    agent.start(message)
    while not agent.wait([connection]):
        if connection.poll() and isinstance(connection.recv(), EndWorkers):
            break
    if agent.has_failed:
        connection.send(WorkersFailed())
    connection.send(NodeIdle(agent.end(), find_meeting_point(address)))


if __name__ == "__main__":
    main()
