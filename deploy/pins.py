"""Compares pins that are not Python packages with the newest releases: `python -m deploy.pins`; WRITE=1 takes some.

A source that does not answer is named, and its row and its file stay as they are.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path

from images.platforms import PLATFORMS, read_neuron_nodes, read_platforms, version_numbers
from images.registry import resolve_digest
from infra.aws_releases import AWS_RELEASES_JSON, read_support_ends
from services.common.artifacts.manifest import write_durably
from services.common.errors import DeviceError, TryAgain
from services.common.process.entry_point import exit_code_of

REPOSITORY = Path(__file__).parents[1]
PINS_TOML = Path(__file__).parent / "pins.toml"
EKS_AMI, EKS_KUBERNETES = "EKS' AMI", "EKS' Kubernetes"
TIMEOUT_SECONDS = 30
Fetch = Callable[[str], str]


@dataclass(frozen=True)
class Pin:
    """A version in a file, and where its releases are published; `pins.toml` explains the fields."""

    file: str
    pinned: str
    source: str
    released: str
    write: bool = False

    def read(self, root: Path = REPOSITORY) -> str:
        return self._find(root).group(1)

    def newest(self, page: str) -> str:
        return str(max(re.findall(self.released, page), key=version_numbers))

    def replace(self, version: str, root: Path = REPOSITORY) -> None:
        found = self._find(root)
        text = found.string[: found.start(1)] + version + found.string[found.end(1) :]
        write_durably(root / self.file, text.encode())

    def _find(self, root: Path) -> re.Match[str]:
        found = re.search(self.pinned, (root / self.file).read_text(encoding="utf-8"), re.MULTILINE)
        assert found, f"{PINS_TOML}: {self.pinned} is not in {self.file}"
        return found


def read_pins() -> dict[str, Pin]:
    return {name: Pin(**each) for name, each in tomllib.loads(PINS_TOML.read_text(encoding="utf-8")).items()}


def fetch(source: str) -> str:
    with urllib.request.urlopen(source, timeout=TIMEOUT_SECONDS) as answer:  # nosec B310 # pages of pins.toml
        return str(answer.read().decode())


def refresh(fetch: Fetch, is_written: bool, today: date, root: Path = REPOSITORY) -> list[str]:
    """Print the table, write what may be written, and return why sources could not be read, a line each."""
    pins, ends = read_pins(), read_support_ends()
    pages, unread = _read_pages(fetch, sorted({each.source for each in pins.values()}))
    print(f"{'pin':25} {'pinned':10} {'newest':10} {'support ends':12}  file")
    for name, pin in pins.items():
        pinned = pin.read(root)
        newest = pin.newest(pages[pin.source]) if pin.source in pages else "unknown"
        end = str(ends.get(pinned, "")) if name == EKS_KUBERNETES else ""
        print(f"{name:25} {pinned:10} {newest:10} {end:12}  {pin.file}")
        if is_written and pin.write and pin.source in pages:
            pin.replace(newest, root)
    if is_written and {pins[EKS_AMI].source, pins[EKS_KUBERNETES].source} <= pages.keys():
        write_releases(pages[pins[EKS_AMI].source], pages[pins[EKS_KUBERNETES].source], today, root)
    return unread


def write_releases(changelog: str, support: str, today: date, root: Path = REPOSITORY) -> None:
    """Add the AMI releases of EKS whose driver the images accept, and take the ends of support, all dated today."""
    path = root / AWS_RELEASES_JSON.relative_to(REPOSITORY)
    table = json.loads(path.read_bytes())
    eks, drivers = table["eks"], dict(_read_drivers(changelog))
    for node in read_neuron_nodes().values():
        for generation in {each[:4] for each in node.instance_families} & eks["releases"].keys():
            releases = eks["releases"][generation]
            releases |= {day: driver for day, driver in drivers.items() if node.takes_driver(driver)}
            eks["releases"][generation] = dict(sorted(releases.items()))
            eks["defaults"][generation] = max(day for day, driver in releases.items() if driver == node.driver)
    ends = {each["cycle"]: each["eol"] for each in json.loads(support)}
    for version, entry in eks["versions"].items():
        entry["standard_support_ends"] = ends.get(version, entry["standard_support_ends"])
    write_durably(path, (json.dumps(table | {"dated": str(today)}, indent=2) + "\n").encode())


def pin_base_images(path: Path = PLATFORMS) -> None:
    """Write the digest of every base image into the table `[digests]` of `platforms.toml`.

    Raises `DeviceError`, and writes nothing, when a registry does not give a digest.
    """
    bases = sorted({base for platform in read_platforms(path).values() for base in (platform.slim, platform.platform)})
    table = "".join(f'"{base}" = "{resolve_digest(base)}"\n' for base in bases)
    head = path.read_text(encoding="utf-8").partition("[digests]")[0]
    write_durably(path, f"{head}[digests]\n{table}".encode())


def _read_drivers(changelog: str) -> Iterator[tuple[str, str]]:
    """Yield the date of each AMI release, and the aws-neuronx-dkms of its Neuron AMI where it has one."""
    for day, section in re.findall(r"^# AMI Release v(\d{8})\n(.*?)(?=^# |\Z)", changelog, re.MULTILINE | re.DOTALL):
        if found := re.search(r"aws-neuronx-dkms</td>(?:.|\n)*?([\d.]+)-dkms", section):
            yield day, found[1]


def _read_pages(fetch: Fetch, sources: list[str]) -> tuple[dict[str, str], list[str]]:
    """Read all sources at the same time: their texts, and a line for each that cannot be read."""

    def read(source: str) -> str | OSError:
        try:
            return fetch(source)
        except OSError as error:
            return error

    with ThreadPoolExecutor(len(sources)) as pool:
        answers = dict(zip(sources, pool.map(read, sources), strict=True))
    pages = {source: answer for source, answer in answers.items() if isinstance(answer, str)}
    return pages, [f"{source}: {answer}" for source, answer in answers.items() if isinstance(answer, OSError)]


def main() -> int:
    is_written = os.environ.get("WRITE", "") not in ("", "0")
    unread = refresh(fetch, is_written, datetime.now(UTC).date())
    if is_written:
        try:
            pin_base_images()
        except DeviceError as error:
            unread.append(str(error))
    if unread:
        lines = "".join(f"\n  {each}" for each in unread)
        raise TryAgain(f"{len(unread)} sources could not be read, and what they say stays as it is:{lines}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
