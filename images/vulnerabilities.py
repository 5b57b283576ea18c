"""Looks up the pins of every lock in the OSV database of known vulnerabilities, with pip-audit.

`make check-security` runs it. The unions of the images' locks stand for them, because a package has one version in all
images of a variant.
"""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path
from typing import Any

from images.lock import LOCKS, TOOLS, UNION
from images.platforms import REPOSITORY
from services.common.errors import DeviceError, TryAgain

PIP_AUDIT = REPOSITORY / ".venv-security-checks/bin/pip-audit"
DATABASE = "api.osv.dev"
REACH_SECONDS = 5.0
VULNERABLE = 1
"""Exit code of pip-audit if a pin has a known vulnerability."""


def audit_locks() -> None:
    """Prints one line per lock. Without a network to the database, says that nothing was looked up, and returns.

    Raises `DeviceError` with every vulnerable pin, and `TryAgain` if a lookup failed.
    """
    if not _is_reachable():
        print(f"pip-audit            left out: {DATABASE} does not answer, so no pin was looked up", flush=True)
        return
    names = [*(path.name for path in dict.fromkeys(UNION.values())), "nxd-parity.txt", "lm-eval.txt"]
    problems = []
    for name in [*names, *(f"{tool}.txt" for tool in TOOLS)]:
        found = audit(LOCKS / name)
        print(f"pip-audit {name:20} {'FAILED' if found else 'ok'}", flush=True)
        problems += [f"lockfiles/{name}: {each}" for each in found]
    if problems:
        raise DeviceError(
            "pins with known vulnerabilities; make lock UPGRADE=1 takes the newest versions:\n" + "\n".join(problems)
        )


def audit(lock: Path) -> list[str]:
    """Names the lock's pins with a known vulnerability. Raises `TryAgain` if the database gave no answer for a pin."""
    command = [
        str(PIP_AUDIT),
        "--vulnerability-service",
        "osv",
        "--disable-pip",
        "--require-hashes",
        "--format",
        "json",
    ]
    command += ["--progress-spinner", "off", "--requirement", str(lock)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, VULNERABLE):
        raise TryAgain(f"pip-audit ended with {done.returncode} for {lock}: {done.stderr.strip()[-2000:]}")
    try:
        pins: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError) as error:
        raise TryAgain(f"pip-audit printed no report for {lock}: {done.stderr.strip()[-2000:]}") from error
    if skipped := [f"{each['name']}: {each['skip_reason']}" for each in pins if "skip_reason" in each]:
        raise TryAgain(f"{lock}: {len(skipped)} pins were not looked up, such as {skipped[0]}")
    return [
        f"{each['name']} {each['version']} has {vulnerability['id']}, mended in "
        f"{', '.join(vulnerability['fix_versions']) or 'no version'}"
        for each in pins
        for vulnerability in each["vulns"]
    ]


def _is_reachable() -> bool:
    try:
        socket.create_connection((DATABASE, 443), timeout=REACH_SECONDS).close()
    except OSError:
        return False
    return True
