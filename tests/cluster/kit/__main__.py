"""A real Kubernetes with Volcano and KubeRay on this machine: `python -m tests.cluster.kit COMMAND`.

build           compile the binaries
up              start everything; prints the path of its kubeconfig when the node is Ready
load IMAGE...   copy images from the local Docker engine into the node, which then knows their digests too
fake N [FIRST]  add N fake trn1.32xlarge nodes, from trn1-FIRST (0) on: their pods become Ready without a container
lose N [FIRST]  take fake nodes away
down            stop everything and remove what `up` made
"""

from __future__ import annotations

import sys
from typing import NoReturn

from services.common.errors import RecipeError
from services.common.process.entry_point import exit_code_of
from services.common.process.shutdown import Stopped, install, name_signal
from tests.cluster.kit import cluster, fake_nodes, node_images


def are_count_and_first(words: list[str]) -> bool:
    return len(words) in (1, 2) and all(word.isdecimal() for word in words)


def end(signum: int) -> NoReturn:
    raise Stopped(signum, f"Ended by {name_signal(signum)}. What was started is taken down.")


def main(argv: list[str]) -> int:
    match argv:
        case ["build"]:
            cluster.require_prerequisites()
            cluster.build()
        case ["up"]:
            cluster.up()
            print(cluster.KUBECONFIG)
        case ["load", *images] if images:
            node_images.load(*images)
        case ["fake", *numbers] if are_count_and_first(numbers):
            fake_nodes.fake(*map(int, numbers))
        case ["lose", *numbers] if are_count_and_first(numbers):
            fake_nodes.remove_fake(*map(int, numbers))
        case ["down"]:
            cluster.down()
        case _:
            raise RecipeError(f"no such command: {' '.join(argv) or 'none'}\n{__doc__}")
    return 0


if __name__ == "__main__":
    install(end)
    sys.exit(exit_code_of(lambda: main(sys.argv[1:])))
