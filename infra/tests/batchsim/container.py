"""A simulated container: namespaces of its own for processes, network, mounts and hostname, with `tini` as its init.

Its files are this machine's, but for /dev/shm, /etc/hosts and the folder of its temporary files. `tini` is what Batch
runs with `initProcessEnabled`. When it ends, the kernel ends all processes of the container, as with Docker.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from infra.tests.batchsim.network import Network, has_own_network
from services.common.testing.waiting import wait_until

REPOSITORY = Path(__file__).resolve().parents[3]
KILLED = 128 + signal.SIGKILL

# Waits for its network before anything of the command begins.
_BEGIN = """
set -e
mount -t tmpfs -o size=1g tmpfs /dev/shm
mount --bind "$1" /etc/hosts
hostname "$2"
read -r _
shift 2
exec "$@" </dev/null
"""


class Container:
    def __init__(
        self, network: Network, address: str, command: Sequence[str], variables: Mapping[str, str], folder: Path
    ) -> None:
        """Run `command` at `address` with these variables. Temporary files and `log` go to `folder`: a short path, for
        Ray's sockets."""
        self.address = address
        self.log_path = folder / "log"
        self._is_killed = False  # of which `unshare` does not tell
        scratch, hosts, name = folder / "s", folder / "hosts", f"ip-{address.replace('.', '-')}"
        scratch.mkdir(parents=True)
        hosts.write_text(f"127.0.0.1 localhost\n{address} {name}\n", encoding="utf-8")
        places = dict.fromkeys(("HOME", "TMPDIR", "RAY_TMPDIR"), str(scratch))  # as the images set them
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts", "tini", "--"),
                    *("sh", "-c", _BEGIN, "sh", str(hosts), name, *command),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=REPOSITORY,
                env={
                    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                    "PYTHONPATH": str(REPOSITORY),
                    "PYTHONUNBUFFERED": "1",
                    "USER": "millrace",
                    **places,
                    **variables,
                },
                start_new_session=True,
            )
        wait_until(lambda: has_own_network(self._process.pid) and self._children())
        self._init = self._children()[0]
        network.attach(self._process.pid, address)
        assert self._process.stdin is not None
        with self._process.stdin as begin:
            begin.write(b"\n")

    def _children(self) -> list[int]:
        pid = self._process.pid
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]

    @property
    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def poll(self) -> int | None:
        """The exit code, once there is one."""
        code = self._process.poll()
        return KILLED if self._is_killed and code else code

    def send(self, signum: signal.Signals) -> None:
        """Sends a signal to the container's init, if that still runs."""
        if self._process.poll() is None and self._init in self._children():
            os.kill(self._init, signum)

    def kill(self) -> None:
        """End all of it at once, as when its host is lost."""
        self._is_killed = self._is_killed or self._process.poll() is None
        self.send(signal.SIGKILL)
        self._process.wait()

    def stop(self, timeout_seconds: float) -> int:
        """Stops the container like ECS, with SIGTERM, and with SIGKILL after the stop timeout."""
        self.send(signal.SIGTERM)
        try:
            self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self.kill()
        code = self.poll()
        assert code is not None
        return code
