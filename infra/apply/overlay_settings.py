"""`k8s/overlays/eks/settings.env`: what the manifests have to know of the account, from terraform's outputs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.artifacts.manifest import write_durably
from services.common.errors import DeviceError
from services.common.input.files import read_file

SETTINGS = Path(__file__).parents[2] / "k8s/overlays/eks/settings.env"
PLACEHOLDER = "CHANGE-ME"
# Each is terraform's output of that name in lower case.
OF_THE_ACCOUNT = ("REGION", "CLUSTER_NAME", "REGISTRY", "FSX_ID", "FSX_DNS_NAME", "FSX_MOUNT_NAME")
OF_THE_POOLS = (
    "TRAINIUM_SHAPE",
    "TRAINIUM_NODE_GROUP",
    "TRAINIUM_MAX_NODES",
    "CPU_SHAPE",
    "CPU_NODE_GROUP",
    "CPU_MAX_NODES",
)
MAY_BE_EMPTY = ("CAPACITY_ENDS_AT",)


def write_settings(outputs: Mapping[str, Any], path: Path = SETTINGS) -> None:
    """Replace the values at once: a reader sees the old file or the new one. What else it says stays.

    Raises `DeviceError` for an output that is lacking; then nothing is written.
    """
    values = {key: outputs.get(key.lower()) for key in (*OF_THE_ACCOUNT, *OF_THE_POOLS, *MAY_BE_EMPTY)}
    lacking = [key.lower() for key, value in values.items() if value is None and key not in MAY_BE_EMPTY]
    if lacking:
        raise DeviceError(
            f"terraform has no output {', '.join(lacking)}, so {path} stays as it is. Is everything in the stack "
            f"applied? make infra-plan shows what is not"
        )
    # An empty one is of a part that the user brings, such as a file system, and has written there.
    made = {key: value for key, value in values.items() if value not in (None, "") or key in MAY_BE_EMPTY}
    _replace(path, {key: str(value or "") for key, value in made.items()})


def forget_settings(path: Path = SETTINGS) -> None:
    """What it named is gone: `make cluster-up` refuses to use it."""
    _replace(path, dict.fromkeys(OF_THE_ACCOUNT, PLACEHOLDER) | dict.fromkeys(MAY_BE_EMPTY, ""))


def _replace(path: Path, values: Mapping[str, str]) -> None:
    left, lines = dict(values), []
    for line in read_file(path).decode().splitlines() if path.exists() else []:
        key = line.partition("=")[0]
        lines.append(f"{key}={left.pop(key)}" if key in left else line)
    lines += [f"{key}={value}" for key, value in left.items()]
    # No quotes: kustomize takes them for a part of the value.
    write_durably(path, "".join(f"{line}\n" for line in lines).encode())
