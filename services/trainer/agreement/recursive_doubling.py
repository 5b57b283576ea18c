"""Reduces the values of all nodes to one value on every node (an all-reduce), by messages between pairs of nodes.

Recursive doubling (Thakur, Rabenseifner and Gropp 2005, section 4.5): in round r a node exchanges its value with the
node whose number differs in bit r, so that after log2(nodes) rounds each node has the value of all. Where the number of
nodes is no power of two, each node beyond the largest power first gives its value to a node below, and gets the result
at the end.

    nodes                 2     64    1,000    1,024
    messages in a row     1      6       11       10
    partners of a node    1      6     <= 10       10

A node sends at most log2(nodes) + 1 messages of the size of one value. The module has no clock and no network: its
caller carries the messages, over sockets or in a simulation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

V = TypeVar("V")


class Message(NamedTuple, Generic[V]):
    """A value on its way from one node to another."""

    sequence: int
    """Number of the reduction that the value belongs to. Nodes count their reductions alike, one after the other."""
    sender: int
    receiver: int
    round: int
    value: V


class Exchange(NamedTuple):
    """A node's part in one round: it sends its value to `partner`, receives the partner's, or does both."""

    round: int
    partner: int
    sends: bool
    receives: bool


def exchanges_of(node: int, num_nodes: int) -> list[Exchange]:
    """Return what a node does in a reduction, in this order. Both sides of an exchange number its round alike."""
    num_rounds = num_nodes.bit_length() - 1
    paired = 2**num_rounds  # the largest power of two that is not more than the number of nodes
    last = num_rounds + 1
    if node >= paired:
        helper = node - paired
        return [Exchange(0, helper, True, False), Exchange(last, helper, False, True)]
    helped = [node + paired] if node + paired < num_nodes else []
    return [
        *[Exchange(0, other, False, True) for other in helped],
        *[Exchange(bit + 1, node ^ 1 << bit, True, True) for bit in range(num_rounds)],
        *[Exchange(last, other, True, False) for other in helped],
    ]


def partners_of(node: int, num_nodes: int) -> list[int]:
    """Return the nodes that a node exchanges messages with, in ascending order: at most log2(num_nodes) + 1."""
    return sorted({exchange.partner for exchange in exchanges_of(node, num_nodes)})


class RecursiveDoubling(Generic[V]):
    """One node's part in reductions, one after the other.

    `combine` makes one value of two, of which the first comes from nodes with lower numbers. So all nodes get the same
    bits, also from a sum of floating-point numbers.
    """

    def __init__(self, node: int, num_nodes: int, combine: Callable[[V, V], V], first_sequence: int = 1) -> None:
        self._node, self._combine = node, combine
        self._exchanges = exchanges_of(node, num_nodes)
        self._last_round = num_nodes.bit_length()
        self._sequence = first_sequence - 1
        self._value: V | None = None
        self._position, self._has_sent = len(self._exchanges), False
        self._received: dict[tuple[int, int], V] = {}
        """Values that are not yet due, by sequence number and round: a partner may be one reduction ahead."""

    @property
    def result(self) -> V | None:
        """The value of all nodes in the newest reduction; None until it is known."""
        return self._value if self._position == len(self._exchanges) else None

    @property
    def awaited(self) -> int | None:
        """The node whose message is to come next in the newest reduction; None once there is a result."""
        return self._exchanges[self._position].partner if self._position < len(self._exchanges) else None

    def begin(self, value: V) -> list[Message[V]]:
        """Begin the next reduction with this node's value, after the one before, and return the messages to send."""
        assert self._position == len(self._exchanges), "the reduction before has no result yet"
        self._sequence, self._value, self._position = self._sequence + 1, value, 0
        return self._go_on()

    def receive(self, message: Message[V]) -> list[Message[V]]:
        """Take a message and return those to send next. Raises `ValueError` for a message that no partner sends now."""
        is_early = message.sequence == self._sequence + 1
        awaited = self._exchanges if is_early else self._exchanges[self._position :]
        senders = [each.partner for each in awaited if each.receives and each.round == message.round]
        key = (message.sequence, message.round)
        is_due = is_early or message.sequence == self._sequence
        if not is_due or message.sender not in senders or key in self._received:
            raise ValueError(
                f"node {self._node}, in reduction {self._sequence}, waits for no message of round {message.round} of "
                f"reduction {message.sequence} from node {message.sender}"
            )
        self._received[key] = message.value
        return self._go_on()

    def _go_on(self) -> list[Message[V]]:
        """Do all exchanges whose values are here, and return the messages to send."""
        sent: list[Message[V]] = []
        while self._position < len(self._exchanges) and self._value is not None:
            each = self._exchanges[self._position]
            if each.sends and not self._has_sent:
                sent.append(Message(self._sequence, self._node, each.partner, each.round, self._value))
                self._has_sent = True
            if each.receives:
                if (self._sequence, each.round) not in self._received:
                    break
                theirs = self._received.pop((self._sequence, each.round))
                self._value = self._join(each, self._value, theirs)
            self._position, self._has_sent = self._position + 1, False
        return sent

    def _join(self, exchange: Exchange, own: V, theirs: V) -> V:
        if exchange.round == self._last_round:
            return theirs  # the result
        return self._combine(own, theirs) if self._node < exchange.partner else self._combine(theirs, own)
