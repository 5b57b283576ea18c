"""The watch on a job from outside: it prints what its main node says, and ends with the stage's exit code."""

from __future__ import annotations

import time
from collections.abc import Callable

from deploy.batch.jobs import Job, Jobs
from deploy.exit_codes import find_error_line
from deploy.progress import Progress
from services.common.errors import DeviceError, TryAgain

POLL_SECONDS = 5.0
KEPT_LINES = 200


def print_line(text: str) -> None:
    print(text, flush=True)


def follow(jobs: Jobs, job_id: str, is_log_whole: bool = False, take: Callable[[str], None] = print_line) -> int:
    """Until the job has ended. Leaving this changes nothing: Batch goes on with it.

    A poll that Batch does not answer is tried again. `is_log_whole` also prints the streams of attempts before, and
    `take` gets each line.
    Raises `DeviceError` for a job that Batch does not know.
    """
    report, log = Progress(f"job {job_id}").report, _Log(jobs, take)
    while True:
        try:
            job = jobs.find(job_id)
            if job is None:
                raise DeviceError(
                    f"Batch knows no job {job_id}: make stage-status TARGET=batch shows those that it knows"
                )
            report(_describe(job))
            for stream in job.log_streams if is_log_whole or not job.is_active else job.log_streams[-1:]:
                log.copy(job, stream)
            if not job.is_active:
                return _finish(job, log)
        except TryAgain as error:
            report(f"{error}; the job goes on without us")
        time.sleep(POLL_SECONDS)


class _Log:
    """Takes each line of each stream once."""

    def __init__(self, jobs: Jobs, take: Callable[[str], None]) -> None:
        self._jobs, self._take = jobs, take
        self._tokens: dict[str, str] = {}
        self.lines: list[str] = []

    def copy(self, job: Job, stream: str) -> None:
        while True:
            lines, token = self._jobs.read_log(job.stage, stream, self._tokens.get(stream, ""))
            for line in lines:
                self._take(line)
            self.lines = [*self.lines, *lines][-KEPT_LINES:]
            if token == self._tokens.get(stream, ""):  # CloudWatch gives the same one at the end
                return
            self._tokens[stream] = token


def _describe(job: Job) -> str:
    tried = f", attempt {len(job.attempts) + 1}" if job.is_active and job.attempts else ""
    return f"{job.stage} is {job.status.lower()}{tried}{f': {job.reason}' if job.reason else ''}"


def _finish(job: Job, log: _Log) -> int:
    said = f": {find_error_line(chr(10).join(log.lines))}" if job.exit_code and log.lines else ""
    print(f"job {job.id}: {job.stage} ended with exit code {job.exit_code}{said}", flush=True)
    return job.exit_code
