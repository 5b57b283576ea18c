"""The variables by which Neuron's runtime knows a worker's core, and finds those of the other workers.

One function makes them for every launcher. torch_xla and the runtime read them once, as they are loaded. They are those
that torch_xla makes of torchrun's, and those that it makes wrongly or not at all for workers of several nodes.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil

from services.common.errors import DeviceError

XLA = "xla"
NEURON_DEVICES = frozenset({XLA, "neuron"})
"""A worker's device is then a NeuronCore: of torch_xla, or of TorchNeuron."""

VISIBLE_CORES = "NEURON_RT_VISIBLE_CORES"

# Of torchrun, by which torch_xla would believe that it has to share out the visible cores, and refuse the one that
# there is; and of torch_xla's own launcher, another way to say what NEURON_PJRT_WORLD_SIZE says.
CONTRADICTING_VARIABLES = ("TORCHELASTIC_RUN_ID", "NEURON_PJRT_PROCESSES_NUM_DEVICES")

EFA_VARIABLES = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "1"}
EFA_DEVICES = Path("/dev/infiniband")


@dataclass(frozen=True)
class WorkerPlace:
    """Which worker a process is, among all and among those of its node."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int


@dataclass(frozen=True)
class MeetingPoint:
    """An address of rank 0's node, and two ports there that were free."""

    host: str
    store_port: int
    """Where torch's processes meet."""
    communicator_port: int
    """Where the runtime's do, which needs one of its own: left to itself, torch_xla takes 62182 on every node."""


@dataclass(frozen=True)
class NodeNetwork:
    interface: str
    """The one with the address by which other nodes know this one."""
    has_efa: bool


def neuron_environment(
    device: str,
    place: WorkerPlace,
    meeting: MeetingPoint,
    network: NodeNetwork,
    logical_core_size: int | None = None,
) -> dict[str, str]:
    """The variables of one worker. `logical_core_size` are the physical cores that make one of a worker's (Neuron's
    LNC), where the instance type leaves a choice.

    A worker has the core of its index on the node: ranks that follow one another, as those that share a model do, are
    on cores that follow one another. With TorchNeuron no core is named here: its backend takes one of the visible.
    """
    variables = {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(place.node_rank),
        "MASTER_ADDR": meeting.host,
        "MASTER_PORT": str(meeting.store_port),
        "NEURON_RT_ROOT_COMM_ID": _join(meeting.host, meeting.communicator_port),
        # The collectives' own search finds none where an interface's address has a prefix of 32 bits, as in EKS pods.
        "CCOM_SOCKET_IFNAME": network.interface,
        "NCCL_SOCKET_IFNAME": network.interface,
    }
    if device == XLA:
        variables |= {
            VISIBLE_CORES: str(place.local_rank),
            "NEURON_PJRT_PROCESS_INDEX": str(place.rank),
            "NEURON_PJRT_WORLD_SIZE": str(place.world_size),
            "PJRT_LOCAL_PROCESS_RANK": str(place.local_rank),
            "PJRT_LOCAL_PROCESS_COUNT": str(place.local_world_size),
        }
    if network.has_efa:
        variables |= EFA_VARIABLES
    if logical_core_size is not None:
        variables["NEURON_LOGICAL_NC_CONFIG"] = str(logical_core_size)
    return variables


def set_neuron_environment(variables: Mapping[str, str]) -> None:
    """Give this process the variables, and take away what contradicts them.

    Raises `DeviceError` where torch_xla is imported already: it would go on with what it read then.
    """
    if "torch_xla" in sys.modules:
        raise DeviceError(
            f"worker {variables['RANK']} (pid {os.getpid()}) had imported torch_xla before it was told its rank and "
            f"its NeuronCore, and torch_xla reads them as it is imported. Something that starts with every Python "
            f"process here imports it: look for it in sitecustomize, .pth files and Ray's worker_process_setup_hook."
        )
    for name in CONTRADICTING_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(variables)


def require_every_core(device: str) -> None:
    """Raise `DeviceError` where this command was given a choice of this machine's cores, which its workers would not
    follow; and Ray, started in place, takes a range of cores for one.
    """
    visible = os.environ.get(VISIBLE_CORES)
    if device == XLA and visible:
        raise DeviceError(
            f"{VISIBLE_CORES}={visible} is set, and each worker of parallel.device = 'xla' takes the core of its index "
            f"on the node, from 0 on. Unset it: unset {VISIBLE_CORES}"
        )


def find_meeting_point(host: str) -> MeetingPoint:
    """Two different free ports of this node, which the others know as `host`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as stack:
        ports = []
        for _ in range(2):  # both are held until the second is found: the first would else be found again
            holder = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            holder.bind(("", 0))
            ports.append(holder.getsockname()[1])
    return MeetingPoint(host, *ports)


def find_network(address: str) -> NodeNetwork:
    """This node's network, by the address at which the other nodes reach it.

    Raises `DeviceError` where no interface has the address.
    """
    found = {
        name: {each.address.partition("%")[0] for each in addresses}  # a link-local one ends with its interface
        for name, addresses in psutil.net_if_addrs().items()
    }
    names = [name for name, addresses in found.items() if address in addresses]
    if not names:
        seen = "".join(f"\n  {name}: {', '.join(sorted(addresses))}" for name, addresses in found.items())
        raise DeviceError(
            f"no network interface of {socket.gethostname()} has the address {address}, by which Ray knows this node, "
            f"so the NeuronCores of other nodes cannot be reached from here. It has{seen}\n"
            f"Start Ray on an address of this machine (ray start --node-ip-address); on Kubernetes, on the pod's."
        )
    return NodeNetwork(names[0], has_efa=any(EFA_DEVICES.glob("uverbs*")))


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
