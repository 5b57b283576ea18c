"""`make check-infra` finds what each of its tools is for, and leaves out by name what cannot run here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from infra import checks
from infra.tests.programs import Programs
from services.common.errors import RecipeError

REPOSITORY = Path(__file__).parents[2]
needs_terraform = pytest.mark.skipif(shutil.which("terraform") is None, reason="no terraform on PATH")
needs_tools = pytest.mark.skipif(
    not (checks.TOOLS / "checkov").exists(), reason="no .venv-infra-checks: make check-infra makes it"
)

NUMBER_IS_TWO = """
run "is_two" {
  assert {
    condition     = output.number == 2
    error_message = "got ${output.number}"
  }
}
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A repository with one correct file of each kind."""
    files = {
        "run": "#!/usr/bin/env bash\necho fine\n",
        "a.yaml": "key: value\n",
        ".yamllint.yaml": (REPOSITORY / ".yamllint.yaml").read_text(encoding="utf-8"),
        "infra/stacks/small/main.tf": 'output "number" {\n  value = 1\n}\n',
    }
    for name, content in files.items():
        write(tmp_path / name, content)
    return tmp_path


def write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")


def test_every_check_that_is_skipped_has_a_reason() -> None:
    assert checks.read_skips(checks.SKIPS)


def test_a_skip_without_a_reason_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "skips.txt"
    path.write_text("# why\nCKV_AWS_1  it is the road not taken\nCKV_AWS_2  noise\n", encoding="utf-8")

    with pytest.raises(RecipeError, match=r"skips\.txt:3: CKV_AWS_2 "):
        checks.read_skips(path)


def test_a_report_is_judged() -> None:
    """A failure with an exception passes; a file that is not parsed and an unused exception do not."""
    failed = [
        {"check_id": name, "check_name": "a name", "resource": "a.b", "file_path": "/main.tf"}
        for name in ("CKV_AWS_1", "CKV_AWS_3")
    ]
    report = {"results": {"failed_checks": failed, "parsing_errors": ["/infra/broken.tf"]}}

    problems = checks.judge_report(report, {"CKV_AWS_1": "a reason", "CKV_AWS_2": "a reason"})

    assert problems == [
        "/infra/broken.tf cannot be parsed, so none of its resources was checked",
        "CKV_AWS_3 a name: a.b in /main.tf",
        f"CKV_AWS_2 fails nowhere: remove its line from {checks.SKIPS.name}",
    ]


@needs_tools
def test_checkov_reports_a_file_that_it_cannot_parse(sources: Path) -> None:
    """checkov's parser knows no heredoc with a marker of one letter, and would continue with the other files."""
    write(sources / "infra/stacks/small/policy.tf", 'resource "aws_s3_bucket" "a" {\n  bucket = <<-Y\n    x\n  Y\n}\n')

    problems = checks.check_policies(sources)

    assert any("policy.tf cannot be parsed" in problem for problem in problems)


@needs_tools
def test_scripts_are_found_by_what_they_begin_with(sources: Path) -> None:
    assert checks.check_shell(sources) == []

    write(sources / "notes.txt", "rm -rf $1/x\n")
    write(sources / "run", "#!/usr/bin/env bash\nrm -rf $1/x\n")

    [problem] = checks.check_shell(sources)
    assert "In run line 2" in problem
    assert "SC2086" in problem


@needs_tools
def test_a_template_may_have_placeholders_and_nothing_else(sources: Path) -> None:
    write(sources / "boot.sh.tftpl", '#!/bin/sh\npages=${pages}\necho "$pages"\n')
    assert checks.check_shell(sources) == []

    write(sources / "boot.sh.tftpl", "#!/bin/sh\npages=${pages}\necho $pages\n")
    [problem] = checks.check_shell(sources)
    assert "SC2086" in problem


@needs_tools
def test_a_key_that_is_said_twice_is_found(sources: Path) -> None:
    assert checks.check_yaml(sources) == []

    write(sources / "b.yml", "key: 1\nkey: 2\n")

    [problem] = checks.check_yaml(sources)
    assert "duplication of key" in problem


def test_what_is_missing_is_left_out_by_name(
    capfd: pytest.CaptureFixture[str], programs: Programs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(checks, "TOOLS", tmp_path / "nothing")

    checks.run_checks()

    said = capfd.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == [f"{layer.name:20} left out" for layer in checks.LAYERS]
    assert "no terraform on PATH" in said[0]
    assert "make check-infra installs it" in said[-1]


@needs_terraform
def test_without_a_mirror_no_provider_is_asked_for(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_PLUGIN_MIRROR", raising=False)

    with pytest.raises(checks.LeftOut, match="TF_PLUGIN_MIRROR"):
        checks.check_stacks(sources)


@needs_terraform
def test_a_stack_is_formatted_validated_and_tested(
    sources: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("TF_PLUGIN_MIRROR", str(tmp_path_factory.mktemp("mirror")))  # the stack takes nothing from it
    assert checks.check_format(sources) == []
    assert checks.check_stacks(sources) == []

    write(sources / "infra/stacks/small/tests/number.tftest.hcl", NUMBER_IS_TWO)
    [problem] = checks.check_stacks(sources)
    assert "got 1" in problem

    write(sources / "infra/stacks/small/more.tf", 'output "other" {\n value = var.absent\n}\n')
    [problem] = checks.check_stacks(sources)
    assert "undeclared input variable" in problem
    [problem] = checks.check_format(sources)
    assert "more.tf" in problem


def test_terraform_gets_no_state_and_no_lock_of_the_user(
    sources: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    subprocess.run(["git", "init", "--quiet", sources], check=True)
    write(sources / ".gitignore", (REPOSITORY / ".gitignore").read_text(encoding="utf-8"))
    for name in (".terraform.lock.hcl", "terraform.tfstate", "terraform.tfvars", ".terraform/providers/x"):
        write(sources / "infra/stacks/small" / name, "mine")
    target = tmp_path_factory.mktemp("copy")

    checks.copy_sources(sources, target)

    assert [path.name for path in sorted((target / "infra/stacks/small").iterdir())] == ["main.tf"]
