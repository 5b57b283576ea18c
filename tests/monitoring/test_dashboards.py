"""Dashboards are what Grafana loads, and show only metrics that are exported."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.monitoring.exported import DASHBOARDS, EXTERNAL, OWN, queries_of, read_dashboard, read_rules
from tests.monitoring.exported import metrics_in as metrics_in_query
from tests.monitoring.promtool import run_promtool

RECORDED = {rule["record"] for rule in read_rules() if "record" in rule}
ALL = pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)


@ALL
def test_every_query_reads_metrics_that_are_exported(path: Path) -> None:
    for place, query in queries_of(read_dashboard(path)):
        names = metrics_in_query(query)
        assert names, place
        assert names <= OWN | EXTERNAL | RECORDED, place


def test_prometheus_takes_every_query(tmp_path: Path) -> None:
    queries = [query for path in DASHBOARDS for _, query in queries_of(read_dashboard(path))]
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "queries.yaml").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    run_promtool(tmp_path, "check", "rules", "queries.yaml")


def test_every_dashboard_becomes_a_config_map_that_grafana_s_sidecar_finds() -> None:
    kustomization = yaml.safe_load((DASHBOARDS[0].parent / "kustomization.yaml").read_text(encoding="utf-8"))
    files = {file for each in kustomization["configMapGenerator"] for file in each["files"]}
    assert files == {path.name for path in DASHBOARDS}
    assert kustomization["generatorOptions"]["labels"]["grafana_dashboard"] == "1"
