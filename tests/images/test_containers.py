"""The images as they run: with a read-only root, without a network, as a user without a name; swapped one by one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from images.build import choose_platform, require_engine
from images.lock import pins_of
from images.platforms import REPOSITORY, SERVICES
from images.registry import resolve_digest
from services.common.errors import DeviceError
from tests.containers import docker, inspect_image, run_stage
from tests.images.checkout import commit, git
from tests.registry import running_registry
from tests.small import write_notes, write_small_recipe

pytestmark = [pytest.mark.images, pytest.mark.timeout(1800)]

# One worker that compiles nothing: what is compiled and by how many is tested without containers.
OPTIONS = "--tokenizer.num_workers=1 --parallel.data_parallel_size=1 --compile.enabled=false --train.max_steps=3"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone in which the working tree's state is committed. Building it leaves the working tree as it is."""
    try:
        require_engine()
    except DeviceError as error:
        pytest.skip(str(error))
    clone = tmp_path_factory.mktemp("images") / "checkout"
    git(REPOSITORY, "clone", "--quiet", str(REPOSITORY), str(clone))
    git(clone, "config", "user.name", "someone")
    git(clone, "config", "user.email", "someone@example.com")
    names = git(REPOSITORY, "ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    for name in names:
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        if (REPOSITORY / name).exists():
            shutil.copy2(REPOSITORY / name, clone / name)
        else:
            (clone / name).unlink(missing_ok=True)
    if git(clone, "status", "--porcelain"):
        commit(clone, "Take the working tree")
    for bundle in (REPOSITORY / "images/inputs").glob("*.crt"):
        shutil.copy2(bundle, clone / "images/inputs")
    if (REPOSITORY / ".pants-bootstrap").exists():
        (clone / ".pants-bootstrap").symlink_to(REPOSITORY / ".pants-bootstrap")
    return clone


@pytest.fixture(scope="module")
def images(checkout: Path) -> dict[str, str]:
    """Names of the built cpu images, by service."""
    return build(checkout)


def run_images(checkout: Path, command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "REGISTRY": "localhost/millrace-test", "PANTS_PANTSD": "false", **variables}
    command_line = [sys.executable, "-m", "images", command]
    return subprocess.run(command_line, cwd=checkout, env=environment, capture_output=True, text=True, check=False)


def build(checkout: Path, **variables: str) -> dict[str, str]:
    done = run_images(checkout, "build", **variables)
    assert done.returncode == 0, done.stderr
    names = run_images(checkout, "names", **variables).stdout.split()
    return {name.split("/")[3].partition(":")[0]: name for name in names}


def make_root(folder: Path) -> Path:
    """An artifact root with the text that is tokenized, so that containers see it."""
    write_notes(folder / "notes")
    return folder


def layers_of(image: str) -> list[str]:
    return list(inspect_image(image)["RootFS"]["Layers"])


def labels_of(image: str) -> dict[str, str]:
    return dict(inspect_image(image)["Config"]["Labels"])


def describe_platform(image: str) -> str:
    """Run the check of what an image's service stands on; it fails where a library is absent."""
    check = ("--entrypoint", "python", image, "-m", "services.common.hardware.image_platform")
    return docker("run", "--rm", "--read-only", "--tmpfs", "/scratch", *check)


def tag_of(image: str) -> str:
    return image.rpartition(":")[2]


def test_labels_say_what_an_image_is_and_all_of_a_variant_have_one_pin(images: dict[str, str]) -> None:
    assert images.keys() == set(SERVICES)
    platform = choose_platform("cpu")
    for service, image in images.items():
        labels = labels_of(image)
        assert labels["millrace.service"] == service
        assert labels["millrace.platform"] == f"cpu-python{platform.python}-ray{platform.ray}"
        assert labels["org.opencontainers.image.version"] == "0.1.0"
        assert labels["org.opencontainers.image.revision"].startswith(tag_of(image).split("-")[1][1:])
        inside = docker("run", "--rm", "--entrypoint", "python", image, "-c",
                        "import platform, ray; print(platform.python_version(), ray.__version__)")  # fmt: skip
        assert inside.split() == [labels["millrace.python"], labels["millrace.ray"]]


def test_the_same_image_is_pushed_once(checkout: Path, images: dict[str, str], tmp_path: Path) -> None:
    with running_registry(tmp_path) as registry:
        name = f"{registry}/millrace/head:{tag_of(images['head'])}"
        digests = []
        for is_there in (False, True):
            pushed = run_images(checkout, "build", STAGE="head", PUSH=registry)
            assert pushed.returncode == 0, pushed.stderr
            assert (f"already there: {name}" in pushed.stdout) == is_there
            digests.append(resolve_digest(name))
        assert digests[0] == digests[1]


def test_the_compiler_and_the_trainer_share_every_layer_up_to_the_trainer_s_own_packages(
    images: dict[str, str],
) -> None:
    """The layers above are the packages and three of code: services/common, infra and the service."""
    compiler, trainer = layers_of(images["compiler"]), layers_of(images["trainer"])
    shared = [ours == theirs for ours, theirs in zip(compiler, trainer, strict=True)]
    assert shared == [True] * (len(shared) - 4) + [False] * 4


def test_a_changed_line_changes_the_last_layer_and_the_tag_of_that_stage_alone(
    checkout: Path, images: dict[str, str], tmp_path: Path
) -> None:
    root = make_root(tmp_path / "fsx")
    recipe = write_small_recipe(tmp_path / "small.toml", "/fsx/notes")
    run_stage(images["tokenizer"], recipe, root, *OPTIONS.split())
    loop = checkout / "services/trainer/loop.py"
    original = loop.read_text(encoding="utf-8")
    loop.write_text(original + "\n# A changed line.\n", encoding="utf-8")
    try:
        commit(checkout, "Change the trainer")
        changed = build(checkout)
        assert {service for service in images if tag_of(images[service]) != tag_of(changed[service])} == {"trainer"}
        assert layers_of(changed["trainer"])[:-1] == layers_of(images["trainer"])[:-1]
        assert layers_of(changed["trainer"])[-1] != layers_of(images["trainer"])[-1]

        run_stage(changed["trainer"], recipe, root, *OPTIONS.split())
        producers = {
            kind: json.loads(next(root.glob(f"{kind}/*/*/manifest.json")).read_text())["producer"]
            for kind in ("corpus", "checkpoint")
        }
        assert producers["corpus"]["image"] == images["tokenizer"]
        assert producers["checkpoint"]["image"] == changed["trainer"]
        assert producers["checkpoint"]["git_sha"] == git(checkout, "rev-parse", "HEAD")
    finally:
        git(checkout, "reset", "--quiet", "--hard", "HEAD~1")


COUNT_COMPILATIONS = """
import sys
from services.tokenizer.command import main
from services.tokenizer.encoding.chunk_kernel import encode_documents
code = main(sys.argv[1:])
print(code, sum(encode_documents.stats.cache_hits.values()), sum(encode_documents.stats.cache_misses.values()))
"""


def test_any_user_can_run_a_stage_where_only_two_folders_can_be_written(images: dict[str, str], tmp_path: Path) -> None:
    """The tokenizer's kernel comes compiled, and is used although its cache cannot be written."""
    root = make_root(tmp_path / "fsx")
    write_small_recipe(tmp_path / "small.toml", "/fsx/notes")
    os.chown(root, 4321, 4321)
    printed = docker(
        "run", "--rm", "--read-only", "--network", "none", "--user", "4321:4321", "--tmpfs", "/scratch:exec",
        "--volume", f"{root}:/fsx", "--volume", f"{tmp_path}/small.toml:/recipe.toml:ro",
        "--entrypoint", "python", images["tokenizer"], "-c", COUNT_COMPILATIONS,
        "--recipe", "/recipe.toml", "--root", "/fsx", "--launch", "inline",
    )  # fmt: skip
    assert printed.splitlines()[-1] == "0 1 0"
    assert next(root.glob("corpus/*/*/manifest.json")).stat().st_uid == 4321


def test_no_layer_and_no_history_knows_the_index_or_its_token(checkout: Path) -> None:
    if os.environ.get("PIP_INDEX_URL"):
        pytest.skip("the packages come from an index of this machine's, and its address is needed to build")
    index = "https://someone:s3cret-token@pypi.org/simple"
    # Under other names: the image of another test stays.
    image = build(checkout, STAGE="tokenizer", PIP_INDEX_URL=index, REGISTRY="localhost/millrace-token")["tokenizer"]
    assert "s3cret-token" not in docker("history", "--no-trunc", image)
    assert "s3cret-token" not in json.dumps(inspect_image(image))
    saved = subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE)
    found = subprocess.run(
        ["grep", "--count", "s3cret-token"], stdin=saved.stdout, capture_output=True, text=True, check=False
    )
    assert found.stdout.strip() == "0"
    contents = docker("run", "--rm", "--user", "0", "--entrypoint", "bash", image, "-c",
                      "grep -rlE 's3cret-token' / --exclude-dir=proc --exclude-dir=sys; ls / /opt")  # fmt: skip
    assert "s3cret" not in contents
    assert "build" not in contents.split()


@pytest.fixture(scope="module")
def neuron_images(checkout: Path, images: dict[str, str]) -> dict[str, str]:
    """Images on a stand-in for the Neuron image with the packages of the head's."""
    platform, base = choose_platform("cpu"), "localhost/millrace-test/neuron-stand-in:2.9.1"
    docker("build", "--quiet", "--build-arg", f"BASE={platform.slim}", "--build-arg", f"PACKAGES={images['head']}",
           "--tag", base, str(REPOSITORY / "tests/images/stand_in"))  # fmt: skip
    return build(checkout, VARIANT="neuron", BASE=base, SLIM_BASE=platform.slim, PINNED_PYTHON=platform.python)


def test_the_neuron_image_keeps_the_torch_of_its_base_and_says_what_nodes_it_needs(
    neuron_images: dict[str, str],
) -> None:
    assert neuron_images.keys() == set(SERVICES)
    for service in ("compiler", "trainer"):
        where = docker("run", "--rm", "--entrypoint", "python", neuron_images[service], "-c",
                       "import torch; print(torch.__version__, torch.__file__)")  # fmt: skip
        assert where.startswith("2.9.1 ")
        assert "/opt/venv" not in where
        assert labels_of(neuron_images[service])["millrace.neuron-driver"] == "2.27.4.0"
    for image in neuron_images.values():
        assert labels_of(image)["millrace.neuron-sdk"] == "2.29.1"
        assert "neuron" in describe_platform(image)


@pytest.fixture(scope="module")
def trn2_base(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables that build on a stand-in for Ubuntu with Neuron's packages and for the indexes of wheels."""
    platform = choose_platform("cpu")
    image = "localhost/millrace-test/trn2-stand-in:2.13.0"
    context = tmp_path_factory.mktemp("trn2") / "stand-in"
    shutil.copytree(REPOSITORY / "tests/images/stand_in_trn2", context)
    for name in ("neuron-runtime.txt", "torch-neuron.txt"):
        shutil.copy2(checkout / "images" / name, context)
    docker("build", "--quiet", "--build-arg", f"BASE={platform.slim}", "--tag", image, str(context))
    bases = {"BASE": image, "SLIM_BASE": platform.slim, "PINNED_PYTHON": platform.python}
    return {"VARIANT": "trn2", **bases, "TORCH_FIND_LINKS": "/stand-in/wheels", "NEURON_FIND_LINKS": "/stand-in/wheels"}


@pytest.fixture(scope="module")
def trn2_images(checkout: Path, trn2_base: dict[str, str]) -> dict[str, str]:
    """The images with the program; the others differ from those of the other variants by their locks alone."""
    return build(checkout, STAGE="compiler", **trn2_base) | build(checkout, STAGE="trainer", **trn2_base)


INSTALLED = """
import importlib.metadata, os, sys
for name in sys.argv[1:]:
    print(name, importlib.metadata.version(name))
print(os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"], *sorted(os.listdir("/opt/aws/neuron/lib")))
"""


@pytest.mark.parametrize("service", ["compiler", "trainer"])
def test_a_trn2_image_has_torch_neuron_beside_the_versions_of_its_lock(
    trn2_images: dict[str, str], service: str
) -> None:
    """Packages that TorchNeuron needs keep the versions of the lock, and are installed where the lock lacks them."""
    assert "trn2" in describe_platform(trn2_images[service])
    assert labels_of(trn2_images[service])["millrace.neuron-sdk"] == "2.33.0"
    names = ("torch", "torch-neuronx", "neuronx-cc", "nki", "numpy", "toolz")
    command = ("--entrypoint", "python", trn2_images[service], "-c", INSTALLED, *names)
    *found, runtime = docker("run", "--rm", "--read-only", "--tmpfs", "/scratch", *command).splitlines()
    versions = dict(line.split() for line in found)
    brought = pins_of(REPOSITORY / "images/torch-neuron.txt")
    assert {name: versions[name].partition("+")[0] for name in brought} == brought
    assert versions["numpy"] == pins_of(REPOSITORY / f"lockfiles/{service}-trn2.txt")["numpy"]
    assert "toolz" not in pins_of(REPOSITORY / f"lockfiles/{service}-trn2.txt")
    assert runtime == "0 aws-neuronx-collectives.so aws-neuronx-runtime-lib.so aws-neuronx-tools.so"
    assert labels_of(trn2_images[service])["millrace.neuron-driver"] == "2.31.7.0"


# Writes where the Neuron tools write, some of them whatever the variables say.
WRITES = """
set -eu
for folder in /tmp/someone/neuroncc_compile_workdir/1 /tmp/neuron-core-dump /var/tmp/neuron-compile-cache \
    ~/.cache/neuron_libtorch "$XDG_CACHE_HOME/any" "$TMPDIR/any" "$NEURON_COMPILE_CACHE_URL" ./output; do
    mkdir -p "$folder"
    echo bytes >"$folder/file"
done
echo bytes >log-neuron-cc.txt
python -c 'import tempfile; tempfile.NamedTemporaryFile().write(b"bytes")'
find /scratch -name file | wc -l
"""


@pytest.mark.parametrize("service", ["compiler", "trainer"])
@pytest.mark.parametrize("user", ["10001:10001", "4321:4321"])
def test_neurons_tools_can_write_where_they_do_under_a_read_only_root(
    neuron_images: dict[str, str], service: str, user: str
) -> None:
    written = docker("run", "--rm", "--read-only", "--user", user, "--tmpfs", "/scratch:exec,mode=1777",
                     "--entrypoint", "bash", neuron_images[service], "-c", WRITES)  # fmt: skip
    assert written == "7"  # two of the eight are one folder


@pytest.fixture(scope="module")
def cuda_trainer(checkout: Path) -> str:
    return build(checkout, STAGE="trainer", VARIANT="cuda")["trainer"]


def test_a_cuda_image_has_cuda_and_asks_for_the_gpus_and_the_driver_s_tools(cuda_trainer: str) -> None:
    assert "cuda-toolkit         13.0." in describe_platform(cuda_trainer)
    asked = {"NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"}
    assert asked <= set(inspect_image(cuda_trainer)["Config"]["Env"])
    assert labels_of(cuda_trainer)["millrace.nvidia-driver"] == "580.65.06"


# Does what Triton does first on a GPU. An empty library stands in for the driver's, which the toolkit would mount.
BUILDS_WITH_TRITON = """
set -eu
cd /scratch
echo 'int nothing(void) { return 0; }' >driver.c
gcc -shared -fPIC -Wl,-soname,libcuda.so.1 -o "/usr/lib/$(gcc -print-multiarch)/libcuda.so.1" driver.c
ldconfig
python -c '
from pathlib import Path
from triton.backends.nvidia import driver
from triton.runtime.build import _build
source = str(Path(driver.dirname) / "driver.c")
print(_build("cuda_utils", source, "/scratch", driver.library_dirs(), driver.include_dirs, driver.libraries, []))
'
ls cuda_utils*.so
"""


def test_triton_can_build_what_starts_its_kernels_in_a_cuda_image(cuda_trainer: str) -> None:
    built = docker("run", "--rm", "--user", "0", "--entrypoint", "bash", cuda_trainer, "-c", BUILDS_WITH_TRITON)
    where, name = built.splitlines()
    assert where == f"/scratch/{name}"


def test_plain_docker_build_makes_the_same_image(checkout: Path, images: dict[str, str]) -> None:
    platform = choose_platform("cpu")
    docker("build", "--quiet", "--file", "images/tokenizer.Dockerfile", "--tag", "localhost/millrace-test/plain:1",
           "--build-arg", f"BASE={platform.slim}", "--build-arg", f"PINNED_PYTHON={platform.python}", ".",
           cwd=checkout)  # fmt: skip
    assert layers_of("localhost/millrace-test/plain:1") == layers_of(images["tokenizer"])
