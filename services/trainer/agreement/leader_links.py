"""Connects the first worker of each node, its leader, with those of its partner nodes, and carries their messages.

A leader has at most log2(nodes) + 1 connections, and reads as many addresses from the workers' store, to which a
stranger may write. So each greeting and message is sealed with the key of the start, which the leaders have from
their agents. A message carries numbers alone.
"""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Self
from urllib.parse import urlsplit

from services.common.errors import WorkersLost
from services.common.launch.node_board import MAX_NUMBERS
from services.common.program.process_group import Store
from services.common.program.sealed_messages import SEAL_BYTES, seal, unseal
from services.trainer.agreement.recursive_doubling import Message, partners_of

Numbers = tuple[float, ...]

GREETING_SECONDS = 5.0
"""Limit for the greeting on a new connection; a stranger that says nothing keeps no leader out for longer."""
_GREETING = struct.Struct("=I")
"""The sender's node, before a seal."""
GREETING_BYTES = _GREETING.size + SEAL_BYTES
_HEADER = struct.Struct("=QHH")
"""Sequence number, round, and count of the numbers that follow."""
_RECEIVE_BYTES = 2**16
_LOOPBACK = "127.0.0.1"


class LeaderLinks:
    """The connections of one node's leader."""

    def __init__(self, node: int, connections: dict[int, socket.socket], key: bytes) -> None:
        self._node, self._connections, self._key = node, connections, key
        self._unread = dict.fromkeys(connections, b"")
        self.lost: dict[int, WorkersLost] = {}
        """Errors that name the partners whose connection has ended. A partner that is done with all reductions closes
        its connection, too, so that this is no loss until a message is due from it.
        """
        self._selector = selectors.DefaultSelector()
        for partner, connection in connections.items():
            self._selector.register(connection, selectors.EVENT_READ, partner)

    @classmethod
    def connect(cls, node: int, num_nodes: int, rendezvous: str, store: Store, timeout: timedelta, key: bytes) -> Self:
        """Connect to the leaders of all partner nodes. All leaders call this together. Raises `WorkersLost`."""
        deadline = time.monotonic() + timeout.total_seconds()
        partners = partners_of(node, num_nodes)
        connections: dict[int, socket.socket] = {}
        try:
            with _listen(rendezvous) as listener:
                host, port = listener.getsockname()[:2]
                store.set(f"leader/{node}", f"{port} {host}")
                # A connection waits in the listener's queue, so that no leader has to accept while it connects.
                for partner in partners:
                    if partner < node:
                        connections[partner] = _call(store.get(f"leader/{partner}").decode(), deadline)
                        connections[partner].sendall(seal(key, _route(node, partner), _GREETING.pack(node)))
                awaited = {partner for partner in partners if partner > node}
                while awaited:
                    listener.settimeout(max(0.0, deadline - time.monotonic()))
                    connection, _ = listener.accept()
                    caller = _greeted_by(connection, node, key)
                    if caller not in awaited:
                        connection.close()
                        continue
                    connections[caller] = connection
                    awaited.remove(caller)
        except (OSError, RuntimeError, ValueError) as error:  # of the store, or of a stranger's text in the store
            _close_all(connections)
            raise WorkersLost(f"node {node} could not reach the first workers of its partner nodes: {error}") from error
        for connection in connections.values():
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return cls(node, connections, key)

    def send(self, messages: Sequence[Message[Numbers]]) -> None:
        """Send messages of this node. Raises `WorkersLost`."""
        for message in messages:
            numbers = message.value
            header = _HEADER.pack(message.sequence, message.round, len(numbers))
            content = header + struct.pack(f"={len(numbers)}d", *numbers)
            try:
                receiver = message.receiver
                self._connections[receiver].sendall(seal(self._key, _route(self._node, receiver), content))
            except OSError as error:
                raise _lost(message.receiver, str(error)) from error

    def receive(self, timeout_seconds: float) -> list[Message[Numbers]]:
        """Return the messages that have arrived; empty if none comes within the timeout, or a partner is lost."""
        messages: list[Message[Numbers]] = []
        for key, _ in self._selector.select(timeout_seconds):
            partner = key.data
            try:
                arrived, reason = self._connections[partner].recv(_RECEIVE_BYTES), "it closed the connection"
            except OSError as error:
                arrived, reason = b"", str(error)
            if not arrived:
                self._selector.unregister(self._connections[partner])
                self.lost[partner] = _lost(partner, reason)
                continue
            self._unread[partner] += arrived
            messages += self._take_messages(partner)
        return messages

    def close(self) -> None:
        self._selector.close()
        _close_all(self._connections)

    def _take_messages(self, partner: int) -> list[Message[Numbers]]:
        messages, unread = [], self._unread[partner]
        while len(unread) >= _HEADER.size:
            sequence, round_, count = _HEADER.unpack_from(unread)
            if count > MAX_NUMBERS:
                raise _lost(partner, f"it sent {count} numbers, of which there are at most {MAX_NUMBERS}")
            end = _HEADER.size + 8 * count + SEAL_BYTES
            if len(unread) < end:
                break
            try:
                unseal(self._key, _route(partner, self._node), unread[:end])
            except ValueError as error:
                raise _lost(partner, str(error)) from error
            numbers = struct.unpack_from(f"={count}d", unread, _HEADER.size)
            messages.append(Message(sequence, partner, self._node, round_, numbers))
            unread = unread[end:]
        self._unread[partner] = unread
        return messages


def _listen(rendezvous: str) -> socket.socket:
    """Listen at a free port of the address by which this node reaches the rendezvous; of loopback for a file."""
    place = urlsplit(rendezvous)
    host = _LOOPBACK
    if place.hostname and place.port:
        family, kind, _, _, address = socket.getaddrinfo(place.hostname, place.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # chooses the route, and sends nothing
            host = probe.getsockname()[0]
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def _call(address: str, deadline: float) -> socket.socket:
    port, host = address.split(" ", maxsplit=1)
    return socket.create_connection((host, int(port)), timeout=max(0.001, deadline - time.monotonic()))


def _greeted_by(connection: socket.socket, node: int, key: bytes) -> int | None:
    """Return the node of the leader that has connected to this node; None for a stranger, which has no key."""
    deadline, greeting, arrived = time.monotonic() + GREETING_SECONDS, b"", b"-"
    with suppress(OSError):
        while len(greeting) < GREETING_BYTES and arrived:
            connection.settimeout(max(0.0, deadline - time.monotonic()))
            arrived = connection.recv(GREETING_BYTES - len(greeting))
            greeting += arrived
    if len(greeting) < GREETING_BYTES:
        return None
    (caller,) = _GREETING.unpack_from(greeting)
    try:
        unseal(key, _route(caller, node), greeting)
    except ValueError:
        return None
    return int(caller)


def _route(sender: int, receiver: int) -> str:
    return f"the leader of node {sender} to that of node {receiver}"


def _close_all(connections: dict[int, socket.socket]) -> None:
    for connection in connections.values():
        connection.close()


def _lost(node: int, reason: str) -> WorkersLost:
    return WorkersLost(f"the first worker of node {node} was lost: {reason}")
