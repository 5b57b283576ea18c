"""Alerts fire on what they name and on nothing else, and lead to a runbook."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import get_args

from services.trainer.metrics.events import Kind
from tests.monitoring.exported import EXTERNAL, OWN, REPOSITORY, metrics_in, read_rules, write_plain_rules
from tests.monitoring.promtool import run_promtool

ALERTS = [rule for rule in read_rules() if "alert" in rule]
RECORDED = {rule["record"] for rule in read_rules() if "record" in rule}
CASES = Path(__file__).with_name("alert_tests.yaml")


def test_alerts_fire_in_the_cases_of_promtool_and_are_silent_in_a_healthy_run(tmp_path: Path) -> None:
    write_plain_rules(tmp_path / "rules.yaml")
    shutil.copy(CASES, tmp_path)
    run_promtool(tmp_path, "check", "rules", "--lint=all", "--lint-fatal", "rules.yaml")
    run_promtool(tmp_path, "test", "rules", CASES.name)


def test_rules_read_only_metrics_that_are_exported_and_events_that_are_recorded() -> None:
    for rule in read_rules():
        assert metrics_in(rule["expr"]) <= OWN | EXTERNAL | RECORDED, rule
        for events in re.findall(r'event=~?"([^"]*)"', rule["expr"]):
            assert set(events.split("|")) <= set(get_args(Kind)), rule


def test_the_page_on_monitoring_lists_every_alert_with_its_condition_and_its_runbook() -> None:
    page = (REPOSITORY / "docs/operations/monitoring.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (\w+) \|.*\| \[[^\]]*\]\(([^)]*)\) \|$", page, re.MULTILINE)
    expected = []
    for alert in ALERTS:
        runbook = alert["annotations"]["runbook_url"]
        assert (REPOSITORY / runbook).is_file()
        labels = alert["labels"]
        place = runbook.removeprefix("docs/operations/")
        expected.append((alert["alert"], labels["condition"], labels["severity"], place))
    assert listed == expected
