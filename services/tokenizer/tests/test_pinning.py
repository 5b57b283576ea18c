"""`pin` writes the commit that a branch of the hub points to into the recipe's text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from services.common.recipe.file import load_recipe
from services.common.testing.commands import start_python
from services.tokenizer.tests.builders import serve, write_recipe

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ANSWERS = {
    "/api/datasets/owner/name/revision/refs%2Fconvert%2Fparquet": COMMIT,
    "/api/datasets/other/data/revision/main": COMMIT[::-1],
}
SOURCES = """
# revision = "left alone"
[[corpus.sources]]
uri = "hf://datasets/owner/name/raw/*.parquet"
revision = "refs/convert/parquet"  # the hub's conversion
[[corpus.sources]]
uri = "here.txt"
[[corpus.sources]]
uri = "datasets://other/data"
revision="main"
[[corpus.sources]]
uri = "hf://datasets/owner/name/pinned"
revision = "ffffffffffffffffffffffffffffffffffffffff"
"""


class _Hub(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        commit = ANSWERS.get(self.path.partition("?")[0])
        body = json.dumps({"id": "x", "sha": commit} if commit else {"error": "Revision not found"}).encode()
        self.send_response(200 if commit else 404)
        if not commit:
            self.send_header("X-Error-Code", "RevisionNotFound")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    """The address of a local server with the answers of the hub's HTTP interface."""
    with serve(_Hub) as address:
        yield address


def write_sources(folder: Path, tables: str) -> Path:
    recipe = write_recipe(folder, corpus__sources=None)
    recipe.write_text(recipe.read_text(encoding="utf-8") + tables, encoding="utf-8")
    return recipe


def run_pin(recipe: Path, endpoint: str) -> tuple[int, str]:
    """Run the subcommand on the hub at `endpoint`, and return its exit code and what it printed."""
    process = start_python(["-m", "services.tokenizer", "pin", str(recipe)], HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="0")
    printed, _ = process.communicate(timeout=60)
    return process.returncode, printed


def test_branches_become_commits_and_all_else_stays(tmp_path: Path, hub: str) -> None:
    recipe = write_sources(tmp_path, SOURCES)
    before = recipe.read_text(encoding="utf-8")

    exit_code, printed = run_pin(recipe, hub)

    assert exit_code == 0, printed
    expected = before.replace('"refs/convert/parquet"', f'"{COMMIT}"').replace('"main"', f'"{COMMIT[::-1]}"')
    assert recipe.read_text(encoding="utf-8") == expected
    assert [source.revision for source in load_recipe(recipe).corpus.sources] == [COMMIT, None, COMMIT[::-1], "f" * 40]


def test_a_revision_that_is_not_there_pins_nothing(tmp_path: Path, hub: str) -> None:
    recipe = write_sources(tmp_path, SOURCES.replace('"main"', '"mian"'))
    before = recipe.read_bytes()

    exit_code, printed = run_pin(recipe, hub)

    assert exit_code == 2
    assert "'mian'" in printed
    assert recipe.read_bytes() == before
