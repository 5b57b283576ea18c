"""Checks that all workers run one program and hold the same state.

All workers call every function that takes the process group, in the same order.
"""

from __future__ import annotations

import socket

from services.common.errors import DeviceError
from services.common.program.fingerprint import explain_difference, program_facts
from services.common.program.process_group import ProcessGroup
from services.common.program.step import Program
from services.common.recipe.schema import fingerprint
from services.trainer.job import Job


def require_same_program(job: Job, group: ProcessGroup) -> None:
    """Raise `DeviceError` unless the program has the same fingerprint on every worker's node and on the command's.

    Replicas on CPUs of two kinds would drift apart, and a checkpoint would name a program that did not make it. Workers
    compare fingerprints, and each receives the facts of all others only where two differ.
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
    """Raise `DeviceError` unless all workers with the same part of the model hold the same bits.

    The check reads the whole state, which a GPU copies to the host. Where no two workers have the same part it reads
    nothing. Workers exchange one digest for each group of tensors.
    """
    if program.backend.mesh.data_parallel_size == 1:
        return
    part, digests = program.backend.mesh.index("tensor"), program.state.digests()
    holders: dict[tuple[int, str], dict[int, list[str]]] = {}
    for rank, (host, their_part, theirs) in enumerate(group.gather((socket.gethostname(), part, digests))):
        for tensors, digest in theirs.items():
            ranks_by_digest = holders.setdefault((their_part, tensors), {})
            ranks_by_digest.setdefault(digest, []).append(f"{rank} ({host})")
    differences = [
        f"  {tensors}: " + "; ".join(f"{digest:016x} on rank {', '.join(ranks)}" for digest, ranks in held.items())
        for (_, tensors), held in holders.items()
        if len(held) > 1
    ]
    if not differences:
        return
    raise DeviceError(
        f"after step {step} the workers' states differ, but must be equal bit for bit:\n"
        + "\n".join(differences)
        + "\nThis state was not saved. Replace the node whose CPU or memory is faulty; the same command continues."
    )
