"""Runs a command with all that it starts in a process group, which ends with the process that asked for it.

`python child_process_group.py COMMAND ...` stands between the two: it ends the group, and so itself, when its standard
input closes, which it does by any end of the process that holds the other side, SIGKILL too. It is a program of its own
file, and imports Python's own modules alone, so that it starts in 20 ms.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path


def run_in_group(
    command: Sequence[str], folder: Path, log: Path, timeout_seconds: float, environment: Mapping[str, str]
) -> int | None:
    """The exit code of a command that runs in `folder` and prints to `log`; None where it took longer.

    128 + n stands for its end by signal n. Nothing of the group is left when this returns or raises.
    """
    with log.open("wb") as output:
        group = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *command],
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        exit_code = group.wait(timeout_seconds)
        return exit_code if exit_code >= 0 else 128 - exit_code
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(group.pid, signal.SIGKILL)  # also what a command that has ended left running
        group.wait()
        assert group.stdin is not None
        group.stdin.close()


def main(command: list[str]) -> int:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    exit_code = subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode
    return exit_code if exit_code >= 0 else 128 - exit_code


def _end_with_parent() -> None:
    os.read(0, 1)  # blocks until nobody holds the other side
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # the thread holds standard input's lock
