"""Follows a job of AWS Batch: prints the log of its main node, and returns the stage's exit code."""

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
) -> int:
    """Follow the job until it has ended. Interrupting this does not stop the job.

    `look` receives the job's description at every poll, and `take` every line of the log; `is_log_whole` includes the
    logs of earlier attempts. A poll that Batch does not answer is repeated. Raises `DeviceError` for a job that Batch
    does not know.
    """
    report, log = ProgressPrinter(f"job {job_id}").report, _Log(jobs, take)
    while True:
        try:
            job = jobs.find(job_id)
            if job is None:
                raise DeviceError(
                    f"Batch knows no job {job_id}: make stage-status TARGET=batch shows the jobs that it knows"
                )
            report(_describe(job))
            look(job)
            for stream in job.log_streams if is_log_whole or not job.is_active else job.log_streams[-1:]:
                log.copy(job, stream)
            if not job.is_active:
                return _finish(job, log)
        except TryAgain as error:
            report(f"{error}; the job continues")
        time.sleep(POLL_SECONDS)


class _Log:
    """Reads log streams, and passes every line on once."""

    def __init__(self, jobs: Jobs, take: Callable[[str], None]) -> None:
        self._jobs, self._take = jobs, take
        self._tokens: dict[str, str] = {}
        self.lines: list[str] = []

    def copy(self, job: BatchJob, stream: str) -> None:
        while True:
            lines, token = self._jobs.read_log(job.stage, stream, self._tokens.get(stream, ""))
            for line in lines:
                self._take(line)
            self.lines = [*self.lines, *lines][-KEPT_LINES:]
            if token == self._tokens.get(stream, ""):  # CloudWatch returns the same token at the end
                return
            self._tokens[stream] = token


def _describe(job: BatchJob) -> str:
    tried = f", attempt {len(job.attempts) + 1}" if job.is_active and job.attempts else ""
    return f"{job.stage} is {job.status.lower()}{tried}{f': {job.reason}' if job.reason else ''}"


def _finish(job: BatchJob, log: _Log) -> int:
    said = f": {find_error_line(chr(10).join(log.lines))}" if job.exit_code and log.lines else ""
    print(f"job {job.id}: {job.stage} ended with exit code {job.exit_code}{said}", flush=True)
    return job.exit_code
