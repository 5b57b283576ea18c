"""Dashboards are what Grafana loads, and show only metrics that are exported."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.monitoring.exported import DASHBOARDS, EXTERNAL, OWN, queries_of, read_dashboard, read_rules
from tests.monitoring.exported import metrics_in as metrics_in_query
from tests.monitoring.promtool import run_promtool

RECORDED = {rule["record"] for rule in read_rules() if "record" in rule}
PANELS = {"stat", "table", "timeseries"}
# Identifiers of Grafana's value formats: packages/grafana-data/src/valueFormats/categories.ts
UNITS = {"none", "short", "percent", "percentunit", "s", "bytes", "Bps"}
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


@ALL
def test_a_dashboard_has_the_fields_that_grafana_loads(path: Path) -> None:
    dashboard = read_dashboard(path)
    assert dashboard["uid"] == f"millrace-{path.stem}"
    assert dashboard["templating"]["list"][0]["type"] == "datasource"
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["type"] in PANELS
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["type"] == "table" or panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    for one, other in combinations((panel["gridPos"] for panel in panels), 2):
        assert not _overlap(one, other)


def _overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(
        one[at] < other[at] + other[size] and other[at] < one[at] + one[size] for at, size in (("x", "w"), ("y", "h"))
    )


def test_every_dashboard_becomes_a_config_map_that_grafana_s_sidecar_finds() -> None:
    kustomization = yaml.safe_load((DASHBOARDS[0].parent / "kustomization.yaml").read_text(encoding="utf-8"))
    files = {file for each in kustomization["configMapGenerator"] for file in each["files"]}
    assert files == {path.name for path in DASHBOARDS}
    assert kustomization["generatorOptions"]["labels"]["grafana_dashboard"] == "1"
