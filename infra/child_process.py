"""Programs that must come to their own end: terraform has to write its state, helm has to roll back."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from services.common.errors import Interrupted, TryAgain
from services.common.process.stop_signals import name_signal, on_stop_signal


def run_to_its_end(
    command: Sequence[str], folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> int:
    """Exit code of a program that writes to our own stdout and stderr.

    A stop signal is passed on to it once, and its end waited for: `subprocess.run` would kill it at Ctrl-C, and a
    terminal would send Ctrl-C to both, which terraform takes for a second one and ends without its state. Raises
    `Interrupted` or `TryAgain` when it has ended after a signal.
    """
    received: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def pass_on(signum: int) -> None:
        received.append(signum)
        if process is not None:
            process.send_signal(signal.SIGINT)

    with on_stop_signal(pass_on, pass_on):
        process = subprocess.Popen(list(command), cwd=folder, env=environment, process_group=0)
        if received:
            process.send_signal(signal.SIGINT)
        exit_code = process.wait()
    if received:
        message = (
            f"{name_signal(received[0])}: {Path(command[0]).name} came to its own end, with {exit_code}. What it "
            f"did stays, and the same command continues."
        )
        raise Interrupted(message) if received[0] == signal.SIGINT else TryAgain(message)
    return exit_code
