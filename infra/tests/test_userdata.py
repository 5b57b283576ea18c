"""A Trainium node's user data can be read by cloud-init, nodeadm and containerd."""

from __future__ import annotations

import email
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

USERDATA = Path(__file__).parents[1] / "userdata"
UINT64_MAX = 2**64 - 1


@pytest.fixture(scope="module")
def rlimits() -> dict[str, dict[str, Any]]:
    config = yaml.safe_load((USERDATA / "nodeconfig.yaml").read_text(encoding="utf-8"))
    assert config["apiVersion"] == "node.eks.aws/v1alpha1"
    limits = config["spec"]["containerd"]["baseRuntimeSpec"]["process"]["rlimits"]
    return {limit["type"]: limit for limit in limits}


def test_locked_memory_is_without_limit_after_nodeadm_has_merged_it(rlimits: dict[str, dict[str, Any]]) -> None:
    """nodeadm reads numbers as floats and containerd as unsigned integers of 64 bits."""
    merged = json.loads(json.dumps(rlimits["RLIMIT_MEMLOCK"]), parse_int=float)
    assert 2**50 < int(merged["hard"]) <= UINT64_MAX
    assert merged["soft"] == merged["hard"]


def test_the_limit_of_open_files_is_said_too(rlimits: dict[str, dict[str, Any]]) -> None:
    """A list in a NodeConfig replaces nodeadm's own."""
    assert rlimits["RLIMIT_NOFILE"] == {"type": "RLIMIT_NOFILE", "soft": 65536, "hard": 1048576}


def test_user_data_is_a_script_and_a_node_config(tmp_path: Path) -> None:
    script = (USERDATA / "huge-pages.sh.tftpl").read_text(encoding="utf-8").replace("${pages}", "5128")
    config = (USERDATA / "nodeconfig.yaml").read_text(encoding="utf-8")
    template = (USERDATA / "trainium.mime.tftpl").read_text(encoding="utf-8")
    message = email.message_from_string(template.replace("${huge_pages}", script).replace("${node_config}", config))
    kinds = {part.get_content_type(): part.get_payload() for part in message.walk() if not part.is_multipart()}
    assert list(kinds) == ["text/x-shellscript", "application/node.eks.aws"]
    assert str(kinds["text/x-shellscript"]).startswith("#!/bin/bash")
    assert [each["kind"] for each in yaml.safe_load_all(str(kinds["application/node.eks.aws"])) if each] == [
        "NodeConfig"
    ]
    path = tmp_path / "huge-pages.sh"
    path.write_text(script)
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
