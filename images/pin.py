"""Resolves the digests of the pinned base images and writes them into `platforms.toml`."""

from __future__ import annotations

from pathlib import Path

from images.platforms import PLATFORMS, read_platforms
from images.registry import resolve_digest


def pin(path: Path = PLATFORMS) -> dict[str, str]:
    """Resolve every base image and write the table `[digests]`.

    Raises `DeviceError`, and writes nothing, when a registry does not give a digest.
    """
    bases = sorted({base for platform in read_platforms(path).values() for base in (platform.slim, platform.platform)})
    digests = {base: resolve_digest(base) for base in bases}
    text = path.read_text(encoding="utf-8")
    head = text[: text.index("[digests]")]
    table = "".join(f'"{base}" = "{digest}"\n' for base, digest in digests.items())
    temporary = path.with_suffix(".partial")
    temporary.write_text(f"{head}[digests]\n{table}", encoding="utf-8")
    temporary.replace(path)
    return digests
