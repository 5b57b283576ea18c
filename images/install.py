"""Installs the packages of a lock during the build of an image, with the Python of the base image.

    python3 install.py LOCK          make /opt/venv from the lock
    python3 install.py --add LOCK    install the lock into /opt/venv too, and copy the files that are new to /delta

A Dockerfile copies /opt/venv into the image as one layer and /delta as a second one, so that two images with the same
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
TORCH_NEURON = BUILD / "torch-neuron.txt"
"""Pins of torch and, after it, of the Neuron packages that a trn2 image takes from other indexes than the lock's."""
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
NEURON_INDEX = "https://pip.repos.neuron.amazonaws.com"


def main(arguments: list[str]) -> None:
    name = arguments[-1]
    _require_locked_torch(name)
    if arguments == [name]:
        _require_pinned_python()
        # The venv of the compiler and the trainer shows torch and the Neuron packages of the Neuron image.
        _make_venv(with_packages_of_base=name == "compiler-neuron.txt")
        _install(BUILD / name)
        if name == "compiler-trn2.txt":
            _install_torch_neuron(BUILD / name)
    else:
        before = _now_on_disk()
        _install(BUILD / name)
        _copy_changed_since(before)


def _require_locked_torch(name: str) -> None:
    """Ends the build of a cuda image with a torch from another index, which depends on no CUDA libraries."""
    others = [variable for variable in ("TORCH_INDEX_URL", "TORCH_FIND_LINKS") if os.environ.get(variable)]
    if others and name.endswith("-cuda.txt"):
        sys.exit(
            f"install: {' and '.join(others)} would replace the torch of {name} by one without its CUDA libraries and "
            f"Triton, and the cuda variant needs them. Build without TORCH=cpu, TORCH_INDEX_URL and TORCH_FIND_LINKS: "
            f"make images VARIANT=cuda"
        )


def _require_pinned_python() -> None:
    wanted, base = os.environ["PINNED_PYTHON"], os.environ["BASE"]
    if platform.python_version() != wanted:
        sys.exit(
            f"install: the base image {base} has Python {platform.python_version()}, and images/platforms.toml pins "
            f"{wanted} for this variant. Ray refuses to mix patch versions: use a base image with Python {wanted}, or "
            f"build every image of the variant with PINNED_PYTHON={platform.python_version()}."
        )


def _make_venv(with_packages_of_base: bool) -> None:
    flags = ["--system-site-packages"] if with_packages_of_base else []
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", *flags, str(VENV)], check=True)


def _install(lock: Path) -> None:
    environment = _installer_environment()
    # A lock names every package, except those of the Neuron image: there is no dependency to look for.
    # Any index may have the pinned version, as with pip. The hashes decide whether it is the right file.
    install = [*_uv_pip_install(), "--no-deps", "--index-strategy", "unsafe-best-match"]
    torch = _torch_pin(lock)
    if not torch or not (os.environ.get("TORCH_INDEX_URL") or os.environ.get("TORCH_FIND_LINKS")):
        subprocess.run([*install, "--require-hashes", "-r", str(lock)], check=True, env=environment)
        return
    # torch is the first package, so that the build ends early when the index does not have it.
    if not _succeeds([*install, *_source_of_torch(), torch]):
        sys.exit(
            f"install: {torch} was not found where TORCH=cpu, TORCH_INDEX_URL or TORCH_FIND_LINKS told to look; uv's "
            f"message is above. Name an index that this machine reaches with TORCH_INDEX_URL=, or build without all "
            f"three, which takes torch with CUDA from the package index."
        )
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as rest:
        subprocess.run([sys.executable, str(BUILD / "without_cuda.py"), str(lock)], check=True, stdout=rest)
        subprocess.run([*install, "--require-hashes", "-r", rest.name], check=True, env=environment)


def _install_torch_neuron(lock: Path) -> None:
    """Install torch for CPUs, TorchNeuron and its compiler, whose pins have no hashes.

    Dependencies of theirs that the lock has stay at its versions, and any other comes at its newest fitting version. A
    package that Neuron's index has comes from no other index, whoever registers its name elsewhere.
    """
    lines = TORCH_NEURON.read_text(encoding="utf-8").splitlines()
    torch, *neuron = [line for line in lines if line and not line.startswith("#")]
    if not _succeeds([*_uv_pip_install(), "--no-deps", *_source_of_torch(), torch]):
        sys.exit(
            f"install: {torch} was not found in {TORCH_INDEX}, or where TORCH_INDEX_URL or TORCH_FIND_LINKS told to "
            f"look; uv's message is above. Name an index of CPU builds that this machine reaches with TORCH_INDEX_URL=."
        )
    index, links = os.environ.get("NEURON_INDEX_URL"), os.environ.get("NEURON_FIND_LINKS")
    source = ["--index", index or NEURON_INDEX] if index or not links else []
    source += ["--find-links", links] if links else []
    command = [*_uv_pip_install(), *source, "--constraints", str(lock), *neuron]
    if subprocess.run(command, check=False, env=_installer_environment()).returncode != 0:
        sys.exit(
            f"install: {', '.join(neuron)} could not be installed beside the packages of {lock.name}: from "
            f"{NEURON_INDEX}, or where NEURON_INDEX_URL or NEURON_FIND_LINKS told to look. uv's message is above. Name "
            f"an index that this machine reaches with NEURON_INDEX_URL=."
        )


def _uv_pip_install() -> list[str]:
    """The command that installs into the venv, with uv at its locked version."""
    uv = BUILD / "uv/bin/uv"
    if not uv.exists():
        subprocess.run([sys.executable, "-m", "venv", str(BUILD / "uv")], check=True)
        pip = [str(BUILD / "uv/bin/pip"), "install", "--quiet", "--no-cache-dir", "--disable-pip-version-check"]
        locked = ["--require-hashes", "-r", str(BUILD / "uv.txt")]
        subprocess.run([*pip, *locked], check=True, env=_installer_environment())
    # Python would compile all of torch at every start of an image with a read-only root.
    flags = ["--quiet", "--no-cache", "--compile-bytecode", "--python", str(VENV / "bin/python")]
    return [str(uv), "pip", "install", *flags]


def _source_of_torch() -> list[str]:
    """Options that find torch without CUDA where TORCH_INDEX_URL and TORCH_FIND_LINKS say, or else at PyTorch."""
    index, links = os.environ.get("TORCH_INDEX_URL"), os.environ.get("TORCH_FIND_LINKS")
    source = ["--default-index", index or TORCH_INDEX] if index or not links else ["--no-index"]
    return [*source, "--find-links", links] if links else source


def _succeeds(command: list[str]) -> bool:
    """Run a command of uv without the package indexes of the environment, and return whether it succeeded."""
    own = {"UV_DEFAULT_INDEX", "UV_INDEX"}
    environment = {key: value for key, value in _installer_environment().items() if key not in own}
    return subprocess.run(command, check=False, env=environment).returncode == 0


def _torch_pin(lock: Path) -> str:
    lines = lock.read_text(encoding="utf-8").splitlines()
    return next((line.split()[0] for line in lines if line.startswith("torch==")), "")


def _installer_environment() -> dict[str, str]:
    """The environment for pip and uv: pip's variables under uv's names too, and the CA bundle of images/inputs."""
    environment = {**os.environ}
    for ours, theirs in (("PIP_INDEX_URL", "UV_DEFAULT_INDEX"), ("PIP_EXTRA_INDEX_URL", "UV_INDEX")):
        if os.environ.get(ours):
            environment[theirs] = os.environ[ours]
        else:
            environment.pop(ours, None)  # pip would not replace an empty address by its default
    bundles = sorted((BUILD / "inputs").glob("*.crt"))
    if bundles:
        environment |= {"PIP_CERT": str(bundles[0]), "SSL_CERT_FILE": str(bundles[0])}
    return environment


def _now_on_disk() -> float:
    """The file system's time, which may differ from the system clock."""
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
