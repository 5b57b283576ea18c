"""Runs a command in a process group of its own, which ends when the calling process ends.

`python child_process_group.py COMMAND ...` stands between the two: it kills the group, itself included, when its
standard input closes. The kernel closes that at any end of the calling process, SIGKILL included. This file imports
only the standard library, so that the program starts in 30 ms.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def run_in_group(
    command: Sequence[str], folder: Path, log: Path, timeout_seconds: float, environment: Mapping[str, str]
) -> int | None:
    """Run a command in `folder` with its output in `log`, and return its exit code; None after `timeout_seconds`.

    An exit code of 128 + n stands for an end by signal n. No process of the group is left on return or error.
    """
    with (
        log.open("wb") as output,
        running_in_group(command, environment, cwd=folder, stdout=output, stderr=subprocess.STDOUT) as group,
        suppress(subprocess.TimeoutExpired),
    ):
        return shell_exit_code(group.wait(timeout_seconds))
    return None


@contextmanager
def running_in_group(
    command: Sequence[str], environment: Mapping[str, str], **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """Run a command during the block, after which no process of its group is left. `options` are those of `Popen`."""
    group = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, *command],
        env=dict(environment),
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches the calling process alone
        text=True,
        **options,
    )
    try:
        yield group
    finally:
        with suppress(ProcessLookupError):
            os.killpg(group.pid, signal.SIGKILL)  # also the processes that a finished command has left
        group.wait()
        assert group.stdin is not None
        group.stdin.close()


def shell_exit_code(returncode: int) -> int:
    """Return 128 + n in place of -n, by which `subprocess` says that signal n ended a process."""
    return returncode if returncode >= 0 else 128 - returncode


def main(command: list[str]) -> int:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    return shell_exit_code(subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode)


def _end_with_parent() -> None:
    os.read(0, 1)  # blocks until the calling process is gone
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # the thread holds standard input's lock
