"""Parts of the kit that need no cluster: names of images, what is missing, and a start or an end that is cut short."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import pytest

from images.platforms import REPOSITORY
from images.registry import repository_of
from k8s.client.stage_image import full_name
from services.common.errors import DeviceError, RecipeError
from tests.cluster.kit import __main__ as command
from tests.cluster.kit import cluster


@pytest.mark.parametrize(
    ("image", "reference", "repository"),
    [
        ("millrace/head:1", "docker.io/millrace/head:1", "docker.io/millrace/head"),
        ("millrace.test/pause:1", "millrace.test/pause:1", "millrace.test/pause"),
        ("debian:12", "docker.io/library/debian:12", "docker.io/library/debian"),
        ("localhost/head:1", "localhost/head:1", "localhost/head"),
        ("here:5000/head:1", "here:5000/head:1", "here:5000/head"),
    ],
)
def test_an_image_has_the_full_name_that_kubernetes_looks_for(image: str, reference: str, repository: str) -> None:
    assert full_name(image) == reference
    assert repository_of(full_name(image)) == repository


def test_what_is_missing_is_one_line_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"docker", "containerd", "ctr", "runc", "iptables", "ip", "openssl"}
    monkeypatch.setattr(shutil, "which", lambda name: name if name in found else None)
    monkeypatch.setattr(os, "geteuid", lambda: 0)

    with pytest.raises(DeviceError) as raised:
        cluster.require_prerequisites()

    _, packages, go = str(raised.value).splitlines()
    assert packages.strip() == "apt-get install --yes conntrack containernetworking-plugins gcc libc6-dev"
    assert "Go 1.25" in go


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_taking_down_ends_before_a_signal_is_heard(number: signal.Signals) -> None:
    program = (
        "import os, subprocess\n"
        "from tests.cluster.kit.cluster import unstoppable\n"
        "with unstoppable():\n"
        f"    os.kill(os.getpid(), {number:d})\n"
        f"    subprocess.run(['sh', '-c', 'kill -{number:d} $$; echo command'], check=True)\n"
        "    print('end', flush=True)\n"
        "print('not reached', flush=True)\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=60
    )

    assert done.stdout.split() == ["command", "end"]
    assert done.returncode == -number


@pytest.mark.parametrize("words", [["fake"], ["fake", "-1"], ["lose", "1", "2", "3"], ["load"], []])
def test_a_command_that_there_is_not_prints_those_that_there_are(words: list[str]) -> None:
    with pytest.raises(RecipeError, match=r"fake N \[FIRST\]"):
        command.main(words)
