"""Controls the agents of all nodes from the command, which has one TCP connection to each agent.

A start of the workers costs two messages a node, and a loss at most three, whatever the number of workers. Nothing
else is sent, and agents send nothing to each other. The message of a start carries the pickled argument of the workers,
so the command sends the bytes of that argument once for each node.
"""

from __future__ import annotations

import queue
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import Any

from services.common.launch.agent_channel import AgentHello, EndWorkers, NodeIdle, admit_agent
from services.common.launch.launcher import WorkerGroupSpec
from services.common.launch.node_agent import NodeEnd, NodeStart, require_success

POLL_SECONDS = 1.0
END_SECONDS = 60.0
"""Seconds in which agents have to kill their workers: the memory of a large process takes seconds to be released."""
_BACKLOG = 4_096
_ACCEPT_AGAIN_SECONDS = 0.1


class AgentLost(Exception):
    """The agent of a node has ended, or does not answer. The group has to be closed, which ends all workers."""


class _Agent:
    """The command's end of the connection to an agent."""

    def __init__(self, connection: Connection, hello: AgentHello) -> None:
        self.connection, self.rank, self.host, self.meeting = connection, hello.node_rank, hello.host, hello.meeting

    def send(self, message: object) -> None:
        try:
            self.connection.send(message)
        except OSError as error:
            raise self.lost from error

    def receive(self) -> Any:
        try:
            return self.connection.recv()
        except (EOFError, OSError) as error:
            raise self.lost from error

    @property
    def lost(self) -> AgentLost:
        return AgentLost(f"the agent of node {self.rank} ({self.host}) was lost")


class AgentGroup:
    """The agents of all nodes of a command. The launcher starts their processes and passes them `address` and `key`."""

    def __init__(self, host: str, num_agents: int) -> None:
        """`host` is the command's address, at which agents reach it."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self.address: tuple[str, int] = (host, self._socket.getsockname()[1])
        self.key = secrets.token_bytes(32)
        self._num_agents = num_agents
        self._is_listening = True
        self._arrived: queue.Queue[_Agent] = queue.Queue()
        self._agents: dict[int, _Agent] = {}
        self._closing, self._is_closed = threading.Lock(), False
        threading.Thread(target=self._accept, name="agents", daemon=True).start()

    @property
    def absent_ranks(self) -> list[int]:
        """Ranks of the nodes whose agents have not connected. Any thread may ask."""
        arrived = {*self._agents, *(agent.rank for agent in list(self._arrived.queue))}
        return [rank for rank in range(self._num_agents) if rank not in arrived]

    def gather(self, require_launcher: Callable[[], None]) -> None:
        """Wait until all agents have connected. `require_launcher` raises an error where they will not."""
        while len(self._agents) < self._num_agents:
            require_launcher()
            with suppress(queue.Empty):
                agent = self._arrived.get(timeout=POLL_SECONDS)
                self._agents[agent.rank] = agent
        self._stop_listening()

    def run(self, work: bytes, spec: WorkerGroupSpec, require_launcher: Callable[[], None]) -> None:
        """Start the workers on all nodes and return when all have returned; see `Workers.run`.

        `work` is the pickled function with its argument. Raises `AgentLost` as well.
        """
        meeting = self._agents[0].meeting
        for rank, agent in sorted(self._agents.items()):
            agent.send(NodeStart(work, spec, rank, self._num_agents, meeting))
        require_success(self._await_ends(require_launcher))

    def close(self) -> None:
        """End all agents, which kill their workers and end when their connection ends."""
        self._stop_listening()
        with self._closing:
            self._is_closed = True
            for agent in (*self._agents.values(), *self._arrived.queue):
                agent.connection.close()
        self._agents = {}

    def _await_ends(self, require_launcher: Callable[[], None]) -> list[NodeEnd]:
        """Wait until no node has a worker left. The first failure ends the workers of all other nodes."""
        ends: list[NodeEnd] = []
        failed_at: float | None = None
        with selectors.DefaultSelector() as working:
            for agent in self._agents.values():
                working.register(agent.connection, selectors.EVENT_READ, agent)
            while left := working.get_map():
                if failed_at and time.monotonic() - failed_at > END_SECONDS:
                    raise next(iter(left.values())).data.lost
                for agent in [key.data for key, _ in working.select(POLL_SECONDS)]:
                    message = agent.receive()
                    is_idle = isinstance(message, NodeIdle)
                    if is_idle:
                        working.unregister(agent.connection)
                        agent.meeting = message.meeting
                        ends.append(message.end)
                    if failed_at is None and not (is_idle and not message.end.is_failure):
                        failed_at = time.monotonic()
                        for other in [key.data for key in left.values() if key.data is not agent]:
                            other.send(EndWorkers())
                require_launcher()
        return ends

    def _stop_listening(self) -> None:
        """Close the port. A `close` alone would leave the port open until the next client connects, because the kernel
        keeps a socket on which a thread waits in `accept`.
        """
        self._is_listening = False
        with suppress(OSError):  # the socket is closed already; macOS ends `accept` at its close
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                channel, _ = self._socket.accept()
            except OSError:
                if not self._is_listening:
                    return
                time.sleep(_ACCEPT_AGAIN_SECONDS)  # the client has gone already, or this process has no free descriptor
                continue
            # Each client gets a thread: one without the key could otherwise keep all agents waiting.
            threading.Thread(target=self._admit, args=(channel,), name="agent", daemon=True).start()

    def _admit(self, channel: socket.socket) -> None:
        with suppress(AuthenticationError, EOFError, OSError):
            connection = admit_agent(channel, self.key)
            agent = _Agent(connection, connection.recv())
            with self._closing:
                if self._is_closed:
                    connection.close()
                else:
                    self._arrived.put(agent)
