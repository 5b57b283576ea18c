"""Makes a slim Python base image with debootstrap, for machines that reach Debian's packages but no image registry."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from images.docker import has_image, require_engine
from images.platforms import DebianBase, read_platforms
from services.common.errors import DeviceError

PACKAGES = ("python3", "python3-venv", "ca-certificates")
# Folders that nothing reads at run time: 137 MB of 275 (Debian 12).
LEFT_OUT = ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale", "var/log")


def make_base_image(variant: str) -> None:
    """Make the variant's Debian base image.

    Raises `DeviceError` when a tool is missing, and when Debian has another Python than the pinned one.
    """
    debian = read_platforms()[variant].debian
    if debian is None:
        raise DeviceError(
            f"the {variant} variant has no Debian base image in images/platforms.toml. Name base images that you have: "
            f"make images VARIANT={variant} BASE=... SLIM_BASE=... PINNED_PYTHON=..."
        )
    require_engine()
    if has_image(debian.slim) and os.environ.get("AGAIN", "") in ("", "0"):
        # A new base image would have another id even with the same content, and every image would be built again.
        print(f"{debian.slim} exists; AGAIN=1 makes it again, with Debian's updates")
        return
    if shutil.which("debootstrap") is None or os.geteuid() != 0:
        raise DeviceError(
            "making a base image needs root and debootstrap (Debian: apt-get install debootstrap). With an image "
            f"registry no base image has to be made: `make images` pulls {read_platforms()[variant].slim}"
        )
    with tempfile.TemporaryDirectory(prefix="millrace-base-") as folder:
        root = Path(folder) / "root"
        print(f"making {debian.slim} with debootstrap", flush=True)
        _bootstrap(debian, root)
        _require_python(debian, root)
        _import(debian, root)
    print(f"made {debian.slim}; `make images` builds on it")


def _bootstrap(debian: DebianBase, root: Path) -> None:
    mirror = [os.environ["DEBIAN_MIRROR"]] if os.environ.get("DEBIAN_MIRROR") else []
    command = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", debian.suite, str(root), *mirror]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        ending = "\n  ".join(made.stdout.splitlines()[-8:])
        raise DeviceError(f"debootstrap failed:\n  {ending}\nSet DEBIAN_MIRROR=http://... for another mirror.")
    for name in LEFT_OUT:
        for entry in (root / name).iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def _require_python(debian: DebianBase, root: Path) -> None:
    command = ["chroot", str(root), "python3", "-c", "import platform; print(platform.python_version())"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if found != debian.python:
        raise DeviceError(
            f"Debian {debian.suite} has Python {found} now, and images/platforms.toml pins {debian.python}. Change "
            f"`python` and `slim` in its tables [*.debian], and build every image of the variant again."
        )


def _import(debian: DebianBase, root: Path) -> None:
    archive = ["tar", "--directory", str(root), "--numeric-owner", "--sort=name", "--create", "."]
    with subprocess.Popen(archive, stdout=subprocess.PIPE) as tar:
        command = ["docker", "import", "--change", 'CMD ["python3"]', "--change", "ENV LANG=C.UTF-8", "-", debian.slim]
        made = subprocess.run(command, stdin=tar.stdout, capture_output=True, text=True, check=False)
    if made.returncode != 0 or tar.returncode != 0:
        raise DeviceError(f"docker import failed: {made.stderr.strip()}")
