"""Writes `k8s/overlays/eks/settings.env`, the account's ids and names for the manifests, from terraform's outputs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.artifacts.manifest import write_durably
from services.common.errors import DeviceError

SETTINGS = Path(__file__).parents[2] / "k8s/overlays/eks/settings.env"
PLACEHOLDER = "CHANGE-ME"
# Each key is the name of a terraform output in upper case.
OF_THE_ACCOUNT = ("REGION", "CLUSTER_NAME", "REGISTRY", "FSX_ID", "FSX_DNS_NAME", "FSX_MOUNT_NAME")
OF_THE_POOLS = (
    *("TRAINIUM_SHAPE", "TRAINIUM_NODE_GROUP", "TRAINIUM_MAX_NODES"),
    *("CPU_SHAPE", "CPU_NODE_GROUP", "CPU_MAX_NODES"),
)
END = "CAPACITY_ENDS_AT"


def write_settings(outputs: Mapping[str, Any], path: Path = SETTINGS) -> None:
    """Replaces the values atomically: a reader sees the old file or the new one. All other lines stay.

    An output is empty if the user brings that resource and has written its values. Raises `DeviceError`, and writes
    nothing, if terraform lacks one of the outputs.
    """
    found = {key: str(outputs.get(key.lower()) or "") for key in (*OF_THE_ACCOUNT, *OF_THE_POOLS, END)}
    if lacking := [key.lower() for key in found if key != END and outputs.get(key.lower()) is None]:
        raise DeviceError(
            f"terraform has no output {', '.join(lacking)}, so {path} was not changed. make infra-up DRY_RUN=1 shows "
            f"what of the stack is not applied yet"
        )
    _replace(path, {key: value for key, value in found.items() if value or key == END})


def forget_settings(path: Path = SETTINGS) -> None:
    """Replaces the values by placeholders, which `make cluster-up` refuses, once the resources are gone."""
    _replace(path, dict.fromkeys(OF_THE_ACCOUNT, PLACEHOLDER) | {END: ""})


def _replace(path: Path, values: Mapping[str, str]) -> None:
    left, lines = dict(values), []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        key = line.partition("=")[0]
        lines.append(f"{key}={left.pop(key)}" if key in left else line)
    lines += [f"{key}={value}" for key, value in left.items()]
    # Without quotes, because kustomize would take them as part of the value.
    write_durably(path, "".join(f"{line}\n" for line in lines).encode())
