"""Shares the token of a batch job's Ray: the head writes the secret below the root, and the attempt's nodes read it.

Jobs share a security group, so that one job can reach the Ray of another; without the token that Ray takes no command.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from services.common.launch.batch.node import BatchNode

FOLDER = "ray-tokens"


@contextmanager
def offering_token(root: Path, node: BatchNode) -> Iterator[str]:
    """Write a new token, readable by this user only, on all of the attempt's nodes, until the block ends."""
    token, path = secrets.token_hex(32), _token_file(root, node)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    draft.touch(mode=0o600, exist_ok=False)
    draft.write_text(token, encoding="ascii")
    draft.rename(path)
    try:
        yield token
    finally:
        with suppress(OSError):  # the stage's exit code matters more
            path.unlink()


def read_token(root: Path, node: BatchNode) -> str | None:
    """Read the token of this node's attempt; None while there is none."""
    with suppress(OSError):  # absent, or a mount that answers again
        return _token_file(root, node).read_text(encoding="ascii")
    return None


def _token_file(root: Path, node: BatchNode) -> Path:
    return root / FOLDER / f"{node.job_id}.{node.attempt}.token"
