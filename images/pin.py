"""Writes the digests behind the pinned base tags into `platforms.toml`, and says which are still missing."""

from __future__ import annotations

from pathlib import Path

from images.platforms import PLATFORMS, Platform, read_digests, read_platforms
from images.registry import resolve_digest


def pin(path: Path = PLATFORMS) -> dict[str, str]:
    """Resolve every base and write the `[digests]` table; all of them or nothing. Raises `DeviceError`."""
    bases = sorted({base for platform in read_platforms(path).values() for base in bases_of(platform)})
    digests = {base: resolve_digest(base) for base in bases}
    text = path.read_text(encoding="utf-8")
    head = text[: text.index("[digests]")]
    table = "".join(f'"{base}" = "{digest}"\n' for base, digest in digests.items())
    temporary = path.with_suffix(".partial")
    temporary.write_text(f"{head}[digests]\n{table}", encoding="utf-8")
    temporary.replace(path)
    return digests


def unpinned_bases(service: str, path: Path = PLATFORMS) -> list[str]:
    """The Neuron variant's base of a service, where it has no digest."""
    base = read_platforms(path)["neuron"].base_of(service)
    return [] if base in read_digests(path) else [base]


def bases_of(platform: Platform) -> list[str]:
    return [platform.slim, platform.platform]
