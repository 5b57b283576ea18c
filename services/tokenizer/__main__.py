"""Entry point of `python -m services.tokenizer`. The commands are in `services.tokenizer.command`."""

from __future__ import annotations

from services.common.process.entry_point import importing
from services.common.process.stage_program import run_stage


def main(argv: list[str]) -> int:
    with importing():
        from services.tokenizer.command import main as command  # noqa: PLC0415 - this import takes seconds

    return command(argv)


if __name__ == "__main__":
    run_stage("tokenizer", main)
