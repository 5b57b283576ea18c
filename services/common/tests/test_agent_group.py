"""A command and the agents of two nodes, here processes of this machine: starts, losses, notices, and strangers."""

from __future__ import annotations

import os
import pickle
import resource
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.common.errors import ArtifactError, TryAgain, WorkersLost
from services.common.launch import agent_channel, agent_group, agent_process, fork_server
from services.common.launch.agent_channel import AgentHello, NodeIdle, connect_agent, reach_command
from services.common.launch.agent_group import AgentGroup, AgentLost, _Agent
from services.common.launch.agent_process import AgentConfig
from services.common.launch.launcher import WorkerEnvironment, WorkerGroupSpec
from services.common.launch.neuron_environment import find_meeting_point
from services.common.launch.node_agent import LOOPBACK_ADDRESS, NodeEnd
from services.common.process.private_folder import new_name, private_base
from services.common.testing.waiting import wait_until
from services.common.tests import work
from services.common.tests.builders import REPOSITORY

pytestmark = pytest.mark.skipif(not fork_server.IS_SUPPORTED, reason="workers are forked on Linux alone")

NODES = 2
PRELOAD = ("services.common.tests.work",)


class Nodes:
    """Two nodes with an agent and two workers each."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.kept_folder = folder, new_name("kept")
        self.group = AgentGroup(LOOPBACK_ADDRESS, NODES)
        self.agents = [self._start(rank) for rank in range(NODES)]

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "services.common.launch.agent_process"]
        agent = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=REPOSITORY)
        place = (rank, LOOPBACK_ADDRESS, self.group.address, self.group.key.hex(), os.getpid(), PRELOAD)
        assert agent.stdin is not None
        with agent.stdin as stdin:
            stdin.write(AgentConfig(*place).to_line())
        return agent

    def run(self, function: Callable[[Any, WorkerEnvironment], None], argument: Any = None) -> None:
        self.group.gather(lambda: None)
        spec = WorkerGroupSpec(2 * NODES, 1, 2, self.folder, preload=PRELOAD, kept_folder=self.kept_folder)
        self.group.run(pickle.dumps((function, argument or self.folder)), spec, lambda: None)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    made.group.close()
    for agent in made.agents:
        agent.wait(20)


class CountingSelector(selectors.DefaultSelector):
    def __init__(self, counted: Counter[str]) -> None:
        super().__init__()
        self._counted = counted

    def register(self, *arguments: Any) -> selectors.SelectorKey:
        self._counted["watched"] += 1
        return super().register(*arguments)


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the messages that the command sends and receives, by their types, and what it asks the kernel to watch."""
    counted: Counter[str] = Counter()
    send, receive = _Agent.send, _Agent.receive

    def count_sent(self: _Agent, message: object) -> None:
        counted[type(message).__name__] += 1
        send(self, message)

    def count_received(self: _Agent) -> object:
        message = receive(self)
        counted[type(message).__name__] += 1
        return message

    monkeypatch.setattr(_Agent, "send", count_sent)
    monkeypatch.setattr(_Agent, "receive", count_received)
    monkeypatch.setattr(selectors, "DefaultSelector", lambda: CountingSelector(counted))
    return counted


def test_a_start_and_a_loss_take_a_few_messages_for_each_node_and_the_agents_stay(
    nodes: Nodes, messages: Counter[str]
) -> None:
    nodes.run(work.write_place)

    assert [place[:3] for place in work.read_environments(nodes.folder)] == [[2, 0, 2]] * 2 + [[2, 1, 2]] * 2
    assert messages == {"NodeStart": NODES, "NodeIdle": NODES, "watched": NODES}
    messages.clear()
    kept = private_base() / nodes.kept_folder  # of both nodes, which are one machine
    assert kept.is_dir()

    with pytest.raises(WorkersLost, match=r"rank 3 \(pid \d+ on .*\) was killed by SIGKILL"):
        nodes.run(work.die_on_last_rank)

    assert messages == {
        "NodeStart": NODES,
        "WorkersFailed": 1,
        "EndWorkers": NODES - 1,
        "NodeIdle": NODES,
        "watched": NODES,
    }
    with pytest.raises(ArtifactError, match="rank 3 found damage"):
        nodes.run(work.raise_on_last_rank, "rank 3 found damage")
    assert kept.is_dir()
    nodes.run(work.write_rank)
    assert (nodes.folder / "3-of-4-on-1").exists()
    assert [agent.poll() for agent in nodes.agents] == [None] * NODES
    nodes.group.close()
    wait_until(lambda: not kept.exists())


def test_the_error_of_a_start_comes_back_and_the_next_start_works(nodes: Nodes) -> None:
    nodes.kept_folder = "missing/folder"
    with pytest.raises(FileNotFoundError, match="missing"):
        nodes.run(work.write_rank)

    nodes.kept_folder = new_name("kept")
    nodes.run(work.write_rank)
    assert (nodes.folder / "3-of-4-on-1").exists()


def test_agents_that_have_come_and_were_not_gathered_end_with_the_group(nodes: Nodes) -> None:
    wait_until(lambda: nodes.group.absent_ranks == [])

    nodes.group.close()

    assert [agent.wait(20) for agent in nodes.agents] == [0] * NODES


def test_who_has_no_key_is_no_agent_and_a_killed_agent_ends_its_workers_and_the_other_agents(nodes: Nodes) -> None:
    host, port = nodes.group.address
    with socket.create_connection((host, port)):  # says nothing, and keeps nobody waiting
        with pytest.raises(TryAgain):
            connect_agent(host, port, b"a guess")

        with pytest.raises(AgentLost, match=f"agent of node 1 .{socket.gethostname()}"):
            nodes.run(work.kill_agent)
    nodes.group.close()

    pids = [int(path.name.removeprefix("pid-")) for path in nodes.folder.glob("pid-*")]
    assert len(pids) == 2 * NODES
    wait_until(lambda: not any(map(psutil.pid_exists, pids)))
    assert [agent.wait(20) for agent in nodes.agents] == [0, -signal.SIGKILL]


def test_a_stranger_that_says_nothing_is_dropped_and_costs_no_agent(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_until(lambda: nodes.group.absent_ranks == [])  # the agents themselves have longer
    monkeypatch.setattr(agent_channel, "HANDSHAKE_SECONDS", 0.5)
    with socket.create_connection(nodes.group.address) as stranger:
        while stranger.recv(1_024):  # the command's challenge, and then its end
            pass
    wait_until(lambda: "agent" not in {thread.name for thread in threading.enumerate()})

    nodes.run(work.write_rank)


def test_an_agent_that_reads_nothing_is_lost_when_a_start_does_not_fit_into_its_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_channel, "UNREAD_SECONDS", 1.0)
    group, spec = AgentGroup(LOOPBACK_ADDRESS, 1), WorkerGroupSpec(1, 1, 1, tmp_path)
    with connect_agent(*group.address, group.key) as agent:
        agent.send(AgentHello(0, "host", find_meeting_point(LOOPBACK_ADDRESS)))
        group.gather(lambda: None)

        with pytest.raises(AgentLost, match=r"agent of node 0 \(host\)"):
            group.run(bytes(2**26), spec, lambda: None)
    group.close()


def test_the_last_node_to_end_after_a_failure_is_not_lost_however_late_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_group, "END_SECONDS", 0.0)
    group, spec = AgentGroup(LOOPBACK_ADDRESS, 1), WorkerGroupSpec(1, 1, 1, tmp_path)
    meeting = find_meeting_point(LOOPBACK_ADDRESS)
    with connect_agent(*group.address, group.key) as agent:
        agent.send(AgentHello(0, "host", meeting))
        group.gather(lambda: None)
        agent.send(NodeIdle(NodeEnd(lost="rank 0 was killed"), meeting))

        with pytest.raises(WorkersLost, match="rank 0 was killed"):
            group.run(b"", spec, lambda: None)
    group.close()


@pytest.mark.slow
def test_an_agent_whose_main_thread_hangs_ends_after_its_command(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen fork server never tells of its workers' ends, for which the agent waits."""
    monkeypatch.setattr(agent_group, "END_SECONDS", 1.0)
    with pytest.raises(AgentLost):
        nodes.run(work.freeze_parent_and_die_on_last_rank)
    nodes.group.close()

    assert 1 in [agent.wait(2 * agent_process.END_SECONDS) for agent in nodes.agents]


def test_the_command_listens_until_all_agents_are_there_and_no_longer() -> None:
    group, client = AgentGroup(LOOPBACK_ADDRESS, 1), socket.socket()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    no_descriptor = os.dup(client.fileno())
    os.close(no_descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (no_descriptor, limits[1]))
    try:
        client.connect(group.address)
        time.sleep(0.2)  # the command cannot accept this one now
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    with client, connect_agent(*group.address, group.key) as agent:
        agent.send(AgentHello(0, "host", find_meeting_point(LOOPBACK_ADDRESS)))
        group.gather(lambda: None)

        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(group.address).close()
        group.close()


def test_a_node_that_cannot_reach_the_command_says_where_and_what_to_check() -> None:
    with socket.socket() as nobody:
        nobody.bind((LOOPBACK_ADDRESS, 0))  # and does not listen
        port = nobody.getsockname()[1]

        with pytest.raises(TryAgain, match=rf"cannot reach the command at 127.0.0.1:{port}: .*network policies"):
            reach_command(LOOPBACK_ADDRESS, port)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request", struct.pack("!i", 5) + b"hello"])
def test_an_agent_that_another_program_answers_in_place_of_the_command_ends_with_75(answer: bytes) -> None:
    with socket.create_server((LOOPBACK_ADDRESS, 0)) as other, ThreadPoolExecutor(1) as pool:
        port = other.getsockname()[1]
        connecting = pool.submit(connect_agent, LOOPBACK_ADDRESS, port, b"key")
        channel, _ = other.accept()
        with channel:
            channel.sendall(answer)

        with pytest.raises(TryAgain, match=f":{port}, where the command"):
            connecting.result()
