"""Entry point of `python -m services.trainer`; the commands are in `services.trainer.command`."""

from __future__ import annotations

from services.common.process.entry_point import importing
from services.common.process.stage_program import run_stage


def main(argv: list[str]) -> int:
    with importing():
        from services.trainer.command import main as command  # noqa: PLC0415 - takes seconds

    return command(argv)


def start_and_run(argv: list[str]) -> int:
    """Run `main` in a process of its own, whose launcher prepares for the workers during the imports."""
    with importing():
        from services.trainer.workers.start import prestart_workers  # noqa: PLC0415 - takes a fifth of a second

        prestart_workers(argv)
    return main(argv)


if __name__ == "__main__":
    run_stage("trainer", start_and_run)
