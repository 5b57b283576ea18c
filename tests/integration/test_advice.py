"""Advice that a command prints works when it is followed to the letter: each mistake is made, and then its advice.

`test_pipeline.py` follows the runbooks, `services/trainer/tests/test_import.py` the advice on imported weights.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millrace.programs import PROGRAMS
from services.common.testing import fork_server
from services.trainer.tests.runs import flip_a_bit
from tests.command import call as call_command
from tests.small import write_notes, write_small_recipe

COMMANDS = {name: program for group in PROGRAMS.values() for name, program in group.items()}
PLAN, LARGE = "plan {recipe} --root {root}", "plan llama2-7b-trn1 --root {root}"
EAGER = "--compile.enabled=false --launch=inline --parallel.data_parallel_size=1"
TRAIN = f"train {{recipe}} --root {{root}} {EAGER} --train.max_steps=3 --checkpoint.interval_steps=2"
BRANCH = f"{TRAIN} --train.max_steps=4 --train.branch.run={{run}}"

MISTAKES: dict[str, tuple[str, str, int]] = {
    "a key without its section": (PLAN, "--max_steps=9", 2),
    "a key with hyphens": (PLAN, "--learning-rate=0.1", 2),
    "a key of several sections": (PLAN, "--num_workers=3", 2),
    "a key of a section in a section": (PLAN, "--max_bytes=100000", 2),
    "a misspelt key without its section": (PLAN, "--max-step=9", 2),
    "no dashes": (PLAN, "train.max_steps=9", 2),
    "a misspelt key": (PLAN, "--train.max_step=9", 2),
    "a key of another section": (PLAN, "--optimizer.max_steps=9", 2),
    "a misspelt section": (PLAN, "--trian.max_steps=9", 2),
    "a batch that the workers cannot share": (PLAN, "--batch.global_batch_size=12", 2),
    "a batch that is no power of two": (PLAN, "--batch.global_batch_size=24", 2),
    "workers that are no power of two": (PLAN, "--parallel.data_parallel_size=24", 2),
    "a batch for sums in any order": (PLAN, "--train.reduction=fast --parallel.data_parallel_size=3", 2),
    "a model for another tokenizer": (PLAN, "--model.vocab_size=400", 2),
    "a schedule without an end": (PLAN, "--optimizer.schedule=constant --optimizer.min_learning_rate=1e-4", 2),
    "a tokenizer's file beside its settings": (PLAN, "--tokenizer.model=tokenizer.model", 2),
    "workers that fill no node": (PLAN, "--cluster.trainer_workers_per_node=3", 2),
    "more workers than cores": (LARGE, "--cluster.trainer_workers_per_node=64", 2),
    "more workers than cores, which these do not divide": (
        f"{LARGE} --parallel.data_parallel_size=6 --batch.global_batch_size=1536",
        "--cluster.trainer_workers_per_node=48",
        2,
    ),
    "a worker without room": (LARGE, "--parallel.zero_stage=0 --train.param_dtype=float32", 2),
    "a recipe that is not there": ("plan", "nowhere.toml", 2),
    "no corpus": (TRAIN, "--corpus.name=others", 3),
    "a corpus of other rows": (f"{TRAIN} --corpus.sequence_length=64", "--corpus={corpus}", 3),
    "a corpus of another tokenizer": (
        f"{TRAIN} --corpus={{corpus}}",
        "--model.vocab_size=400 --tokenizer.train.vocab_size=400",
        3,
    ),
    "no compile cache": ("train {recipe} --root {root} --launch=inline", "--model.hidden_size=48", 3),
    "a branch from a step that is gone": (BRANCH, "--train.branch.step=1", 3),
    "a branch in another order": (f"{BRANCH} --train.branch.step=2", "--train.data_seed=7", 2),
    "a step that is gone": (f"evaluate {{run}} --root {{root}} {EAGER}", "--step=1", 3),
    "no corpus, as doctor says": (f"doctor {{recipe}} --root {{root}} {EAGER}", "--corpus.name=more", 3),
    "a prefix of several runs": ("report --root {root}", "small", 2),
}
"""Words that are right, words that are wrong beside them, and the exit code of both."""

Call = Callable[[str], subprocess.CompletedProcess[str]]


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Call]:
    """Call a command line in this process. The compiler, which would take a minute, reads it only."""

    def run(line: str) -> subprocess.CompletedProcess[str]:
        program, *words = shlex.split(line)
        if program in ("ls", "mv", "rm"):
            return subprocess.run([program, *words], check=False, capture_output=True, text=True)
        if program == "millrace":
            started = COMMANDS[words[0]].call(words[1:])
            words = ["-m", started.module, *started.words]
        _, module, *given = words
        monkeypatch.setattr(sys, "argv", [program, *given])
        return call_command(capfd, f"{module}.__main__", *given, *(["--dry-run"] if "compiler" in module else []))

    with fork_server.forking_workers():
        yield run


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    """What the words of MISTAKES name; the first test makes it."""
    return {}


@pytest.fixture
def names(made: dict[str, str], tmp_path: Path, call: Call) -> dict[str, str]:
    """A small recipe, and a root with its corpus and two runs."""
    if not made:
        root, notes = tmp_path / "a root", write_notes(tmp_path / "notes")
        given = {
            "recipe": str(write_small_recipe(tmp_path / "small.toml", str(notes))),
            "root": shlex.quote(str(root)),
        }
        for line in ("tokenize {recipe} --root {root}", f"{TRAIN} --train.seed=2", TRAIN):
            done = call("millrace " + line.format(**given))
            assert done.returncode == 0, done.stderr
        [corpus] = root.glob("corpus/notes/*/")
        run = Path(done.stdout.splitlines()[0]).name
        made |= {**given, "corpus": shlex.quote(str(corpus)), "run": run}
    return made


@pytest.mark.parametrize("mistake", MISTAKES)
def test_advice_works_when_it_is_followed_to_the_letter(mistake: str, names: dict[str, str], call: Call) -> None:
    *words, exit_code = MISTAKES[mistake]
    right, wrong = (str(each).format(**names) for each in words)
    done = call(f"millrace {right} {wrong}")
    assert done.returncode == exit_code, done.stderr
    advised = list(follow(right, wrong, (done.stdout + done.stderr).partition("\nUsage:")[0]))
    assert advised, done.stderr
    for lines in advised:
        for line in lines:
            assert call(line).returncode == 0, f"{done.stderr}\n{line}"


def test_the_steps_of_doctor_mend_what_it_has_found(names: dict[str, str], tmp_path: Path, call: Call) -> None:
    root = shutil.copytree(shlex.split(names["root"])[0], tmp_path / "another root")
    [corpus] = shlex.split(names["corpus"])
    flip_a_bit(root / "corpus/notes" / Path(corpus).name / "train/shard-000000.arrow")
    (root / "run" / names["run"] / "stop").touch()
    doctor = f"millrace doctor {names['recipe']} --root {shlex.quote(str(root))} {EAGER}"
    done = call(doctor)
    steps = re.findall(r"next: (.*)", done.stdout)
    assert (done.returncode, len(steps)) == (3, 2), done.stdout
    for line in (line for step in steps for line in step.split(" && ")):
        assert call(line).returncode == 0, line
    done = call(doctor)
    assert (done.returncode, "next: " in done.stdout) == (0, False), done.stdout


def follow(right: str, wrong: str, told: str) -> Iterator[list[str]]:
    """Yield each alternative that a message advises, as the lines that a person types next."""
    if unknown := re.match(r".*No such option or argument: (\S+)\.", told):
        wrong, told = wrong.replace(unknown[1], ""), told[unknown.end() :]
    if meant := re.search(r"unknown key '(\S+)'\. Did you mean '(\S+)'", told):
        yield [f"millrace {right} {wrong.replace(meant[1], meant[2], 1)}"]
    if full := re.search(r"\d+ runs in .+?: (.+); give", told):
        yield from ([f"millrace {right} {name}"] for name in full[1].split(", "))
    commands = re.findall(r"`((?:millrace|python -m|ls) [^`]+)`", told)
    without = "" if "Omit " in told else wrong
    if any(each.startswith(("millrace tokenize", "python -m services.tokenizer")) for each in commands):
        yield [*commands, f"millrace {right} {without}"]
    elif commands:
        yield commands
    for alternative in re.split(r" or |`[^`]*`", told):
        options = [each.rstrip(".:") for each in re.findall(r"--[a-z][\w.-]*=[^\s,()]+", alternative)]
        if advised := [each for each in options if each not in (right + " " + wrong).split()]:
            yield [f"millrace {right} {wrong} {' '.join(advised)}"]
