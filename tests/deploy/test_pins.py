"""Pins beside the newest releases, with recorded answers in the place of the network; and that none is too old."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from deploy.pins import EKS_AMI, EKS_KUBERNETES, Pin, read_pins, refresh
from images.platforms import REPOSITORY
from infra.aws_releases import AWS_RELEASES_JSON, read_support_ends
from infra.shapes import SHAPES_JSON

DAY = date(2027, 1, 2)
COMMAND = "make refresh-pins WRITE=1"
PINS = read_pins()
# Releases as in awslabs/amazon-eks-ami's CHANGELOG.md: a driver of each kind that the images take, and one of no use.
CHANGELOG = "\n".join(
    f'# AMI Release v{day}\n<table><tr>\n      <td>aws-neuronx-dkms</td>\n      <td colspan="1">—</td>\n'
    f'      <td colspan="1">{driver}-dkms</td>\n</tr></table>\n'
    for day, driver in (("20261224", "2.31.7.0"), ("20261210", "2.30.2.0"), ("20260501", "2.28.0.0"))
)


def page_of(name: str, pin: Pin) -> str:
    """A page that has the pinned version and, of charts, a newer one."""
    if name == EKS_AMI:
        return CHANGELOG
    if name == EKS_KUBERNETES:
        cycles = [{"cycle": "1.36", "eol": "2027-08-02"}, {"cycle": "1.35", "eol": "2027-04-01"}]
        return json.dumps(cycles)
    pattern = pin.released.replace("3\\.11\\.\\d+", "[\\d.]+").replace(" *", " ").replace("v?", "v")
    line = re.sub(r"\\(.)", r"\1", re.sub(r"\([^)]*\)", "VERSION", pattern))
    return "\n".join(line.replace("VERSION", each) for each in (pin.read(), "0.0.1", *["99.1.0"] * pin.write))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The files that have pins, outside of the repository."""
    for file in {each.file for each in PINS.values()}:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / file, tmp_path / file)
    return tmp_path


def pinned(root: Path) -> dict[str, str]:
    return {name: pin.read(root) for name, pin in PINS.items()}


def test_charts_and_the_table_of_aws_become_new_and_nothing_else(root: Path) -> None:
    pages = {pin.source: page_of(name, pin) for name, pin in PINS.items()}
    before = pinned(root)

    assert refresh(pages.__getitem__, False, DAY, root) == []
    assert pinned(root) == before

    assert refresh(pages.__getitem__, True, DAY, root) == []
    assert pinned(root) == before | {name: "99.1.0" for name, pin in PINS.items() if pin.write} | {EKS_AMI: "20261224"}
    table = json.loads((root / AWS_RELEASES_JSON.relative_to(REPOSITORY)).read_bytes())
    assert table["dated"] == str(DAY)
    assert table["eks"]["versions"]["1.35"]["standard_support_ends"] == "2027-04-01"
    releases: dict[str, dict[str, Any]] = table["eks"]["releases"]
    assert (releases["trn1"]["20260501"], releases["trn2"]["20261224"]) == ("2.28.0.0", "2.31.7.0")
    assert "20261210" not in releases["trn1"] | releases["trn2"]


def test_a_source_that_does_not_answer_is_named_and_its_row_stays(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = PINS[EKS_AMI].source

    def fetch(source: str) -> str:
        if source == lost:
            raise TimeoutError("timed out")
        return next(page_of(name, pin) for name, pin in PINS.items() if pin.source == source)

    before = pinned(root)
    [said] = refresh(fetch, True, DAY, root)

    assert said.startswith(f"{lost}: ")
    assert pinned(root)[EKS_AMI] == before[EKS_AMI]
    assert re.search(rf"^{EKS_AMI} +{before[EKS_AMI]} +unknown ", capsys.readouterr().out, re.MULTILINE)
    assert json.loads((root / AWS_RELEASES_JSON.relative_to(REPOSITORY)).read_bytes())["dated"] != str(DAY)


def test_without_a_network_every_source_is_listed() -> None:
    proxies = {f"{each}_proxy": "http://127.0.0.1:9" for each in ("http", "https")}
    environment = {name: value for name, value in os.environ.items() if name.lower() != "no_proxy"} | proxies
    done = subprocess.run(
        [sys.executable, "-m", "deploy.pins"],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 75
    assert all(pin.source in done.stderr for pin in PINS.values())
    assert len(done.stdout.splitlines()) == 1 + len(PINS)


@pytest.mark.parametrize("table", [AWS_RELEASES_JSON, SHAPES_JSON], ids=lambda path: path.name)
def test_no_table_is_older_than_90_days(table: Path) -> None:
    dated = date.fromisoformat(json.loads(table.read_bytes())["dated"])
    assert datetime.now(UTC).date() - dated <= timedelta(days=90), COMMAND


def test_the_pinned_kubernetes_has_30_days_of_standard_support_left() -> None:
    end = read_support_ends()[PINS[EKS_KUBERNETES].read()]
    assert end - datetime.now(UTC).date() >= timedelta(days=30), COMMAND
