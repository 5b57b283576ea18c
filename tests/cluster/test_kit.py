"""The cluster that all tests of this folder run on is a real one, and leaves nothing behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from images.platforms import REPOSITORY
from services.common.errors import DeviceError, TryAgain
from services.common.testing.waiting import wait_until
from tests.cluster.kit import cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module", autouse=True)
def kit() -> Iterator[None]:
    try:
        cluster.require_prerequisites()
    except DeviceError as error:
        pytest.skip(str(error))
    cluster.up()
    yield
    cluster.down()


def test_down_leaves_no_process_no_mount_and_no_bridge() -> None:
    cluster.up()
    cluster.down()
    assert what_is_left() == []


def test_a_start_that_is_told_to_stop_leaves_nothing() -> None:
    starting = subprocess.Popen([sys.executable, "-m", "tests.cluster.kit", "up"], cwd=REPOSITORY)
    wait_until((cluster.PID / "kube-apiserver").exists)
    starting.send_signal(signal.SIGTERM)
    assert starting.wait(60) == TryAgain.exit_code
    assert what_is_left() == []


def what_is_left() -> list[str]:
    mine = str(cluster.HOME)
    alive = [p.info for p in psutil.process_iter(["pid", "cmdline"]) if any(mine in a for a in p.info["cmdline"] or [])]
    mounts = [line for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines() if mine in line]
    made = [path for path in (Path("/sys/class/net/mrcontrol0"), cluster.KUBECONFIG) if path.exists()]
    return [str(each) for each in (*alive, *mounts, *made)]
