"""Takes a picture of a web page with Chromium: `python -m docs.site.picture PAGE.html PICTURE.png`.

With the folder of all runs, as in `fsx/run docs/report.png`, it takes the README's picture, the newest run's report.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from services.common.errors import ArtifactError
from services.common.process.entry_point import exit_code_of
from services.common.testing.browser import Browser

MAX_BYTES = 200_000
"""Size of the largest picture, in bytes: everybody who clones the repository downloads it."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.site.picture", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("page", type=Path, metavar="PAGE", help="HTML file, or a folder of runs: the newest report")
    parser.add_argument("picture", type=Path, metavar="PICTURE", help="PNG file to write")
    parser.add_argument("--width", type=int, default=1000, help="width in pixels (default: %(default)s)")
    parser.add_argument("--height", type=int, default=1110, help="height in pixels (default: %(default)s)")
    arguments = parser.parse_args(argv)
    page = find_page(arguments.page)
    arguments.picture.write_bytes(take_picture(page, arguments.width, arguments.height))
    print(f"{arguments.picture}: {arguments.picture.stat().st_size:,} bytes, of {page}")
    return 0


def find_page(path: Path) -> Path:
    """The page, or in a folder of runs the report that was written last. Raises `ArtifactError` if there is none."""
    if path.is_file():
        return path
    reports = sorted(path.glob("*/report.html"), key=lambda report: report.stat().st_mtime)
    if not reports:
        raise ArtifactError(f"{path}: expected an HTML file, or a folder of runs with a report.html. Run `make demo`.")
    return reports[-1]


def take_picture(page: Path, width: int, height: int) -> bytes:
    """The top of the page as a PNG.

    Raises `DeviceError` if no browser is installed or it fails, and `ArtifactError` if the picture has more than
    `MAX_BYTES`.
    """
    with Browser() as browser:
        browser.open(page, width, height)
        content = browser.take_picture()
    if len(content) > MAX_BYTES:
        raise ArtifactError(f"{page}: the picture has {len(content):,} bytes, expected at most {MAX_BYTES:,}.")
    return content


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: main(sys.argv[1:])))
