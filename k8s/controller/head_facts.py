"""Prints facts about the head's image as JSON, for a client that checks them before it deploys.

`python -m k8s.controller.head_facts` prints `platform` (variant, python, ray), which decides whose images may join the
cluster, and `records`, the versions of a deployment's record that its deploy Jobs read. With
`--node-pool=CLUSTER/GROUP` it also describes that pool with the rights of its service account, which a client lacks:
`node_pool` is the group as EKS describes it, or the `problem`.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from k8s.objects.deployment import RECORD_VERSION
from k8s.objects.node_group import NodeGroupError, describe_node_group
from services.common.hardware.image_platform import describe_platform


def describe_head() -> dict[str, object]:
    found = describe_platform()
    return {"platform": {name: found[name] for name in ("variant", "python", "ray")}, "records": [RECORD_VERSION]}


def describe_pool(name: str) -> dict[str, object]:
    try:
        return asdict(describe_node_group(name))
    except NodeGroupError as error:
        return {"problem": str(error), "exit_code": error.exit_code}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m k8s.controller.head_facts")
    parser.add_argument("--node-pool", default="")
    pool = parser.parse_known_args(argv)[0].node_pool  # a newer client may ask for more
    print(json.dumps(describe_head() | ({"node_pool": describe_pool(pool)} if pool else {})))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
