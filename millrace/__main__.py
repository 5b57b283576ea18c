"""`python -m millrace`; its commands are in `millrace.command`."""

from __future__ import annotations

from millrace.command import main

if __name__ == "__main__":
    main()
