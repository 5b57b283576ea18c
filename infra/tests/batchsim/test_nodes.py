"""Nodes of a job when one of them ends, does not come, or is lost. A script stands in for the stage."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from infra.tests.batchsim.conftest import Submit
from infra.tests.batchsim.container import KILLED, Container
from infra.tests.batchsim.job import Job, node_variables
from infra.tests.batchsim.network import Network
from infra.tests.batchsim.stages import define_one_off, define_script, make_root
from services.common.launch.launcher import STAGE_RESOURCE_PREFIX
from services.common.recipe.schema import WEBHOOK_VARIABLE
from services.common.testing.waiting import wait_until
from tests.small import write_notes

JOB_SECONDS = 300
ENDLESS = "import time; print('the stage runs', flush=True); time.sleep(3600)"

ASK_WORKERS = f"""
import os, ray

@ray.remote(num_cpus=0, resources={{"{STAGE_RESOURCE_PREFIX}tokenizer": 1}})
class Worker:
    def look(self):
        return {WEBHOOK_VARIABLE!r} in os.environ, ray.get_runtime_context().get_node_id()

ray.init(log_to_driver=False)
workers = [Worker.remote() for _ in range(2)]
found = ray.get([each.look.remote() for each in workers])
nodes = len({{node for _, node in found}})
workers_have = [has for has, _ in found]
print(f"command {{{WEBHOOK_VARIABLE!r} in os.environ}}, workers {{workers_have}} on {{nodes}} nodes", flush=True)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_root(tmp_path / "fsx")


def write(root: Path, script: str) -> Path:
    path = root / "stage.py"
    path.write_text(script, encoding="utf-8")
    return path


def wait_for_stage(job: Job, attempt: int = 1) -> None:
    node = job.wait_for_attempt(attempt).nodes[0]
    wait_until(lambda: "the stage runs" in node.log or node.poll() is not None, JOB_SECONDS)
    assert node.poll() is None, job.logs


@pytest.mark.batch
def test_the_exit_code_of_the_stage_is_the_jobs_and_children_end_with_0(root: Path, submit: Submit) -> None:
    job = submit(define_script(write(root, "import os, sys; print(os.environ['RAY_ADDRESS']); sys.exit(3)"), root))

    assert job.wait(JOB_SECONDS) == "FAILED"
    assert job.exit_codes == [3], job.logs  # and no second attempt
    (attempt,) = job.attempts
    assert f"{attempt.nodes[0].address}:6379" in attempt.nodes[0].log
    assert attempt.nodes[1].poll() == 0, job.logs


@pytest.mark.batch
def test_the_webhook_reaches_the_stage_s_command_and_no_worker_of_a_node(root: Path, submit: Submit) -> None:
    """Batch gives a secret to the containers of all nodes."""
    definition = define_script(write(root, ASK_WORKERS), root)
    variables = {**definition.environment, WEBHOOK_VARIABLE: "https://hooks.example.com/abc"}
    job = submit(replace(definition, environment=variables))

    assert job.wait(JOB_SECONDS) == "SUCCEEDED", job.logs
    assert "command True, workers [False, False] on 2 nodes" in job.attempts[0].nodes[0].log


@pytest.mark.batch
def test_a_child_that_does_not_come_ends_the_attempt_with_75_and_is_named(root: Path, submit: Submit) -> None:
    script = write(root, ENDLESS)
    job = submit(define_script(script, root, join_seconds=30, num_nodes=3, absent_nodes=frozenset([2]), attempts=2))

    assert job.wait(JOB_SECONDS) == "FAILED"
    assert job.exit_codes == [75, 75], job.logs
    assert "of 3 nodes node 2 did not join within 30 s" in job.attempts[0].nodes[0].log


@pytest.mark.batch
@pytest.mark.parametrize("is_one_off", [False, True])
def test_a_file_system_that_is_not_mounted_ends_the_job_before_anything_is_written(
    tmp_path: Path, submit: Submit, is_one_off: bool
) -> None:
    """A failed mount leaves an empty folder of that name."""
    root = tmp_path / "fsx"
    root.mkdir()
    one_off = define_one_off("trainer", root, "artifacts", "list", ".")
    job = submit(one_off if is_one_off else define_script(tmp_path / "none.py", root))

    assert job.wait(JOB_SECONDS) == "FAILED"
    assert job.exit_codes == [5], job.logs
    assert not list(root.iterdir())


@pytest.mark.batch
def test_children_leave_with_75_when_the_main_node_is_lost(root: Path, network: Network) -> None:
    """Batch, which would stop the nodes as well, does nothing here."""
    definition = define_script(write(root, ENDLESS), root)
    addresses = [network.reserve_address() for _ in range(2)]
    folder = Path(tempfile.mkdtemp(prefix="b", dir="/tmp"))
    nodes = [
        Container(
            network,
            addresses[index],
            definition.command,
            {**definition.environment, **node_variables("a-job", 1, index, addresses)},
            folder / str(index),
        )
        for index in range(2)
    ]
    try:
        wait_until(lambda: "the stage runs" in nodes[0].log, JOB_SECONDS)
        nodes[0].kill()
        wait_until(lambda: nodes[1].poll() is not None, JOB_SECONDS)
        assert nodes[1].poll() == 75, nodes[1].log
        assert "did not answer for 30 s: it was lost" in nodes[1].log
    finally:
        for node in nodes:
            node.kill()
        shutil.rmtree(folder)


@pytest.mark.batch
def test_a_lost_main_host_is_tried_again(root: Path, submit: Submit) -> None:
    first = root / "first"
    job = submit(
        define_script(
            write(root, f"import os, sys; os.path.exists({str(first)!r}) and sys.exit(0); {ENDLESS}"),
            root,
            stop_timeout_seconds=20,
        )
    )
    wait_for_stage(job)
    first.touch()
    job.wait_for_attempt(1).lose_host(0)

    assert job.wait(JOB_SECONDS) == "SUCCEEDED", job.logs
    assert job.exit_codes == [None, 0]


@pytest.mark.batch
def test_a_stage_that_is_killed_for_memory_is_tried_again(root: Path, submit: Submit) -> None:
    script = write(root, "import os; os.kill(os.getpid(), 9)")
    job = submit(define_script(script, root, attempts=1))

    assert job.wait(JOB_SECONDS) == "FAILED"
    assert job.exit_codes == [75], job.logs


@pytest.mark.batch
def test_a_stage_that_heeds_no_signal_is_ended_by_the_stop_timeout(root: Path, submit: Submit) -> None:
    script = write(root, f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {ENDLESS}")
    job = submit(define_script(script, root, stop_timeout_seconds=5))
    wait_for_stage(job)
    job.terminate()

    assert job.wait(JOB_SECONDS) == "FAILED"
    assert job.exit_codes == [KILLED], job.logs


ASKS_RAY = """
import os, subprocess, sys
ask = "import os; from ray._raylet import GcsClient; GcsClient(os.environ['RAY_ADDRESS']).get_all_node_info(timeout=5)"
def is_answered(**changed):
    return subprocess.run([sys.executable, "-c", ask], env=os.environ | changed).returncode == 0
answers = is_answered(), is_answered(RAY_AUTH_TOKEN="0" * 64), is_answered(RAY_AUTH_MODE="disabled", RAY_AUTH_TOKEN="")
print(answers)
sys.exit(0 if answers == (True, False, False) else 7)
"""


@pytest.mark.batch
def test_ray_answers_nobody_without_the_jobs_token(root: Path, submit: Submit) -> None:
    job = submit(define_script(write(root, ASKS_RAY), root))
    assert job.wait(JOB_SECONDS) == "SUCCEEDED", job.logs
    assert not list((root / "ray-tokens").iterdir())


@pytest.mark.batch
def test_a_subcommand_runs_where_the_file_system_is(root: Path, submit: Submit) -> None:
    write_notes(root / "notes")
    words = ("train-vocab", "notes", "--vocab-size", "320", "--output", "a vocabulary.model")
    job = submit(define_one_off("tokenizer", root, *words))

    assert job.wait(JOB_SECONDS) == "SUCCEEDED", job.logs
    assert f"written  {root}/a vocabulary.model" in job.attempts[0].nodes[0].log.splitlines()
    assert (root / "a vocabulary.model").stat().st_size > 0
    again = submit(define_one_off("tokenizer", root, *words))
    assert again.wait(JOB_SECONDS) == "FAILED"
    assert again.exit_codes == [2], again.logs
