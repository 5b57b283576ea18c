"""Checks the infrastructure without a network and without an account, for `make check-infra`.

If a layer's tool is missing, its name is printed and the other layers run. All layers check a copy of the sources, so
that neither the user's state nor the lock of another provider version affects terraform.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from images.versions import git
from infra.apply.terraform import provider_mirror
from services.common.errors import DeviceError, RecipeError

REPOSITORY = Path(__file__).parents[1]
TOOLS = REPOSITORY / ".venv-infra-checks/bin"
SKIPS = Path(__file__).parent / "checkov-skips.txt"
SHELLS = ("sh", "bash")
TEMPLATE = ".tftpl"
GARBAGE_PERCENT = "200"
"""Percentage by which Go's heap grows before a collection. terraform takes a quarter longer with Go's 100; 400 is no
faster."""


class LeftOut(Exception):
    """Raised with the reason why a layer cannot run here."""


@dataclass(frozen=True)
class Layer:
    """A tool and all files that it checks. `run` returns the problems."""

    name: str
    run: Callable[[Path], list[str]]


def run_checks(repository: Path = REPOSITORY) -> None:
    """Prints one line per layer. Raises `DeviceError` with all problems."""
    problems = []
    with TemporaryDirectory(prefix="millrace-infra-") as folder:
        copy_sources(repository, Path(folder))
        for layer in LAYERS:
            began = time.monotonic()
            try:
                found = layer.run(Path(folder))
            except LeftOut as reason:
                print(f"{layer.name:20} left out: {reason}", flush=True)
                continue
            print(f"{layer.name:20} {'FAILED' if found else 'ok'}, {time.monotonic() - began:.1f} s", flush=True)
            problems += [f"{layer.name}: {each}" for each in found]
    if problems:
        raise DeviceError("make check-infra found\n" + "\n".join(problems))


def copy_sources(repository: Path, target: Path) -> None:
    """Copies the files that git tracks or would add: no state, no provider, no virtual environment."""
    for name in git(repository, "ls-files", "--cached", "--others", "--exclude-standard").splitlines():
        source = repository / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name, follow_symlinks=False)


def check_format(root: Path) -> list[str]:
    return _run([_terraform(), "fmt", "-check", "-diff", "-recursive", "infra"], root)


def check_stacks(root: Path) -> list[str]:
    """Runs `terraform init` from the mirror, `validate`, and `test` with mocked providers, all offline."""
    terraform = _terraform()
    if not os.environ.get("TF_PLUGIN_MIRROR"):
        raise LeftOut(
            "TF_PLUGIN_MIRROR names no folder with the AWS provider. `terraform providers mirror FOLDER` in a stack's "
            "folder makes one, where there is a network"
        )
    stacks = sorted(path.parent for path in root.glob("infra/stacks/*/main.tf"))
    with provider_mirror() as found, ThreadPoolExecutor(max_workers=2) as pool:
        environment = {"GOGC": GARBAGE_PERCENT, **found}

        def run(stack: Path, *words: str) -> list[str]:
            return _run([terraform, f"-chdir={stack.relative_to(root)}", *words], root, environment)

        def prepare(stack: Path) -> list[str]:
            return run(stack, "init", "-backend=false", "-input=false") or run(stack, "validate")

        def test(file: Path) -> list[str]:
            return run(file.parents[1], "test", f"-filter=tests/{file.name}")

        prepared = dict(zip(stacks, pool.map(prepare, stacks), strict=True))
        # Separately, the longest first, because terraform itself would run a stack's files one after another.
        files = [file for stack in stacks if not prepared[stack] for file in stack.glob("tests/*.tftest.hcl")]
        tested = pool.map(test, sorted(files, key=lambda file: (-file.stat().st_size, file)))
        return [problem for problems in (*prepared.values(), *tested) for problem in problems]


def check_policies(root: Path) -> list[str]:
    """Runs checkov, except the checks in `checkov-skips.txt`. A file that checkov cannot parse is a problem, too."""
    command = [_tool("checkov"), "--directory", "infra", "--framework", "terraform", "--output", "json", "--compact"]
    command += ["--skip-download"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    try:
        report = json.loads(done.stdout)
    except ValueError:
        return [f"checkov ended with {done.returncode} and no report: {done.stderr.strip()[-2000:]}"]
    return judge_report(report, read_skips(SKIPS))


def judge_report(report: dict[str, Any] | list[Any], skips: dict[str, str]) -> list[str]:
    """Lists failed checks without an exception, files that checkov cannot parse, and exceptions that nothing needs."""
    if isinstance(report, dict) and "results" not in report:
        return []  # checkov's answer if there is nothing to check
    results = report["results"] if isinstance(report, dict) else report[0]["results"]
    failed = results["failed_checks"]
    problems = [f"{name} cannot be parsed, so none of its resources was checked" for name in results["parsing_errors"]]
    problems += [
        f"{check['check_id']} {check['check_name']}: {check['resource']} in {check['file_path']}"
        for check in failed
        if check["check_id"] not in skips
    ]
    stale = sorted(skips.keys() - {each["check_id"] for each in failed})
    problems += [f"{each} fails nowhere: remove its line from {SKIPS.name}" for each in stale]
    return problems


def read_skips(path: Path) -> dict[str, str]:
    """Maps skipped checks to their reasons. Raises `RecipeError` for a line without a reason."""
    skips = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        check, _, reason = line.strip().partition(" ")
        if not check or check.startswith("#"):
            continue
        if len(reason.split()) < 3:
            raise RecipeError(f"{path}:{number}: {check} is skipped without a reason: write one after it")
        skips[check] = reason.strip()
    return skips


def check_shell(root: Path) -> list[str]:
    scripts = sorted(list_scripts(root))
    templates = [name for name in scripts if name.endswith(TEMPLATE)]
    problems = _run([_tool("shellcheck"), *(name for name in scripts if name not in templates)], root)
    # Terraform's placeholders look like shell variables that nobody sets, or that are set to themselves.
    options = ["--exclude=SC2154,SC2269"]
    return problems + (_run([_tool("shellcheck"), *options, *templates], root) if templates else [])


def check_yaml(root: Path) -> list[str]:
    files = sorted(str(path.relative_to(root)) for end in ("yaml", "yml") for path in root.rglob(f"*.{end}"))
    return _run([_tool("yamllint"), "--strict", "--config-file", ".yamllint.yaml", *files], root)


def list_scripts(root: Path) -> Iterator[str]:
    """Files whose first line names a shell."""
    for path in root.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                first = file.readline(80).decode(errors="replace").strip()
            if first.startswith("#!") and first.replace("/", " ").split()[-1] in SHELLS:
                yield str(path.relative_to(root))


LAYERS = (
    Layer("terraform fmt", check_format),
    Layer("terraform test", check_stacks),
    Layer("checkov", check_policies),
    Layer("shellcheck", check_shell),
    Layer("yamllint", check_yaml),
)


def _terraform() -> str:
    terraform = shutil.which("terraform")
    if terraform is None:
        raise LeftOut("no terraform on PATH: https://developer.hashicorp.com/terraform/install")
    return terraform


def _tool(name: str) -> str:
    if not (TOOLS / name).exists():
        raise LeftOut(f"no {TOOLS / name}: make check-infra installs it")
    return str(TOOLS / name)


def _run(command: list[str], root: Path, environment: dict[str, str] | None = None) -> list[str]:
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return []
    return [f"{Path(command[0]).name} ended with {done.returncode}\n{done.stdout}{done.stderr}".rstrip()]
