"""The rules of the house, each as a function that returns what breaks it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.architecture.imports import (
    calls_of,
    closure_of,
    imports_of,
    joined_paths_of,
    modules_of,
    reads_of,
    third_parties_of,
)

STAGES = ("tokenizer", "compiler", "trainer")
SERVICES = (*STAGES, "head")
FIRST_PARTIES = ("services", "images", "deploy", "k8s", "infra", "tests", "benchmarks")
# What deploys stages, and what of ours each part may import besides itself. The head's image has all but the client,
# and no `images`.
DEPLOY_ROOMS = {
    "deploy": ("services.common",),
    "deploy.client": ("deploy", "images", "services.common"),
    "deploy.commands": ("deploy.client", "k8s.client", "k8s.objects", "deploy.batch", "services.common"),
    "k8s.objects": ("deploy", "services.common"),
    "k8s.controller": ("k8s.objects", "deploy", "services.common"),
    "deploy.batch": (
        "deploy.client",
        "deploy",
        "images",
        "infra.shapes",
        "infra.account.session",
        "infra.account.batch_queues",
        "services.common",
    ),
    "k8s.client": ("k8s.objects", "deploy.client", "deploy", "images", "infra.shapes", "services.common"),
}
NEURON = {"torch_neuronx", "neuronx_distributed", "neuronxcc", "libneuronxla", "torch_xla", "nki"}


def stages_import_common_alone(root: Path) -> list[str]:
    """A stage imports itself, services.common and third parties; common imports no stage."""
    return [
        f"{module} imports {name}"
        for module, path in modules_of(root).items()
        for name in sorted(imports_of(path))
        if name.startswith("services.") and name.split(".")[1] not in (module.split(".")[1], "common")
    ]


def program_and_artifacts_ignore_each_other(root: Path) -> list[str]:
    sides = {
        "services.common.program": "services.common.artifacts",
        "services.common.artifacts": "services.common.program",
    }
    return [
        f"{module} imports {name}"
        for module, path in modules_of(root).items()
        for name in sorted(imports_of(path))
        for side, other in sides.items()
        if module.startswith(f"{side}.") and f"{name}.".startswith(f"{other}.")
    ]


def deploy_rooms_import_what_is_below_them(root: Path) -> list[str]:
    """The client and the controller ignore each other, and what runs in the cluster never imports `images`."""
    return [
        f"{module} imports {name}"
        for module, path in modules_of(root, "k8s", "deploy").items()
        if (room := _room_of(module))
        for name in sorted(imports_of(path))
        if name.partition(".")[0] in FIRST_PARTIES and not _may_import(room, name)
    ]


def _room_of(name: str) -> str:
    """The innermost; empty for what is in none."""
    return max((room for room in DEPLOY_ROOMS if _is_in(name, (room,))), key=len, default="")


def _may_import(room: str, name: str) -> bool:
    others = DEPLOY_ROOMS[room]
    return _room_of(name) in (room, *others) if _room_of(name) else _is_in(name, others)


def deploy_rooms_are_all_there_is(root: Path) -> list[str]:
    """A module of k8s or deploy that is in no room is bound by no rule."""
    return [
        f"{module} is in none of {', '.join(DEPLOY_ROOMS)}"
        for module in modules_of(root, "k8s", "deploy")
        if not _is_in(module, tuple(DEPLOY_ROOMS))
    ]


def services_ignore_the_infrastructure(root: Path) -> list[str]:
    """An image runs on any nodes: what it must know of them it finds there, or in a table that rides along."""
    return [
        f"{module} imports {name}"
        for module, path in modules_of(root).items()
        for name in sorted(imports_of(path))
        if _is_in(name, ("infra",))
    ]


def infrastructure_ignores_what_runs_on_it(root: Path) -> list[str]:
    """It is made before there is a cluster, and taken down by commands: it imports no deploy tool. A stage's contract
    says what nodes have to give.
    """
    return [
        f"{module} imports {name}"
        for module, path in modules_of(root, "infra").items()
        for name in sorted(imports_of(path))
        if name.partition(".")[0] in FIRST_PARTIES
        and not _is_in(name, ("infra", "images", "services.common", "deploy.stage_contract"))
    ]


def ray_is_imported_in_one_place(root: Path) -> list[str]:
    modules = ("ray_launcher", "ray_cluster", "ray_neuron", "batch.ray_nodes")
    return _who_imports(root, {"ray"}, but_for=[f"services.common.launch.{module}" for module in modules])


def neuron_is_imported_in_one_place(root: Path) -> list[str]:
    backends = "services.common.program.backends"
    return _who_imports(root, NEURON, but_for=(f"{backends}.neuron_xla", f"{backends}.neuron_distributed"))


def the_tokenizer_never_imports_torch(root: Path) -> list[str]:
    modules = modules_of(root)
    stage = {module for module in modules if module.startswith("services.tokenizer.")}
    reached = sorted(closure_of(modules, stage))
    return [f"{module} imports torch" for module in reached if "torch" in third_parties_of(modules[module])]


def requirements_name_what_is_imported(root: Path, distributions: Mapping[str, Sequence[str]]) -> list[str]:
    """Every third party in a stage's import closure is named by its requirements.txt, or by common's or the program's,
    unless it can do without it.

    `distributions` maps import names to distributions. One that is not installed is looked up under its own name.
    """
    modules = modules_of(root)
    problems = []
    for stage in STAGES:
        stage_modules = {module for module in modules if module.startswith(f"services.{stage}.")}
        reached = closure_of(modules, stage_modules, with_optional=False)
        named = requirements_of(root, stage) | requirements_of(root, "common")
        if any(module.startswith("services.common.program.") for module in reached):
            named |= requirements_of(root, "common/program")
        for module in sorted(reached):
            third_parties = third_parties_of(modules[module], with_optional=False)
            for name in sorted(third_parties - NEURON):  # the Neuron image brings these
                if not named & {_normal(each) for each in distributions.get(name, [name])}:
                    problems.append(f"{module} imports {name}, which requirements.txt of {stage} does not name")
    return problems


def requirements_of(root: Path, service: str) -> set[str]:
    lines = (root / "services" / service / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return {_normal(line) for line in lines if line.strip() and not line.startswith(("#", "-"))}


def production_imports_nothing_of_tests(root: Path) -> list[str]:
    """Images leave out services.common.testing and the services' tests."""
    return [
        f"{module} imports {name}"
        for module, path in modules_of(root).items()
        if not module.startswith("services.common.testing.")
        for name in sorted(imports_of(path))
        if re.match(r"services\.common\.testing\b|services\..*\btests\b", name)
    ]


def tests_draw_seeds_in_one_place(root: Path) -> list[str]:
    """Chance without a seed that is written down or printed makes a failure that nobody can repeat."""
    paths = [path for folder in ("services", "tests", "benchmarks") for path in sorted((root / folder).rglob("*.py"))]
    return [
        f"{path.relative_to(root)} calls {name}; use services.common.testing.seeds.draw_seed"
        for path in paths
        if path != root / "services/common/testing/seeds.py"
        for name, has_arguments in calls_of(path)
        if re.fullmatch(r"random\.(?!Random$)\w+|(np|numpy)\.random\.(?!default_rng$)\w+", name)
        or (not has_arguments and re.fullmatch(r"(random\.)?Random|((np|numpy)\.random\.)?default_rng", name))
    ]


def one_function_joins_paths_of_manifests(root: Path) -> list[str]:
    """`files.locate` alone joins the folder of an artifact with what a manifest lists: it believes no manifest."""
    return [
        f"{module}: {expression}; use services.common.artifacts.files.listed_file or locate"
        for module, path in modules_of(root).items()
        if module != "services.common.artifacts.files"
        for left, right, expression in joined_paths_of(path)
        if left.endswith(("artifact.path", "corpus.path", "cache.path", "checkpoint.path"))
        or right.endswith(("entry.path", ".shards"))
    ]


READ_THEIR_OWN = {
    "services.common.input.files": "is the one way",
    "services.common.artifacts.lease": "writes into the lock that it has read, without waiting for a pipe",
    "services.common.artifacts.manifest": "syncs folders, and reads the version of this program",
    "services.common.artifacts.process": "asks the kernel",
    "services.common.artifacts.token_stream": "maps what `locate` has found to be regular",
    "services.trainer.inspection.file_system": "measures with files of its own, and asks the kernel",
    "services.common.hardware.instance_types": "reads a table of this program",
    "services.common.launch.guard": "asks the kernel",
    "services.common.launch.process_family": "asks the kernel",
    "services.common.launch.batch.ray_token": "opens files of a folder that it holds open, without waiting for a pipe",
    "services.common.process.limits": "asks the kernel",
    "services.common.hardware.lustre": "reads a table of this program",
    "services.common.process.private_folder": "locks in a folder of this user alone",
    "services.common.program.backends.compiler_shim": "reads what its own compiler was asked, in a private folder",
    "services.common.program.source": "reads this program",
    "services.compiler.compile": "reads what its own child has written, in its scratch folder",
    "services.compiler.neuronx_cc": "reads what its own compiler has written, in its scratch folder",
    "services.compiler.trace": "reads what its parent has written, in its scratch folder",
    "services.tokenizer.encoding.compiled_kernels": "reads this program, and asks the kernel",
    "services.tokenizer.pack": "maps files of its own, whose checksums were compared",
    "services.tokenizer.sources.file_system": "opens any file system, and local files after `require_regular_file`",
    "services.trainer.conversion.hugging_face": "lets safetensors open a path after `require_regular_file`",
    "services.trainer.inspection.node_inspection": "asks the kernel",
    "services.trainer.conversion.nxd.rank_file": "lets torch open a path after `require_regular_file`",
    "services.trainer.checkpoints.shards": "lets safetensors open a path after `require_regular_file`",
    "infra.addons.releases": "reads files of this repository",
    "infra.checks": "reads files of this repository",
    "infra.cost.prices": "reads a table of this repository",
    "infra.shapes": "reads a table of this repository",
}
"""Modules that open files by themselves, and why that is none that somebody else supplied."""


def supplied_files_are_opened_in_one_way(root: Path) -> list[str]:
    """A pipe would be waited for, a device has no end, and a link may lead anywhere: `input_file` refuses them."""
    return [
        f"{module}: {call}; use services.common.input.files"
        for module, path in modules_of(root, "services", "deploy", "k8s", "infra").items()
        if module not in READ_THEIR_OWN and not module.startswith("services.common.testing.")
        for call in reads_of(path)
    ]


def services_is_no_package(root: Path) -> list[str]:
    """Images merge their folders below `services`; an `__init__.py` would belong to one of them."""
    return [str(path) for path in [root / "services" / "__init__.py"] if path.exists()]


def services_have_their_papers(root: Path) -> list[str]:
    papers = ("README.md", "CHANGELOG.md", "VERSION", "requirements.txt")
    files = [root / "services" / service / paper for service in SERVICES for paper in papers]
    return [f"{path}: missing or empty" for path in files if not path.is_file() or not path.read_bytes().strip()]


def versions_are_in_the_changelog(root: Path) -> list[str]:
    problems = []
    for stage in SERVICES:
        folder = root / "services" / stage
        version = (folder / "VERSION").read_text(encoding="utf-8").strip()
        if not re.fullmatch(r"\d+\.\d+\.\d+", version):
            problems.append(f"{stage}: VERSION is {version!r}, expected MAJOR.MINOR.PATCH")
        if version not in (folder / "CHANGELOG.md").read_text(encoding="utf-8"):
            problems.append(f"{stage}: CHANGELOG.md does not mention {version}")
    return problems


def _is_in(name: str, packages: Sequence[str]) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


def _who_imports(root: Path, names: set[str], but_for: Sequence[str] = ()) -> list[str]:
    return [
        f"{module} imports {name}"
        for module, path in modules_of(root).items()
        for name in sorted(names & third_parties_of(path))
        if module not in but_for
    ]


def _normal(requirement: str) -> str:
    """The name of a distribution as requirements and metadata both can be compared by."""
    name = re.split(r"[\s\[<>=!~;#]", requirement.strip(), maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()
