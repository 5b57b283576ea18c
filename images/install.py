"""Installs a lock inside an image build; runs there alone, on the Python of the base image.

    python3 install.py LOCK          make /opt/venv from the lock
    python3 install.py --add LOCK    install the rest of the lock there too, and leave what is new in /delta

A stage copies /opt/venv into its image as one layer and /delta as a second one, so that two images with the same
first lock share the first layer.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

BUILD = Path(__file__).parent
VENV = Path("/opt/venv")
DELTA = Path("/delta")


def main(arguments: list[str]) -> None:
    name = arguments[-1]
    _require_locked_torch(name)
    if arguments == [name]:
        _require_pinned_python()
        _make_venv(on_platform=name == "program-neuron.txt")
        _install(BUILD / name)
    else:
        before = _now_on_disk()
        _install(BUILD / name)
        _copy_changed_since(before)


def _require_locked_torch(name: str) -> None:
    """Ends the build of a cuda image for which a torch from elsewhere is asked: it brings no CUDA libraries along."""
    elsewhere = [variable for variable in ("TORCH_INDEX_URL", "TORCH_FIND_LINKS") if os.environ.get(variable)]
    if elsewhere and name.endswith("-cuda.txt"):
        sys.exit(
            f"install: the cuda variant takes torch from {name} alone, and {' and '.join(elsewhere)} would take it "
            f"from elsewhere, without the CUDA libraries and the Triton of that lock. Build without: "
            f"make images VARIANT=cuda "
            f"{' '.join(f'{variable}=' for variable in elsewhere)}"
        )


def _require_pinned_python() -> None:
    wanted, base = os.environ["PINNED_PYTHON"], os.environ["BASE"]
    if platform.python_version() != wanted:
        sys.exit(
            f"install: the base image {base} has Python {platform.python_version()}, this variant is pinned to "
            f"{wanted} in images/platforms.toml, and Ray refuses to mix patch versions. Use a base with Python "
            f"{wanted}, or build every image of the variant with PINNED_PYTHON={platform.python_version()}."
        )


def _make_venv(on_platform: bool) -> None:
    """Without pip. On the Neuron image it sees the packages of the base, torch and Neuron's among them."""
    flags = ["--system-site-packages"] if on_platform else []
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", *flags, str(VENV)], check=True)


def _install(lock: Path) -> None:
    environment = _installer_environment()
    uv = BUILD / "uv/bin/uv"
    if not uv.exists():
        subprocess.run([sys.executable, "-m", "venv", str(BUILD / "uv")], check=True)
        pip = [str(BUILD / "uv/bin/pip"), "install", "--quiet", "--no-cache-dir", "--disable-pip-version-check"]
        subprocess.run([*pip, "--require-hashes", "-r", str(BUILD / "uv.txt")], check=True, env=environment)
    # A lock is complete, but for what the base of its variant brings.
    install = [str(uv), "pip", "install", "--quiet", "--no-cache", "--no-deps", "--python", str(VENV / "bin/python")]
    # Compiled here, because an image with a read-only root would compile all of torch again at every start.
    install += ["--compile-bytecode"]
    # As pip: any index may have the pinned version. The hashes decide whether it is the right file.
    install += ["--index-strategy", "unsafe-best-match"]
    torch_index, torch_links = os.environ.get("TORCH_INDEX_URL"), os.environ.get("TORCH_FIND_LINKS")
    if not (torch_index or torch_links) or not _torch_pin(lock):
        subprocess.run([*install, "--require-hashes", "-r", str(lock)], check=True, env=environment)
        return
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as rest:
        subprocess.run([sys.executable, str(BUILD / "without_cuda.py"), str(lock)], check=True, stdout=rest)
        subprocess.run([*install, "--require-hashes", "-r", rest.name], check=True, env=environment)
    place = ["--default-index", torch_index] if torch_index else ["--no-index"]
    place += ["--find-links", torch_links] if torch_links else []
    alone = {name: value for name, value in environment.items() if name not in ("UV_DEFAULT_INDEX", "UV_INDEX")}
    subprocess.run([*install, *place, _torch_pin(lock)], check=True, env=alone)


def _torch_pin(lock: Path) -> str:
    lines = lock.read_text(encoding="utf-8").splitlines()
    return next((line.split()[0] for line in lines if line.startswith("torch==")), "")


def _installer_environment() -> dict[str, str]:
    """pip's own variables, told to uv too, and the CA bundle of images/inputs if there is one."""
    environment = {**os.environ}
    for ours, theirs in (("PIP_INDEX_URL", "UV_DEFAULT_INDEX"), ("PIP_EXTRA_INDEX_URL", "UV_INDEX")):
        if os.environ.get(ours):
            environment[theirs] = os.environ[ours]
        else:
            environment.pop(ours, None)  # an empty address is not the default one
    bundles = sorted((BUILD / "inputs").glob("*.crt"))
    if bundles:
        environment |= {"PIP_CERT": str(bundles[0]), "SSL_CERT_FILE": str(bundles[0])}
    return environment


def _now_on_disk() -> float:
    """The file system's own time: a clock of another source may differ from the times it stamps."""
    with tempfile.NamedTemporaryFile() as file:
        return Path(file.name).stat().st_ctime


def _copy_changed_since(before: float) -> None:
    for path in sorted(VENV.rglob("*")):
        if path.lstat().st_ctime > before and (path.is_symlink() or not path.is_dir()):
            target = DELTA / path.relative_to("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target, follow_symlinks=False)
    DELTA.mkdir(exist_ok=True)


if __name__ == "__main__":
    main(sys.argv[1:])
