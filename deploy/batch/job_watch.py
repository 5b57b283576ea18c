"""Follows a job of AWS Batch: prints its states and the log of its main node."""

from __future__ import annotations

import time
from collections.abc import Callable

from deploy.batch.jobs import BatchJob, Jobs
from deploy.exit_codes import find_error_line
from deploy.progress import ProgressPrinter, print_line
from services.common.errors import DeviceError, TryAgain

POLL_SECONDS = 5.0
KEPT_LINES = 200


def follow(
    jobs: Jobs,
    job_id: str,
    is_log_whole: bool = False,
    take: Callable[[str], None] = print_line,
    look: Callable[[BatchJob], object] = lambda job: None,
) -> BatchJob:
    """Follow the job until it has ended, and return it. Interrupting this does not stop the job.

    `look` receives the job's description at every poll, and `take` every line of the log; `is_log_whole` includes the
    logs of earlier attempts. A poll that Batch does not answer is repeated. Raises `DeviceError` for a job that Batch
    does not know.
    """
    report, tokens, kept = ProgressPrinter(f"job {job_id}").report, dict[str, str](), list[str]()
    while True:
        try:
            job = jobs.find(job_id)
            if job is None:
                raise DeviceError(
                    f"Batch knows no job {job_id}: make stage-status TARGET=batch shows the jobs that it knows"
                )
            tried = f", attempt {len(job.attempts) + 1}" if job.is_active and job.attempts else ""
            report(f"{job.stage} is {job.status.lower()}{tried}{f': {job.reason}' if job.reason else ''}")
            look(job)
            for stream in job.log_streams if is_log_whole or not job.is_active else job.log_streams[-1:]:
                while True:
                    before = tokens.get(stream, "")
                    lines, tokens[stream] = jobs.read_log(job.stage, stream, before)
                    kept = [*kept, *lines][-KEPT_LINES:]
                    for line in lines:
                        take(line)
                    if tokens[stream] == before:  # CloudWatch returns the same token at the end
                        break
            if not job.is_active:
                said = f": {find_error_line(chr(10).join(kept))}" if job.exit_code and kept else ""
                print_line(f"job {job.id}: {job.stage} ended with exit code {job.exit_code}{said}")
                return job
        except TryAgain as error:
            report(f"{error}; the job continues")
        time.sleep(POLL_SECONDS)
