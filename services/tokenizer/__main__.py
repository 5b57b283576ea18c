"""`python -m services.tokenizer`; what it does is in `command`."""

from __future__ import annotations

from services.common.entry_point import run_stage
from services.common.stop_signals import end_at_once, on_stop_signal


def main(argv: list[str]) -> int:
    with on_stop_signal(end_at_once):  # libraries catch every error of an import that they can do without
        from services.tokenizer.command import main as command  # noqa: PLC0415 - takes seconds

    return command(argv)


if __name__ == "__main__":
    run_stage(main)
