"""Commands that are run and servers that are started, all of them below $CLUSTER_HOME (default .cluster)."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from services.common.errors import DeviceError
from services.common.process.shutdown import deferring_stop_signals

HOME = Path(os.environ.get("CLUSTER_HOME", ".cluster")).resolve()
BIN, LOG, PKI, PID = (HOME / name for name in ("bin", "log", "pki", "pid"))
KUBECONFIG = HOME / "kubeconfig"
SOCKET = HOME / "containerd.sock"
ARTIFACTS = Path("/var/lib/millrace/fsx")  # the volume of k8s/overlays/local
USER = 10001  # of every image


def run(*command: str | Path, quiet: bool = False, **kwargs: Any) -> str:
    """Standard output of a command. Raises `DeviceError` with its last words when it fails, unless `quiet`."""
    done = subprocess.run([str(c) for c in command], text=True, capture_output=True, check=False, **kwargs)
    if done.returncode and not quiet:
        said = done.stderr.strip()[-2000:]
        raise DeviceError(f"{' '.join(str(c) for c in command)}: exit {done.returncode}\n{said}")
    return done.stdout


def kubectl(*arguments: str | Path, **kwargs: Any) -> str:
    return run(BIN / "kubectl", "--kubeconfig", KUBECONFIG, *arguments, **kwargs)


def start(name: str, *command: str | Path) -> None:
    """Start a server in its own session, its output in log/<name>.log and its pid in pid/<name>."""
    with (LOG / f"{name}.log").open("ab") as log, deferring_stop_signals():  # `stop` finds what is in PID alone
        process = subprocess.Popen(
            [str(c) for c in command], stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
        (PID / name).write_text(str(process.pid))


def wait(what: str, is_ready: Callable[[], bool], timeout_seconds: float = 90) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not is_ready():
        if time.monotonic() > deadline:
            raise DeviceError(f"{what} was not ready after {timeout_seconds:.0f} s. Its log is in {LOG}.")
        time.sleep(0.2)


def has_ended(server: psutil.Process) -> bool:
    """A zombie has: another process that started it, and is still there, has not looked."""
    return not server.is_running() or server.status() == psutil.STATUS_ZOMBIE


def stop(name: str, timeout_seconds: float = 10) -> None:
    """End one server that `start` started, and forget it."""
    file = PID / name
    if not file.exists():
        return
    try:
        server = psutil.Process(int(file.read_text()))
        # Every server names a path below HOME. Without one this is another program, which has the number now.
        if any(str(HOME) in argument for argument in server.cmdline()):
            server.terminate()
            try:
                wait(f"the end of {name}", lambda: has_ended(server), timeout_seconds)
            except DeviceError:
                server.kill()
                wait(f"the end of {name}", lambda: has_ended(server), timeout_seconds)
    except psutil.NoSuchProcess:
        pass
    file.unlink()
