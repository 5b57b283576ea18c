"""A real Kubernetes with Volcano and KubeRay on this machine: `python -m tests.cluster.kit COMMAND`.

build           compile the binaries
up              start everything; prints the path of its kubeconfig when the node is Ready
load IMAGE...   copy images from the local Docker engine into the node
fake NUMBER     add fake trn1.32xlarge nodes: their pods become Ready without a container
down            stop everything and remove what `up` made
"""

from __future__ import annotations

import sys

from services.common.errors import RecipeError, exit_code_of
from tests.cluster.kit import cluster


def main(argv: list[str]) -> int:
    match argv:
        case ["build"]:
            cluster.require_prerequisites()
            cluster.build()
        case ["up"]:
            cluster.up()
            print(cluster.KUBECONFIG)
        case ["load", *images] if images:
            cluster.load(*images)
        case ["fake", number] if number.isdecimal():
            cluster.fake(int(number))
        case ["down"]:
            cluster.down()
        case _:
            raise RecipeError(f"no such command: {' '.join(argv) or 'none'}\n{__doc__}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: main(sys.argv[1:])))
