"""Writes a CycloneDX bill of materials for each image, from the lock that its packages are installed from.

The compiler's and the trainer's images of the variant trn2 have packages from other indexes, too: of these the pinned
ones are in the bill, without hashes.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from images.lock import BROUGHT
from images.platforms import REPOSITORY, STAGES_WITH_PROGRAM, read_platforms
from images.versions import describe_build
from services.common.errors import DeviceError

OUTPUT = REPOSITORY / "dist/sbom"


def write_sboms(services: Sequence[str], variant: str) -> list[Path]:
    """Write `dist/sbom/<service>-<version>-<variant>.cdx.json` for each service, and return the paths."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    return [_write(service, variant) for service in services]


def _write(service: str, variant: str) -> Path:
    build = describe_build(service, variant)
    output = OUTPUT / f"{service}-{build.tag}.cdx.json"
    with tempfile.NamedTemporaryFile(suffix=".txt") as installed:
        # A lock has packages for all systems and Pythons; an image has one of each.
        _uv("pip", "compile", "--quiet", "--no-deps", "--generate-hashes", "--no-annotate", "--no-header",
            "--python-platform", "linux", "--python-version", read_platforms()[variant].python,
            "--output-file", installed.name, f"lockfiles/{service}-{variant}.txt")  # fmt: skip
        if variant == "trn2" and service in STAGES_WITH_PROGRAM:
            with Path(installed.name).open("a", encoding="utf-8") as file:
                file.write(BROUGHT[variant].read_text(encoding="utf-8"))
        _uv("run", "--quiet", "--no-project", "--isolated", "--with-requirements", "lockfiles/sbom.txt",
            "cyclonedx-py", "requirements", "--output-reproducible", "--output-format", "JSON",
            "--output-file", str(output), installed.name)  # fmt: skip
    bill = json.loads(output.read_text(encoding="utf-8"))
    bill["metadata"]["component"] = {"type": "container", "name": f"millrace/{service}", "version": build.commit_tag}
    output.write_text(json.dumps(bill, indent=2) + "\n", encoding="utf-8")
    return output


def _uv(*arguments: str) -> None:
    if subprocess.run(["./bootstrap", "uv", *arguments], cwd=REPOSITORY, check=False).returncode != 0:
        raise DeviceError(f"uv {arguments[0]} failed: its message is above")
