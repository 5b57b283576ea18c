"""Seals what workers send each other with the key of their start, so that no stranger's bytes pass for a worker's.

Workers meet at ports and by a store that everybody in their network reaches, and some of their messages are pickles.
Agents get the key by their own connection to the command, which is authenticated, and give it to their workers.

A stranger who puts an own address into the store gets between two workers. There it can read messages, keep them back
and end the run, but not change one or send it to another worker. Nor can it send one again at another place of the same
route: workers count the messages into the route, and leaders of nodes into the content. Nothing is encrypted, and what
a device's collectives or the Neuron runtime send is not sealed.
"""

from __future__ import annotations

import hmac

SEAL_BYTES = 32
"""Bytes that a seal adds to a message."""


def seal(key: bytes, route: str, content: bytes) -> bytes:
    """Return a message with a seal for this route, which names its sender, its receiver and its place among theirs."""
    return content + _seal_of(key, route, content)


def unseal(key: bytes, route: str, message: bytes) -> bytes:
    """Return the content of a sealed message. Raises `ValueError` for one of another key or route."""
    content, found = message[:-SEAL_BYTES], message[-SEAL_BYTES:]
    if not hmac.compare_digest(found, _seal_of(key, route, content)):
        raise ValueError(f"{route}: the message has no valid seal")
    return content


def _seal_of(key: bytes, route: str, content: bytes) -> bytes:
    return hmac.digest(key, route.encode() + b"\0" + content, "sha256")
