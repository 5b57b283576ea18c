"""Every claim in docs/security.md names a test that exists, or a target of make that runs in CI."""

from __future__ import annotations

import re

import pytest

from images.platforms import REPOSITORY

PAGE = REPOSITORY / "docs/security.md"
CI = (REPOSITORY / ".ci/run").read_text(encoding="utf-8")
RUNS_CODE = re.compile(r"trust_remote_code\s*=\s*True|allow_pickle\s*=\s*True|weights_only\s*=\s*False")


def list_held() -> list[str]:
    return sorted(set(re.findall(r"`([\w./-]+::[\w.]+)`", PAGE.read_text(encoding="utf-8"))))


@pytest.mark.parametrize("held", list_held())
def test_a_test_that_holds_a_claim_exists(held: str) -> None:
    path, _, name = held.partition("::")
    definition = f'run "{name}" {{' if path.endswith(".hcl") else f"\ndef {name}("
    assert definition in (REPOSITORY / path).read_text(encoding="utf-8")


def list_rows() -> list[str]:
    """Lists the rows of all tables that have a column of what holds a claim."""
    tables = re.findall(r"^\|.*(?:held by|run by) \|\n\|[-|]+\n((?:\|.*\n)+)", PAGE.read_text(), re.MULTILINE)
    return [row for table in tables for row in table.splitlines()]


@pytest.mark.parametrize("row", list_rows(), ids=lambda row: row.split("|")[1].strip())
def test_every_claim_of_a_table_is_held_by_something_that_runs(row: str) -> None:
    held = row.rstrip("|").rpartition("|")[2]
    targets = re.findall(r"`make ([\w-]+)`", held)
    assert targets or "::" in held
    assert [each for each in targets if not re.search(rf"^make {each}$", CI, re.MULTILINE)] == []


def test_no_library_is_told_to_run_code_that_comes_with_data() -> None:
    sources = [
        path
        for folder in ("services", "deploy", "k8s", "infra", "images")
        for path in (REPOSITORY / folder).rglob("*.py")
        if "tests" not in path.parts
    ]
    assert [path for path in sources if RUNS_CODE.search(path.read_text(encoding="utf-8"))] == []


def test_every_pin_of_every_lock_has_a_hash_and_every_install_asks_for_it() -> None:
    for lock in (REPOSITORY / "lockfiles").glob("*.txt"):
        pins = re.findall(r"^\S+==\S+.*\n.*", lock.read_text(encoding="utf-8"), re.MULTILINE)
        assert pins
        assert [pin for pin in pins if "--hash=sha256:" not in pin] == []
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    installs = re.findall(r"^.*uv pip (?:install|sync).*$", makefile, re.MULTILINE)
    assert installs
    assert [each for each in installs if "--require-hashes" not in each] == []


def test_ci_names_no_credential_and_pushes_nothing() -> None:
    assert re.findall(r"_TOKEN|PASSWORD|SECRET|AWS_|PUSH=|docker (?:login|push)|git push", CI) == []


def test_a_workflow_of_github_brings_its_check() -> None:
    """A workflow can leak secrets in ways that zizmor knows: add it to the lock and to `make check-security`."""
    assert not (REPOSITORY / ".github").exists() or "zizmor" in (REPOSITORY / "Makefile").read_text(encoding="utf-8")
