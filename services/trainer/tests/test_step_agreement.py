"""Workers agree on their steps: on a node's board, and among the first workers of nodes by sockets on loopback."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from services.common.errors import WorkersLost
from services.common.launch.launcher import WorkerEnvironment
from services.common.launch.node_board import NodeBoard
from services.common.process.stop_reason import StopReason
from services.common.program.process_group import ProcessGroup, Store
from services.common.program.sealed_messages import seal
from services.common.testing.seeds import draw_seed
from services.trainer.agreement import leader_links
from services.trainer.agreement.leader_links import LeaderLinks
from services.trainer.agreement.recursive_doubling import Message
from services.trainer.agreement.step_agreement import StepAgreement, agreeing
from services.trainer.agreement.step_reduction import ReducedStep, WorkerStep

STEPS = 20
KEY = b"key of the start"


def environments(folder: Path, num_nodes: int, local_world_size: int) -> list[WorkerEnvironment]:
    """Describe the workers of nodes, and make the nodes' boards."""
    for node in range(num_nodes):
        (folder / str(node)).mkdir()
        NodeBoard.make(folder / str(node), local_world_size).close()
    world_size = num_nodes * local_world_size
    return [
        WorkerEnvironment(
            rank,
            world_size,
            "tcp://127.0.0.1:9",  # only the way to this address is looked up
            local_rank=rank % local_world_size,
            local_world_size=local_world_size,
            node_rank=rank // local_world_size,
            num_nodes=num_nodes,
            node_folder=folder / str(rank // local_world_size),
        )
        for rank in range(world_size)
    ]


def new_store() -> Store:
    """Make the store of workers that are threads of this process."""
    store: Store = dist.HashStore()  # type: ignore[attr-defined]
    return store


def run_workers(work: Callable[..., Any], workers: list[WorkerEnvironment]) -> list[Future[Any]]:
    """Call `work(environment, agreement)` in a thread for each worker, and return what came of it by rank."""
    store = new_store()

    def run(environment: WorkerEnvironment) -> Any:
        group = ProcessGroup(environment.rank, environment.world_size, store)
        group.timeout = timedelta(seconds=20)
        with agreeing(environment, group) as agreement:
            return work(environment, agreement)

    with ThreadPoolExecutor(len(workers)) as pool:
        return [pool.submit(run, environment) for environment in workers]


def agree(agreement: StepAgreement, step: WorkerStep) -> ReducedStep:
    agreement.begin(step)
    return agreement.finish()


@pytest.mark.parametrize(("num_nodes", "local_world_size"), [(1, 3), (2, 1), (3, 2), (5, 2)])
def test_all_workers_stop_after_the_same_step_wherever_the_reason_was_heard(
    tmp_path: Path, num_nodes: int, local_world_size: int
) -> None:
    seed = draw_seed()
    world_size = num_nodes * local_world_size
    hears, at = random.Random(seed).randrange(world_size), random.Random(seed).randrange(STEPS)

    def work(environment: WorkerEnvironment, agreement: StepAgreement) -> list[ReducedStep]:
        delays, agreed = random.Random(seed + environment.rank), []
        for number in range(STEPS):
            time.sleep(0.002 * delays.random())
            is_heard = environment.rank == hears and number == at
            agreement.begin(WorkerStep(StopReason.SIGTERM if is_heard else StopReason.NONE, written_step=1))
            time.sleep(0.002 * delays.random())  # the next step
            agreed.append(agreement.finish())
        return agreed

    first, *others = [each.result() for each in run_workers(work, environments(tmp_path, num_nodes, local_world_size))]

    assert [step.stop_reason for step in first].index(StopReason.SIGTERM) == at
    assert all(step.applied.size == world_size and step.written_step == 1 for step in first)
    assert all(repr(other) == repr(first) for other in others)


def test_a_single_worker_agrees_with_itself() -> None:
    with agreeing(WorkerEnvironment(0, 1), ProcessGroup(0, 1)) as agreement:
        assert agree(agreement, WorkerStep(StopReason.TIME_LIMIT, False)).stop_reason is StopReason.TIME_LIMIT
        assert agreement.node_stop_reason == 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_workers_hear_what_their_nodes_agent_has_heard(tmp_path: Path, world_size: int) -> None:
    environment = environments(tmp_path, 1, world_size)[0]
    NodeBoard.open(tmp_path / "0").raise_stop_reason(StopReason.PREEMPTION)
    with agreeing(environment, ProcessGroup(0, world_size)) as agreement:
        assert StopReason(agreement.node_stop_reason) is StopReason.PREEMPTION


@pytest.mark.parametrize(("num_nodes", "local_world_size"), [(1, 2), (2, 1)])
def test_a_worker_that_never_agrees_is_lost_when_a_collective_would_be(
    tmp_path: Path, num_nodes: int, local_world_size: int
) -> None:
    has_raised = threading.Event()

    def work(environment: WorkerEnvironment, agreement: StepAgreement) -> None:
        agree(agreement, WorkerStep(StopReason.NONE, False))
        agreement._group.timeout = timedelta(seconds=0.3)  # now that all have connected
        if environment.rank == 1:  # hangs
            has_raised.wait(20)
            return
        try:
            agree(agreement, WorkerStep(StopReason.NONE, False))
        finally:
            has_raised.set()

    healthy, hung = run_workers(work, environments(tmp_path, num_nodes, local_world_size))

    assert isinstance(healthy.exception(), WorkersLost)
    assert hung.exception() is None


def test_workers_of_all_nodes_hear_of_a_lost_leader_at_once(tmp_path: Path) -> None:
    def work(environment: WorkerEnvironment, agreement: StepAgreement) -> None:
        agree(agreement, WorkerStep(StopReason.NONE, False))
        if environment.rank != 2:
            agree(agreement, WorkerStep(StopReason.NONE, False))

    ends = [each.exception() for each in run_workers(work, environments(tmp_path, 4, 1))]

    assert ends[2] is None
    assert all(isinstance(ends[rank], WorkersLost) for rank in (0, 1, 3))
    assert "node 2" in str(ends[0])
    assert not any("did not agree on a step within" in str(end) for end in ends)  # the limit of a collective


def test_groups_on_one_board_do_not_read_each_others_numbers(tmp_path: Path) -> None:
    [first, second] = environments(tmp_path, 1, 2)
    with agreeing(second, ProcessGroup(1, 2)) as agreement:
        agreement.begin(WorkerStep(StopReason.INTERRUPT, False))

    later = [WorkerEnvironment(**{**vars(each), "rendezvous": "another"}) for each in (first, second)]
    agreed = [each.result() for each in run_workers(_agree_once, later)]

    assert [step.stop_reason for step in agreed] == [StopReason.NONE] * 2


def _agree_once(environment: WorkerEnvironment, agreement: StepAgreement) -> ReducedStep:
    return agree(agreement, WorkerStep(StopReason.NONE, False))


@pytest.fixture
def linked(tmp_path: Path) -> Iterator[Callable[[int], list[LeaderLinks]]]:
    """Connects the leaders of a number of nodes."""
    made: list[LeaderLinks] = []

    def link(num_nodes: int) -> list[LeaderLinks]:
        store = new_store()
        with ThreadPoolExecutor(num_nodes) as pool:
            connecting = [
                pool.submit(LeaderLinks.connect, node, num_nodes, "file", store, timedelta(seconds=20), KEY)
                for node in range(num_nodes)
            ]
        made.extend(each.result() for each in connecting)
        return made

    yield link
    for links in made:
        links.close()


def test_a_leader_has_as_many_connections_as_partners(linked: Callable[[int], list[LeaderLinks]]) -> None:
    assert [len(links._connections) for links in linked(16)] == [4] * 16


def test_a_message_arrives_whole_however_the_network_cuts_it(
    linked: Callable[[int], list[LeaderLinks]], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = linked(2)
    message = Message[tuple[float, ...]](2**63, 0, 1, 1, (0.5, float("inf"), -1.0))
    monkeypatch.setattr(leader_links, "_RECEIVE_BYTES", 7)
    near.send([message, message])
    received: list[Message[tuple[float, ...]]] = []
    while len(received) < 2:
        received += far.receive(5)

    assert received == [message, message]


def test_a_stranger_is_kept_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_links, "GREETING_SECONDS", 0.2)
    store = new_store()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(LeaderLinks.connect, 0, 2, "file", store, timedelta(seconds=20), KEY)
        port = int(store.get("leader/0").split()[0])
        strangers = [socket.create_connection(("127.0.0.1", port), 20) for _ in range(2)]
        greeting = leader_links._GREETING.pack(1)
        strangers[0].sendall(seal(b"", leader_links._route(1, 0), greeting))
        assert [stranger.recv(1) for stranger in strangers] == [b"", b""]
        monkeypatch.setattr(leader_links, "GREETING_SECONDS", 20.0)  # a leader may take longer on a busy machine
        second = pool.submit(LeaderLinks.connect, 1, 2, "file", store, timedelta(seconds=20), KEY)
        second.result().send([Message(1, 1, 0, 1, (3.0,))])
        assert first.result().receive(5) == [Message(1, 1, 0, 1, (3.0,))]
    for connection in strangers:
        connection.close()
    first.result().close()
    second.result().close()


def test_a_stranger_in_the_place_of_a_leader_gets_no_numbers_believed() -> None:
    """The workers' store is open to a stranger, who names an own address as that of a leader there."""
    store = new_store()
    with ThreadPoolExecutor(1) as pool, socket.create_server(("127.0.0.1", 0)) as stranger:
        store.set("leader/0", f"{stranger.getsockname()[1]} 127.0.0.1")
        connecting = pool.submit(LeaderLinks.connect, 1, 2, "file", store, timedelta(seconds=20), KEY)
        stranger.settimeout(20)
        connection, _ = stranger.accept()
        with connection, closing(connecting.result()) as links:
            message = leader_links._HEADER.pack(1, 1, 1) + struct.pack("=d", 3.0)
            connection.sendall(seal(connection.recv(1_024)[-32:], leader_links._route(0, 1), message))
            with pytest.raises(WorkersLost, match="node 0"):
                links.receive(5)


@pytest.mark.parametrize("address", ["none", "x 127.0.0.1"])
def test_what_is_no_address_of_a_leader_loses_the_workers(address: str) -> None:
    store = new_store()
    store.set("leader/0", address)
    with pytest.raises(WorkersLost, match="node 1 could not reach"):
        LeaderLinks.connect(1, 2, "file", store, timedelta(seconds=20), KEY)


def test_a_stranger_that_greets_byte_by_byte_keeps_no_leader_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_links, "GREETING_SECONDS", 0.2)
    store = new_store()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(LeaderLinks.connect, 0, 2, "file", store, timedelta(seconds=20), KEY)
        port = int(store.get("leader/0").split()[0])
        num_sent = 0
        with socket.create_connection(("127.0.0.1", port)) as stranger, suppress(ConnectionError):
            while num_sent < leader_links.GREETING_BYTES:
                stranger.sendall(b"-")
                num_sent += 1
                time.sleep(0.15)
        assert num_sent < leader_links.GREETING_BYTES
        monkeypatch.setattr(leader_links, "GREETING_SECONDS", 20.0)
        second = pool.submit(LeaderLinks.connect, 1, 2, "file", store, timedelta(seconds=20), KEY)
        first.result().close()
        second.result().close()


def test_a_leader_whose_partner_never_comes_is_lost() -> None:
    store = new_store()
    with pytest.raises(WorkersLost, match="node 0"):
        LeaderLinks.connect(0, 2, "file", store, timedelta(seconds=0.2), KEY)
