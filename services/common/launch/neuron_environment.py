"""Makes the environment variables that tell Neuron's runtime a worker's NeuronCore and how to reach other workers.

One function makes them for every launcher. torch_xla and the runtime read them once, when they are loaded. They include
the variables that torch_xla derives from torchrun's, and those that it sets wrongly or not at all on several nodes.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from services.common.errors import DeviceError
from services.common.launch.launcher import WorkerEnvironment, WorkerGroupSpec

XLA = "xla"
NEURON_DEVICES = frozenset({XLA, "neuron"})
"""Devices of a recipe that are NeuronCores: `xla` uses torch_xla, `neuron` uses TorchNeuron."""

VISIBLE_CORES = "NEURON_RT_VISIBLE_CORES"

# With torchrun's variable torch_xla would divide the visible cores among the workers, and refuse a single core. The
# variable of torch_xla's own launcher means the same as NEURON_PJRT_WORLD_SIZE.
CONTRADICTING_VARIABLES = ("TORCHELASTIC_RUN_ID", "NEURON_PJRT_PROCESSES_NUM_DEVICES")

EFA_VARIABLES = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "1"}
EFA_DEVICES = Path("/dev/infiniband")


@dataclass(frozen=True)
class NodeNetwork:
    """The network of this node that leads to the other nodes."""

    interface: str
    """Name of the interface whose address the other nodes use for this node."""
    has_efa: bool


def neuron_environment(
    spec: WorkerGroupSpec, worker: WorkerEnvironment, root_communicator: str, network: NodeNetwork
) -> dict[str, str]:
    """Return the environment variables of one worker of the group that `spec` describes.

    A worker gets the core of its local rank, so that consecutive ranks, which share a model, use neighbouring cores.
    With TorchNeuron no core is named here: its backend takes one of the visible cores.
    """
    variables = {
        "NEURON_RT_ROOT_COMM_ID": root_communicator,
        # The collectives' own search finds none where an interface's address has a prefix of 32 bits, as in EKS pods.
        "CCOM_SOCKET_IFNAME": network.interface,
        "NCCL_SOCKET_IFNAME": network.interface,
    }
    if spec.device == XLA:
        variables |= {
            VISIBLE_CORES: str(worker.local_rank),
            "NEURON_PJRT_PROCESS_INDEX": str(worker.rank),
            "NEURON_PJRT_WORLD_SIZE": str(worker.world_size),
            "PJRT_LOCAL_PROCESS_RANK": str(worker.local_rank),
            "PJRT_LOCAL_PROCESS_COUNT": str(worker.local_world_size),
        }
    if network.has_efa:
        variables |= EFA_VARIABLES
    if spec.logical_core_size is not None:
        variables["NEURON_LOGICAL_NC_CONFIG"] = str(spec.logical_core_size)
    return variables


def set_neuron_environment(variables: Mapping[str, str]) -> None:
    """Set the variables in this process, which has not imported torch_xla, and remove those that contradict them."""
    for name in CONTRADICTING_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(variables)


def require_every_core(device: str) -> None:
    """Raise `DeviceError` where NEURON_RT_VISIBLE_CORES selects some of this machine's cores: workers would not follow
    the selection, and a Ray that is started here would count a range of cores as one core.
    """
    visible = os.environ.get(VISIBLE_CORES)
    if device == XLA and visible:
        raise DeviceError(
            f"{VISIBLE_CORES}={visible} is set, but with parallel.device = 'xla' every worker takes the core of its "
            f"local rank, beginning with core 0. Unset the variable: unset {VISIBLE_CORES}"
        )


def find_free_port(host: str) -> int:
    """Find a free port of this node, whose address for other nodes is `host`."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.bind(("", 0))
        return int(holder.getsockname()[1])


def find_network(address: str) -> NodeNetwork:
    """Find the network of this node that has `address`, at which the other nodes reach it.

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
            f"no network interface of {socket.gethostname()} has the address {address}, which Ray uses for this node, "
            f"so NeuronCores of other nodes cannot be reached. The interfaces are{seen}\n"
            f"Start Ray on an address of this machine (ray start --node-ip-address); on Kubernetes, on the pod's."
        )
    return NodeNetwork(names[0], has_efa=any(EFA_DEVICES.glob("uverbs*")))


def join_address(host: str, port: int) -> str:
    """Return HOST:PORT, or [HOST]:PORT for an address of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
