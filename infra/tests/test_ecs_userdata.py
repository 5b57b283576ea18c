"""User data of nodes: Batch's is run with stand-ins for the machine's programs, and EKS' is read as nodeadm does.

`test_apply.py` reads what terraform makes of them.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest
import yaml

from infra.tests.programs import Programs

USERDATA = Path(__file__).parents[1] / "userdata"
UINT64_MAX = 2**64 - 1
SOURCE = "fs-0123456789abcdef0.fsx.us-west-2.amazonaws.com@tcp:/mockmnt"


def render(name: str, **values: object) -> str:
    """Renders a template like terraform's templatefile."""
    text = (USERDATA / f"{name}.sh.tftpl").read_text(encoding="utf-8")
    for key, value in values.items():
        text = text.replace(f"${{{key}}}", str(value))
    assert "${" not in text
    return text


def run_script(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False)


@pytest.fixture
def machine(programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for name in ("mkdir", "chmod", "touch", "sha256sum", "mktemp", "awk"):
        programs.add_real(name)
    for name in ("sleep", "grep"):
        programs.remove(name)
    for name in ("sleep", "mount.lustre", "mkfs.xfs", "mdadm", "chown", "find", "modprobe"):
        programs.add(name)
    return programs


@pytest.mark.parametrize(
    ("mount", "mountpoint", "kind", "exit_code"),
    [
        ("touch {}/mounted", "[ -e {}/mounted ]", "lustre", 0),
        ("exit 1", "exit 1", "lustre", 1),
        ("exit 0", "exit 1", "lustre", 1),
        ("exit 0", "exit 0", "xfs", 1),
    ],
    ids=["mounted", "mount fails", "nothing is mounted", "something else is mounted"],
)
def test_the_marker_is_there_once_lustre_is_mounted(
    machine: Programs, tmp_path: Path, mount: str, mountpoint: str, kind: str, exit_code: int
) -> None:
    script = render(
        "ecs-file-system",
        folder=tmp_path / "fsx",
        dns_name=SOURCE.partition("@")[0],
        mount_name="mockmnt",
        marker=".millrace-root",
        user=10001,
    )
    machine.add("mount", mount.format(tmp_path))
    machine.add("mountpoint", mountpoint.format(tmp_path))
    machine.add("findmnt", f"echo {kind}")
    machine.add("grep", "exit 1")

    done = run_script(script.replace("/etc/fstab", str(tmp_path / "fstab")))

    assert done.returncode == exit_code, done.stderr
    assert (tmp_path / "fsx/.millrace-root").exists() == (exit_code == 0)
    assert (SOURCE in done.stderr) == (exit_code == 1)
    assert (tmp_path / "fstab").read_text() == f"{SOURCE} {tmp_path}/fsx lustre relatime,flock,_netdev 0 0\n"


@pytest.mark.parametrize(("disks", "made"), [(0, []), (1, ["mkfs.xfs", "mount"]), (4, ["mdadm", "mkfs.xfs", "mount"])])
def test_scratch_is_on_all_disks_that_end_with_the_instance(
    machine: Programs, tmp_path: Path, disks: int, made: list[str]
) -> None:
    found = "".join(f"/dev/nvme{number + 1}n1 Amazon EC2 NVMe Instance Storage\n" for number in range(disks))
    machine.add("lsblk", f"cat <<'EOF'\n/dev/nvme0n1 Amazon Elastic Block Store\n{found}EOF")
    machine.add("mountpoint", "exit 1")
    machine.add("mount")

    done = run_script(render("ecs-scratch", folder=tmp_path / "scratch"))

    assert done.returncode == 0, done.stderr
    calls = [call for call in machine.calls if call.split()[0] in ("mdadm", "mkfs.xfs", "mount")]
    assert [call.split()[0] for call in calls] == made
    if disks > 1:
        assert f"--level=0 --raid-devices={disks} --run /dev/nvme1n1" in calls[0]
    assert (tmp_path / "scratch").stat().st_mode & 0o7777 == 0o1777


@pytest.mark.parametrize("downloaded", ["the installer", "something else"])
def test_the_efa_installer_is_run_if_it_is_the_one_of_this_version(
    machine: Programs, tmp_path: Path, downloaded: str
) -> None:
    archive = "aws-efa-installer-1.41.0.tar.gz"
    installer = f'#!/bin/sh\necho "$@" > {tmp_path}/options\n'
    machine.add("curl", f"echo {downloaded} > {archive}")
    machine.add(
        "tar",
        f"mkdir aws-efa-installer && cd aws-efa-installer && cat > efa_installer.sh <<'EOF'\n{installer}EOF\n"
        "chmod +x efa_installer.sh",
    )
    done = run_script(render("ecs-efa", version="1.41.0", sha256=hashlib.sha256(b"the installer\n").hexdigest()))

    assert f"https://efa-installer.amazonaws.com/{archive}" in " ".join(machine.calls)
    if downloaded == "the installer":
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "options").read_text() == "--yes --minimal --skip-limit-conf --no-verify\n"
    else:
        assert done.returncode != 0
        assert not (tmp_path / "options").exists()


def test_the_agent_waits_for_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "ecs.config"
    path.write_text("ECS_CLUSTER=of-batch\n")
    done = run_script(render("ecs-agent", stop_seconds=330).replace("/etc/ecs/ecs.config", str(path)))
    assert done.returncode == 0, done.stderr
    lines = path.read_text().splitlines()
    assert lines[0] == "ECS_CLUSTER=of-batch"
    assert "ECS_CONTAINER_STOP_TIMEOUT=330s" in lines
    assert "ECS_AWSVPC_BLOCK_IMDS=true" in lines


def test_a_node_config_has_both_limits_and_nodeadm_merges_locked_memory_without_one() -> None:
    """A list in a NodeConfig replaces nodeadm's own, which reads numbers as floats; containerd reads unsigned ones."""
    config = yaml.safe_load((USERDATA / "nodeconfig.yaml").read_text(encoding="utf-8"))
    memory, files = config["spec"]["containerd"]["baseRuntimeSpec"]["process"]["rlimits"]
    merged = json.loads(json.dumps(memory), parse_int=float)
    assert 2**50 < int(merged["hard"]) <= UINT64_MAX
    assert (merged["type"], merged["soft"]) == ("RLIMIT_MEMLOCK", merged["hard"])
    assert files == {"type": "RLIMIT_NOFILE", "soft": 65536, "hard": 1048576}
