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

_COMPARED_DIGITS = 15
"""Hexadecimal digits of a fingerprint that fit into an integer of torch."""


def require_same_program(job: Job, group: ProcessGroup) -> None:
    """Raise `DeviceError` unless every worker's node gives the bits of the program that the command was started for.

    Replicas on CPUs of two kinds would drift apart, and a checkpoint would name a program that did not make it. Workers
    compare a number, and each receives the facts of all others only where the number differs.
    """
    facts = program_facts(job.recipe)
    number = int(fingerprint(facts)[:_COMPARED_DIGITS], 16)
    are_equal = group.maximum(number) == -group.maximum(-number)
    for rank, theirs in enumerate([] if are_equal else group.gather(facts)):
        if theirs != facts:
            difference = explain_difference(theirs, facts, sides=(f"rank {rank}", f"rank {group.rank}"))
            raise DeviceError(
                f"the workers' nodes are of different kinds:\n{difference}\nRun all workers on one kind of node."
            )
    if fingerprint(facts) != job.program_fingerprint:
        raise DeviceError(
            f"the workers' nodes differ in CPU, compiler, library versions or environment from the command's node: "
            f"their program is {fingerprint(facts)[:12]}, the command's {job.program_fingerprint[:12]}. Run the "
            f"command and all workers on one kind of node."
        )


def require_same_state(program: Program, group: ProcessGroup, step: int) -> None:
    """Raise `DeviceError` unless all workers with the same part of the model hold the same bits.

    The check reads the whole state, which a GPU copies to the host. Where no two workers have the same part it reads
    nothing. Each worker receives a digest for each group of tensors of all others, so that its bytes grow with the
    number of workers, once for each checkpoint.
    """
    if program.backend.mesh.data_parallel_size == 1:
        return
    part = program.backend.mesh.index("tensor")
    workers = group.gather({"host": socket.gethostname(), "part": part, "digests": program.state.digests()})
    holders: dict[tuple[int, str], dict[int, list[str]]] = {}
    for rank, worker in enumerate(workers):
        for tensors, digest in worker["digests"].items():
            found = holders.setdefault((worker["part"], tensors), {})
            found.setdefault(digest, []).append(f"{rank} ({worker['host']})")
    differences = []
    for (_, tensors), found in holders.items():
        if len(found) > 1:
            held = [f"{digest:016x} on rank {', '.join(ranks)}" for digest, ranks in found.items()]
            differences.append(f"  {tensors}: {'; '.join(held)}")
    if differences:
        raise DeviceError(
            f"after step {step} the workers' states differ, but must be equal bit for bit:\n"
            + "\n".join(differences)
            + "\nThis state was not saved; in the newest checkpoint all states were equal. The CPU or the memory of "
            "one node gives wrong results: replace the node, then run the same command to continue."
        )
