"""Creates and deletes the RayCluster that stages are deployed on: `python -m k8s.client COMMAND`.

The Makefile's targets call it. It reads its variables from the environment; `make help TARGET=cluster-up` lists them.
"""

from __future__ import annotations

import argparse
import os
import sys

from k8s.client.overlay import choose_overlay, cluster_down, cluster_up, write_overlay
from k8s.objects.api import connect
from services.common.process.entry_point import exit_code_of, run_main


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m k8s.client", description=__doc__)
    parser.add_argument("command", choices=("cluster-up", "cluster-manifests", "cluster-down"))
    command = parser.parse_args(argv).command
    overlay = choose_overlay(os.environ.get("OVERLAY") or "local")
    if command == "cluster-up":
        return cluster_up(connect(), overlay, os.environ.get("HEAD_TAG", ""))
    if command == "cluster-manifests":
        return write_overlay(sys.stdout, connect, overlay, os.environ.get("HEAD_TAG", ""))
    return cluster_down(connect(), overlay, is_forced=os.environ.get("FORCE", "") not in ("", "0"))


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: run_main(main, sys.argv[1:])))
