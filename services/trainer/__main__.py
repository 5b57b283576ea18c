"""Entry point of `python -m services.trainer`; the commands are in `services.trainer.command`."""

from __future__ import annotations

from services.common.process.entry_point import importing
from services.common.process.stage_program import run_stage


def main(argv: list[str]) -> int:
    with importing():
        from services.trainer.command import main as command  # noqa: PLC0415 - a stop during imports ends at once

    return command(argv)


if __name__ == "__main__":
    run_stage("trainer", main)
