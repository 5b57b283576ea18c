"""A network of its own for each simulated container, as awsvpc gives it: an address, a default route, no port shared.

All of it is in a network namespace that nothing else uses: this machine's own network is never touched, and what was
made is gone when the processes are that hold it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from services.common.testing.waiting import wait_until

NEEDED = ("unshare", "nsenter", "ip", "mount", "tini")
GATEWAY, PREFIX = "10.77.0.1", "10.77.0."
FIRST_HOST = 10


def find_obstacle() -> str:
    """Explains why this machine cannot simulate a network; empty if it can."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    done = subprocess.run(
        ["unshare", "--net", "ip", "link", "add", "br0", "type", "bridge"], capture_output=True, text=True, check=False
    )
    return f"needs network namespaces with bridges: {done.stderr.strip()}" if done.returncode else ""


class Network:
    """A bridge, to which containers are attached."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        self._count = 0
        wait_until(lambda: has_own_network(self._holder.pid))
        self._ip(self._holder.pid, "link add br0 type bridge")
        self._ip(self._holder.pid, f"addr add {GATEWAY}/24 dev br0")
        self._ip(self._holder.pid, "link set br0 up")

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()

    def reserve_address(self) -> str:
        self._count += 1
        return f"{PREFIX}{FIRST_HOST + self._count}"

    def attach(self, pid: int, address: str) -> None:
        """Give the namespace of process `pid` its interface."""
        assert has_own_network(pid)
        port = f"p{address.rpartition('.')[2]}"
        self._ip(self._holder.pid, f"link add {port} type veth peer name eth0 netns {pid}")
        self._ip(self._holder.pid, f"link set {port} master br0 up")
        self._ip(pid, "link set lo up")
        self._ip(pid, f"addr add {address}/24 dev eth0")
        self._ip(pid, "link set eth0 up")
        self._ip(pid, f"route add default via {GATEWAY}")

    def _ip(self, pid: int, words: str) -> None:
        # Without the assertion a process that has ended meanwhile could let this change the machine's own network.
        assert has_own_network(pid)
        subprocess.run(["nsenter", f"--net=/proc/{pid}/ns/net", "ip", *words.split()], check=True, capture_output=True)


def has_own_network(pid: int) -> bool:
    return Path(f"/proc/{pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()
