"""`python -m services.compiler`; what it does is in `command`."""

from __future__ import annotations

from services.common.errors import ending_at_once_on_sigterm, run_stage


def main(argv: list[str]) -> int:
    with ending_at_once_on_sigterm():
        from services.compiler.command import main as command  # noqa: PLC0415 - takes seconds

    return command(argv)


if __name__ == "__main__":
    run_stage(main)
