"""`python -m services.trainer`; what it does is in `command`."""

from __future__ import annotations

from services.common.entry_point import importing, run_stage


def main(argv: list[str]) -> int:
    with importing():
        from services.trainer.worker_start import begin_start  # noqa: PLC0415 - takes a fifth of a second

        begin_start(argv)
        from services.trainer.command import main as command  # noqa: PLC0415 - takes seconds

    return command(argv)


if __name__ == "__main__":
    run_stage(main)
