"""Parts of the kit that need no cluster: names of images, what is missing, and a start or an end that is cut short."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from images.platforms import REPOSITORY
from images.registry import repository_of
from k8s.client.stage_image import full_name
from services.common.errors import DeviceError, RecipeError
from services.common.process.shutdown import name_signal
from tests.cluster.kit import __main__ as command
from tests.cluster.kit import cluster, fake_nodes, node_images


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


def test_a_build_says_what_it_compiles_before_it_does_and_while_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster, "BIN", tmp_path)
    monkeypatch.setattr(cluster, "STILL_SECONDS", 0.01)
    monkeypatch.setattr(cluster, "PACKAGES", {"slow": "./slow"})
    monkeypatch.setattr(cluster, "TOOLS", {"tool": "a.test/tool@v1"})
    heard: list[str] = []

    def compile_slowly(*command: str | Path, **_: object) -> str:
        while capsys_has(heard, capsys).count("slow") < 3 and "./slow" in command:
            time.sleep(0.01)
        return ""

    monkeypatch.setattr(cluster, "run", compile_slowly)
    cluster.build()
    lines = capsys_has(heard, capsys).splitlines()
    assert "2 programs" in lines[0]
    assert [line.split()[:4] for line in lines[1:] if line.endswith("  ...")] == [
        ["1", "of", "2", "slow"],
        ["2", "of", "2", "tool"],
    ]


def capsys_has(heard: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The whole output so far."""
    heard.append(capsys.readouterr().out)
    return "".join(heard)


def test_a_load_without_a_node_names_the_command_that_starts_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(node_images, "SOCKET", tmp_path / "containerd.sock")

    with pytest.raises(DeviceError, match="make cluster-local"):
        node_images.references()


@pytest.mark.parametrize("stop", [KeyboardInterrupt, DeviceError, OSError])
def test_a_start_that_is_cut_short_takes_down_what_was_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stop: type[BaseException]
) -> None:
    done: list[str] = []

    def fail() -> None:
        done.append("start")
        raise stop

    for name in ("LOG", "PKI", "PID"):
        monkeypatch.setattr(cluster, name, tmp_path / name)
    for name in ("require_prerequisites", "build", "make_network", "make_artifacts_folder"):
        monkeypatch.setattr(cluster, name, lambda: None)
    monkeypatch.setattr(cluster, "is_up", lambda: False)
    monkeypatch.setattr(cluster, "make_certificates", lambda: "")
    monkeypatch.setattr(cluster, "write_configuration", lambda token: None)
    monkeypatch.setattr(cluster, "start_control_plane", fail)
    monkeypatch.setattr(cluster, "down", lambda: done.append("down"))

    with pytest.raises(stop):
        cluster.up()

    assert done == ["down", "start", "down"]


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGHUP, 75)])
def test_a_signal_while_an_object_is_removed_ends_a_start(number: signal.Signals, exit_code: int) -> None:
    program = (
        "import os, runpy, sys, time\n"
        "from tests.cluster.kit import cluster\n"
        "class Removed:\n"
        "    def __del__(self):\n"
        f"        os.kill(os.getpid(), {number:d})\n"
        "def up():\n"
        "    Removed()\n"
        "    time.sleep(30)\n"
        "cluster.up = up\n"
        "sys.argv[1:] = ['up']\n"
        "runpy.run_module('tests.cluster.kit', run_name='__main__')\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=60
    )

    assert done.stderr.splitlines() == [f"millrace: Ended by {name_signal(number)}. What was started is taken down."]
    assert done.returncode == exit_code


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


def test_fake_nodes_are_counted_from_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    monkeypatch.setattr(fake_nodes, "fake", lambda *numbers: calls.append(numbers))
    monkeypatch.setattr(fake_nodes, "remove_fake", lambda *numbers: calls.append(numbers))

    command.main(["fake", "2"])
    command.main(["lose", "1", "5"])

    assert calls == [(2,), (1, 5)]
    assert fake_nodes.fake_names(2, 5) == ["trn1-5", "trn1-6"]
