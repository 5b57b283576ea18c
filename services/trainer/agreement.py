"""Lets all workers agree on a step while they compute the next one, and requires that they run and hold the same.

For a step each worker gives 16 doubles of which all learn the largest, so that the message has one size and one
operation, whatever the number of workers. A number of which the smallest counts is sent with its sign changed.
"""

from __future__ import annotations

import math
import socket
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

from services.common.errors import DeviceError, WorkersLost
from services.common.process.shutdown import StopReason
from services.common.program.fingerprint import explain_difference, program_facts
from services.common.program.micro_batch import MicroBatch
from services.common.program.process_group import ProcessGroup
from services.common.program.step import Program
from services.common.recipe.schema import fingerprint
from services.trainer.health.loss_spikes import Deviation
from services.trainer.job import Job
from services.trainer.metrics.metric_table import UNKNOWN_NUMBERS, ReducedNumbers, WorkerNumbers
from services.trainer.metrics.records import StepRecord

MAX_WORKERS = 2**22
"""Ranks that fit beside milliseconds into a double."""


class WorkerStep(NamedTuple):
    """A step, or a round of an evaluation, as one worker sees it."""

    stop_reason: StopReason
    written_step: int
    """Step of the checkpoint that is being written, once the worker has written its shard of it; 0 before."""
    deviation: Deviation = Deviation.NONE
    """Whether the step's loss or gradient norm is above the limit of the worker's spike detector."""
    is_applied: bool = True
    """Whether the step updated the weights."""
    compared_seconds: float = 0.0
    """Seconds by which stragglers are found; 0 after steps that end no comparison. See `Stragglers`."""
    numbers: WorkerNumbers = UNKNOWN_NUMBERS

    def encode(self, rank: int) -> list[float]:
        """Return the numbers of which the largest of all workers counts. NaN is sent as infinity, which stays."""
        numbers = [*self.numbers, -self.numbers.gradient_seconds]
        return [
            float(self.stop_reason),
            float(-self.written_step),
            float(self.deviation),
            float(self.is_applied),
            float(not self.is_applied),
            _join_rank(self.compared_seconds, rank),
            -self.compared_seconds,
            *(math.inf if math.isnan(number) else number for number in numbers),
        ]


class AgreedStep(NamedTuple):
    """A step as all workers see it together: the largest stop reason and deviation, and the smallest written step."""

    stop_reason: StopReason
    written_step: int
    """Step of the checkpoint of which all workers have written their shards; 0 for none."""
    deviation: Deviation
    is_applied_by_some: bool
    is_skipped_by_some: bool
    slowest_rank: int
    slowest_seconds: float
    """Largest `compared_seconds`, in whole milliseconds."""
    fastest_seconds: float
    numbers: ReducedNumbers

    @classmethod
    def decode(cls, largest: Sequence[float]) -> Self:
        stop_reason, written_step, deviation, applied, skipped, slowest, fastest, *numbers = largest
        slowest_seconds, slowest_rank = _split_rank(slowest)
        *largest_numbers, least = (math.nan if math.isinf(number) else number for number in numbers)
        return cls(
            StopReason(int(stop_reason)),
            int(-written_step),
            Deviation(int(deviation)),
            bool(applied),
            bool(skipped),
            slowest_rank,
            slowest_seconds,
            -fastest,
            ReducedNumbers(WorkerNumbers._make(largest_numbers), -least),
        )


class TakenStep(NamedTuple):
    """A step that this worker has taken."""

    record: StepRecord
    batch: int
    """Number of the batch that the step took."""
    micro_batches: list[MicroBatch]
    """This worker's micro-batches of the batch."""
    is_applied: bool
    """Whether the step updated the weights."""


class StepOutcome(NamedTuple):
    """A step with the decisions that all workers share."""

    taken: TakenStep
    agreed: AgreedStep
    straggler: dict[str, float]
    """Metrics of the newest comparison of the workers; see `Stragglers`."""
    goes_back: bool
    """Whether a loss spike is confirmed after which the run goes back."""


class StepAgreement:
    """One worker's part in the agreement on steps. All workers start and finish the same agreements, in turns."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._wait: Callable[[], list[float]] | None = None

    def start(self, step: WorkerStep) -> None:
        """Give this worker's part of the next agreement. Returns at once."""
        assert self._wait is None, "the agreement before is not finished"
        self._wait = self._group.start_maximum(step.encode(self._group.rank))

    def finish(self) -> AgreedStep:
        """Return what all workers agree on. Raises `WorkersLost` if one takes longer than a collective may."""
        assert self._wait is not None, "no agreement is started"
        wait, self._wait = self._wait, None
        return AgreedStep.decode(wait())


def require_same_outcome(agreed: AgreedStep, is_applied: bool, group: ProcessGroup, step: int) -> None:
    """Raise `WorkersLost` where a step updated the weights on some workers only. All workers call this."""
    if not (agreed.is_applied_by_some and agreed.is_skipped_by_some):
        return
    outcomes = group.gather(is_applied)
    fewer = min((True, False), key=outcomes.count)
    ranks = [rank for rank, outcome in enumerate(outcomes) if outcome is fewer]
    raise WorkersLost(
        f"step {step} was {'applied' if fewer else 'skipped'} on rank {ranks[0]} and {len(ranks) - 1} others only, but "
        f"all decide by the same gradient norm. The same command continues; replace the node if it causes this again."
    )


def require_same_program(job: Job, group: ProcessGroup) -> None:
    """Raise `DeviceError` unless the program has the same fingerprint on every worker's node and on the command's.

    Replicas on CPUs of two kinds would drift apart. Workers receive the facts of all others only where two differ.
    """
    facts = program_facts(job.recipe)
    are_equal = len(set(group.gather(fingerprint(facts)))) == 1
    for rank, theirs in enumerate([] if are_equal else group.gather(facts)):
        if theirs != facts:
            difference = explain_difference(theirs, facts, sides=(f"rank {rank}", f"rank {group.rank}"))
            raise DeviceError(
                f"the workers' nodes are of different kinds:\n{difference}\nRun all workers on one kind of node."
            )
    if fingerprint(facts) != job.program_fingerprint:
        raise DeviceError(
            f"the workers' nodes have the program {fingerprint(facts)[:12]}, the command's node "
            f"{job.program_fingerprint[:12]}: run the command and all workers on one kind of node."
        )


def require_same_state(program: Program, group: ProcessGroup, step: int) -> None:
    """Raise `DeviceError` unless all workers with the same part of the state hold the same bits: models, and within one
    model norms and copies of key-value heads. What no other worker holds, such as all matrices with ZeRO-3, is not
    compared.

    The check reads the parts that several workers have, and exchanges a digest of each group of tensors.
    """
    if group.world_size == 1:
        return
    holders = defaultdict[str, dict[int, list[str]]](lambda: defaultdict(list))
    for rank, (host, digests) in enumerate(group.gather((socket.gethostname(), program.state.digests()))):
        for tensors, digest in digests.items():
            holders[tensors][digest].append(f"{rank} ({host})")
    differences = [
        f"  {tensors}: " + "; ".join(f"{digest:016x} on rank {', '.join(ranks)}" for digest, ranks in held.items())
        for tensors, held in holders.items()
        if len(held) > 1
    ]
    if not differences:
        return
    raise DeviceError(
        f"after step {step} the workers' states differ, but must be equal bit for bit:\n"
        + "\n".join(differences)
        + "\nThis state was not saved. Replace the node whose CPU or memory is faulty; the same command continues."
    )


def _join_rank(seconds: float, rank: int) -> float:
    """Return whole milliseconds and a rank in one double, which is larger for the lower of two ranks."""
    return float(round(seconds * 1e3) * MAX_WORKERS + MAX_WORKERS - 1 - rank)


def _split_rank(joined: float) -> tuple[float, int]:
    milliseconds, rank = divmod(int(joined), MAX_WORKERS)
    return milliseconds / 1e3, MAX_WORKERS - 1 - rank
