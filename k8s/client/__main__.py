"""Makes and deletes the KubeRay cluster that stages are deployed on: `python -m k8s.client COMMAND`.

The Makefile's targets call it and say which variables each takes; it reads them from the environment.
"""

from __future__ import annotations

import argparse
import os
import sys

from k8s.client.overlay import choose_overlay, cluster_down, cluster_up, write_overlay
from k8s.objects.api import connect
from services.common.process.entry_point import exit_code_of


def main(argv: list[str]) -> int:
    commands = {
        "cluster-up": up,
        "cluster-manifests": write,
        "cluster-down": down,
    }
    parser = argparse.ArgumentParser(prog="python -m k8s.client", description=__doc__)
    parser.add_argument("command", choices=commands)
    return commands[parser.parse_args(argv).command]()


def up() -> int:
    """OVERLAY (local), HEAD_TAG (the working tree's)."""
    return cluster_up(connect(), choose_overlay(os.environ.get("OVERLAY") or "local"), os.environ.get("HEAD_TAG", ""))


def write() -> int:
    """OVERLAY (local), HEAD_TAG (without it the head's image stays unset)."""
    overlay, head_tag = choose_overlay(os.environ.get("OVERLAY") or "local"), os.environ.get("HEAD_TAG", "")
    return write_overlay(sys.stdout, connect, overlay, head_tag)


def down() -> int:
    """OVERLAY (local), FORCE=1."""
    return cluster_down(connect(), choose_overlay(os.environ.get("OVERLAY") or "local"), _is_set("FORCE"))


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "") not in ("", "0")


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: main(sys.argv[1:])))
