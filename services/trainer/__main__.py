"""`python -m services.trainer`; what it does is in `command`."""

from __future__ import annotations

from services.common.process.entry_point import importing
from services.common.process.stage_program import run_stage


def main(argv: list[str]) -> int:
    with importing():
        from services.trainer.command import main as command  # noqa: PLC0415 - takes seconds

    return command(argv)


def begin_and_run(argv: list[str]) -> int:
    """As `main`, for a process that does nothing else: what it begins early may outlast an error, and goes with it."""
    with importing():
        from services.trainer.worker_start import begin_start  # noqa: PLC0415 - takes a fifth of a second

        begin_start(argv)
    return main(argv)


if __name__ == "__main__":
    run_stage("trainer", begin_and_run)
