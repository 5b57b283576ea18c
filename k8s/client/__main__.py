"""Creates and deletes the RayCluster that stages are deployed on: `python -m k8s.client COMMAND`.

The Makefile's targets call it. It reads its variables from the environment; `make help TARGET=cluster-up` lists them.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

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
    return cluster_up(connect(), _read_overlay(), os.environ.get("HEAD_TAG", ""))


def write() -> int:
    return write_overlay(sys.stdout, connect, _read_overlay(), os.environ.get("HEAD_TAG", ""))


def down() -> int:
    return cluster_down(connect(), _read_overlay(), is_forced=os.environ.get("FORCE", "") not in ("", "0"))


def _read_overlay() -> Path:
    return choose_overlay(os.environ.get("OVERLAY") or "local")


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: main(sys.argv[1:])))
