"""The connection between the command and the agent of a node, and the messages that they send on it.

Messages are pickles, so both sides prove first that they have the key that the launcher gave them. The command sends a
`NodeStart` for each start of the workers, and `EndWorkers` where workers of another node have failed. The agent answers
each `NodeStart` by one `NodeIdle`, with `WorkersFailed` before it where the failure was on its own node.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from services.common.errors import TryAgain
from services.common.launch.neuron_environment import MeetingPoint
from services.common.launch.node_agent import NodeEnd

CONNECT_SECONDS = 60.0
HANDSHAKE_SECONDS = 10.0
"""Seconds in which an agent that has connected has to prove that it has the key."""
UNREAD_SECONDS = 25.0
"""Seconds after which the kernel ends a connection whose other end acknowledges nothing, or reads nothing while data
waits. The socket of a frozen agent holds every message except a large `NodeStart`, so its starter looks for that state.
"""
_IDLE_SECONDS, _PROBE_SECONDS = 10, 5
"""The kernel probes a connection after 10 idle seconds, and then every 5 s."""


@dataclass(frozen=True)
class AgentHello:
    """Introduces an agent to the command."""

    node_rank: int
    host: str
    """Name of the node's host."""
    meeting: MeetingPoint


@dataclass(frozen=True)
class NodeIdle:
    """Says that no worker of the newest start is left on the agent's node."""

    end: NodeEnd
    meeting: MeetingPoint
    """Address and free ports of the node, for the next start."""


@dataclass(frozen=True)
class WorkersFailed:
    """Says that a worker of the agent's node has failed; the agent is killing the others."""


@dataclass(frozen=True)
class EndWorkers:
    """Asks an agent to kill its node's workers, if there are any."""


def reach_command(host: str, port: int) -> socket.socket:
    """Open a connection from a node to the command. Raises `TryAgain` where nobody listens or packets get lost."""
    try:
        return socket.create_connection((host, port), timeout=CONNECT_SECONDS)
    except OSError as error:
        raise TryAgain(
            f"{socket.gethostname()} cannot reach the command at {host}:{port}: {error}. Nodes of a stage have to "
            f"reach one another at all TCP ports. Check network policies and security groups; then run the same "
            f"command again."
        ) from error


def connect_agent(host: str, port: int, key: bytes) -> Connection:
    """Connect an agent to its command. Raises `TryAgain` where the command cannot be reached, has ended, or is another
    one, which has another key.
    """
    connection = _keep_alive(reach_command(host, port))
    try:
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
    except (AssertionError, AuthenticationError, EOFError, OSError) as error:  # Python 3.11 asserts the first message
        connection.close()
        raise TryAgain(
            f"{socket.gethostname()} reached {host}:{port}, where the command that has started this agent no longer "
            f"answers: {error!r}. Run the same command again."
        ) from error
    return connection


def admit_agent(channel: socket.socket, key: bytes) -> Connection:
    """Take the connection of an agent. Raises `AuthenticationError`, `OSError` or `EOFError` for another client."""
    with channel:
        connection = _keep_alive(channel.dup())
        limit = threading.Timer(HANDSHAKE_SECONDS, _shut_down, [channel])
        limit.daemon = True
        limit.start()
        try:
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
        except BaseException:
            connection.close()
            raise
        finally:
            limit.cancel()
    return connection


def _shut_down(channel: socket.socket) -> None:
    with suppress(OSError):  # the client has gone in this moment
        channel.shutdown(socket.SHUT_RDWR)


def _keep_alive(channel: socket.socket) -> Connection:
    """Make a connection that the kernel ends when the other node is gone, or no process there reads what is sent."""
    channel.settimeout(None)
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):  # Linux
        for option, value in (
            (socket.TCP_KEEPIDLE, _IDLE_SECONDS),
            (socket.TCP_KEEPINTVL, _PROBE_SECONDS),
            (socket.TCP_USER_TIMEOUT, int(UNREAD_SECONDS * 1_000)),
        ):
            channel.setsockopt(socket.IPPROTO_TCP, option, value)
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(channel.detach())
