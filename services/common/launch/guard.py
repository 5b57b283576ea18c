"""Ends what a command that was killed leaves of the Ray that it started.

`python -m services.common.launch.guard` reads ids of sessions, one a line, until the command that started it is gone.
Most of Ray ends by itself then, but its agents first try for a minute to tell a cluster that is no more.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Collection
from contextlib import suppress

import psutil

from services.common.private_folder import private_base, remove_abandoned
from services.common.stop_signals import STOP_SIGNALS

WAIT_SECONDS = 5.0


def start_guard() -> subprocess.Popen[bytes]:
    """A guard of this process, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "services.common.launch.guard"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        start_new_session=True,
    )


def watch_session(guard: subprocess.Popen[bytes], session: int) -> None:
    """Let the guard end this session too."""
    assert guard.stdin is not None
    with suppress(BrokenPipeError):  # the guard was killed
        os.write(guard.stdin.fileno(), f"{session}\n".encode())


def main() -> None:
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    end_sessions([int(line) for line in sys.stdin])


def end_sessions(sessions: Collection[int]) -> None:
    """Kill all processes of these sessions, orphans included, and remove the private folders that they used."""
    family = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(process.pid) in sessions:
                process.kill()
                family.append(process)
    psutil.wait_procs(family, timeout=WAIT_SECONDS)
    for is_short in (True, False):
        remove_abandoned(private_base(is_short))


if __name__ == "__main__":
    main()
