"""No credential is stored or shown: a recipe that holds one is refused, and messages, logs and records mask it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from services.common.artifacts.manifest import InputLink
from services.common.errors import ArtifactError, RecipeError
from services.common.input.credentials import MASK, is_secret, mask
from services.common.process.telemetry import JsonLines, configure_logging
from services.common.recipe.file import load_recipe
from services.common.recipe.schema import Recipe, Source
from services.common.recipe.section import Section
from services.common.testing.recipes import recipe_text, write_recipe
from services.common.tests.builders import REPOSITORY

MARKER = "MARKER4711"

# Addresses as people paste them, and as they should not have been written.
WITH_CREDENTIALS = [
    f"https://user:{MARKER}@host/a.jsonl",
    f"https://{MARKER}@host/a.jsonl",
    f"HTTPS://user:{MARKER}@host/a.jsonl",
    f"https:/user:{MARKER}@host/a.jsonl",
    f"https://user:pass/{MARKER}@host/a.jsonl",
    f"https://user:12/{MARKER}@host/a.jsonl",
    f"https://user:{MARKER}%40host/a.jsonl",
    f"https://user%3A{MARKER}%40host/a.jsonl",
    f"https://user:p@ss{MARKER}@host/a.jsonl",
    f"https://user:{MARKER}",
    f"user:{MARKER}@host:folder/a.jsonl",
    f"s3://KEY:{MARKER}@bucket/a.jsonl",
    f"s3://KEY:a/{MARKER}@bucket/a.jsonl",
    f"hf://user:{MARKER}@datasets/owner/name",
    f"datasets://https://user:{MARKER}@host/owner/name",
    f"s3://bucket/https://user:{MARKER}@host/x",
    f"filecache::https://user:{MARKER}@host/a.jsonl",
    f"https://host/a.jsonl?token={MARKER}",
    f"https://host/a.jsonl?download=1&X-Amz-Credential={MARKER}&X-Amz-Signature={MARKER}",
    f"https://host/a.jsonl?x={MARKER}",
    f"https://host/a.jsonl?{MARKER}",
    f"https://host/a.jsonl#access_token={MARKER}",
    f"https://host/a.jsonl?t%6Fken={MARKER}",
    f"https://host/a.jsonl;jsessionid=1;sig={MARKER}",
    f"https://host/token={MARKER}/a.jsonl",
    f"https://[::1]:80/a.jsonl?key={MARKER}",
    f"s3://bucket/a.jsonl?accessToken={MARKER}",
    f"gs://bucket/a.jsonl?X-Goog-Signature={MARKER}",
    f"/data/hf_{MARKER}{'x' * 30}/a.jsonl",
    f"//user:{MARKER}@host/a.jsonl",
    f"//{MARKER}@host/a.jsonl",
    f"hf://{MARKER}@datasets/owner/name",
    f"https://host/a.jsonl?download={MARKER}",
    f"https://host/a.jsonl?format=json&raw={MARKER}",
    f"/data/sk-ant-api03-{MARKER}{'x' * 30}/a.jsonl",
    f"/data/dckr_pat_{MARKER}{'x' * 30}/a.jsonl",
    f"/data/AIza{MARKER}{'x' * 25}/a.jsonl",
    f"https://hooks.slack.com/services/T0/{MARKER}/{'x' * 20}",
    f"-----BEGIN RSA PRIVATE KEY----- {MARKER} -----END RSA PRIVATE KEY-----",
    f"-----BEGIN PRIVATE KEY----- {MARKER}",
]
WITHOUT = [
    "pydoc://",
    "some/folder/*.jsonl",
    "/data/a:b/c@d.txt",
    "s3://bucket/part-?.parquet",
    "s3://bucket/year=202?/month=1/key=3/tokens=1B",
    "s3://arn:aws:s3:us-west-2:123456789012:accesspoint/name/a.jsonl",
    "s3://bucket/a.jsonl?versionId=abc",
    "hf://datasets/owner/name@refs%2Fconvert%2Fparquet/x/*.parquet",
    "hf://gpt2@main/a.txt",
    "datasets://HuggingFaceFW/fineweb-edu",
    "https://host:8080/folder/a.jsonl",
    "https://host/package@1.2/a.jsonl",
    "https://[::1]:80/a.jsonl",
    "https://host/a.jsonl?download=1&version=2",
    "https://host/a.jsonl?format=parquet&offset=123456789012&revision=0123456789abcdef0123456789abcdef01234567",
    "//server/share/a.jsonl",
    "sk-learn/AIzawa/dckr_pat/a.jsonl",
    "registry/millrace/trainer:0.1.0@sha256:0123",
    "no answer from (http://host:8265), tcp://host:29500: refused",
    "mailto:somebody@host.org",
    "--tokenizer.eos_token='</s>' tokens=5",
]


@pytest.mark.parametrize("address", WITH_CREDENTIALS)
def test_an_address_with_credentials_is_refused_masked_and_says_where_they_belong(tmp_path: Path, address: str) -> None:
    assert MARKER not in mask(address)
    assert mask(mask(address)) == mask(address)
    for key, value in {
        "corpus.sources": f'[{{ uri = "{address}" }}]',
        "tokenizer.model": f'"{address}"',
        "compile.flags": f'["--x={address}"]',
        "name": f'"{address}"',
        "train.max_steps": f'"{address}"',
        f"corpus.{address}": "1",
    }.items():
        with pytest.raises(RecipeError) as caught:
            load_recipe(write_recipe(tmp_path), {key: value})
        assert MARKER not in str(caught.value)
        if key in ("corpus.sources", "tokenizer.model"):
            assert ".netrc" in str(caught.value)
            assert "HF_TOKEN" in str(caught.value)


@pytest.mark.parametrize("address", WITHOUT)
def test_an_address_without_credentials_stays_as_it_is(tmp_path: Path, address: str) -> None:
    assert mask(address) == address
    assert Source(uri=address).uri == address


def test_every_text_of_a_recipe_is_looked_at() -> None:
    """The base class of all sections checks the text, so that no section can leave the check out."""
    assert issubclass(Recipe, Section)
    with pytest.raises(ValueError, match=r"\.netrc") as caught:
        Source(uri="x", column=f"https://user:{MARKER}@host")
    assert MARKER not in str(caught.value)


def test_a_comment_of_a_recipe_with_a_password_is_named_by_its_line(tmp_path: Path) -> None:
    """The text travels to a cluster with its comments."""
    path = tmp_path / "recipe.toml"
    text = recipe_text()
    path.write_text(
        f"# see https://host/page?id=3, by:somebody@host.org\n# uri = 'https://user:{MARKER}@host/a'\n{text}",
        encoding="utf-8",
    )
    with pytest.raises(RecipeError, match=r"recipe\.toml:2: holds") as caught:
        load_recipe(path)
    assert MARKER not in str(caught.value)


def test_what_libraries_say_of_an_address_is_masked_in_errors_logs_and_records(tmp_path: Path) -> None:
    said = f"401, url='https://user:{MARKER}@host/a?X-Amz-Signature={MARKER}', Authorization: Basic {MARKER}"
    assert MARKER not in str(ArtifactError(said))
    link = InputLink(schema_id="text/1", path=f"https://{MARKER}@host/", id="1", content_digest="2")
    assert MARKER not in link.model_dump_json()
    lines = JsonLines(tmp_path / "lines.jsonl")
    lines.append({"error": said, said: [said], "quoted": f'"https://host/?sig={MARKER}"'})
    lines.close()
    assert json.loads((tmp_path / "lines.jsonl").read_text())["quoted"] == f'"https://host/?sig={MASK}"'

    root, handlers, level = logging.getLogger(), logging.getLogger().handlers[:], logging.getLogger().level
    library = logging.getLogger("library")
    library.addHandler(logging.FileHandler(tmp_path / "library"))  # as huggingface_hub and datasets have one
    try:
        configure_logging("test", file=tmp_path / "log")
        try:
            raise ValueError(said)
        except ValueError:
            library.exception("failed at %s", f"https://{MARKER}@host/")
    finally:
        logging.setLogRecordFactory(logging.LogRecord)
        library.handlers.clear()
        root.handlers[:], root.level = handlers, level
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    assert written.count("failed at https://***@host/") == written.count("Traceback") == 2
    assert MARKER not in written


def test_no_recipe_and_no_manifest_of_ours_is_taken_for_one_with_credentials() -> None:
    ours = [*REPOSITORY.glob("recipes/*.toml"), *REPOSITORY.glob("tests/contract/manifests/*.json")]
    assert len({path.suffix for path in ours}) == 2
    for path in ours:
        text = path.read_text(encoding="utf-8")
        assert mask(text) == text, path


def test_a_long_text_that_almost_holds_credentials_is_looked_at_in_seconds() -> None:
    """These took minutes while the time grew with the square of the length."""
    texts = ["x:.=,", "(arn:", "=sha256:", "eyJsk-"]
    code = (
        f"from services.common.input.credentials import mask\nfor text in {texts}: mask(text * (200_000 // len(text)))"
    )

    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False, timeout=60)

    assert done.returncode == 0


def test_a_message_is_no_longer_than_a_person_reads_and_no_part_of_an_address_is_in_it() -> None:
    address = f"https://user:{MARKER * 10_000}@host/a"

    message = str(ArtifactError(f"begin {address} end"))

    assert message == "begin [...] end"
    assert str(ArtifactError("word " * 10_000)) == "word " * 10_000


def test_a_traceback_of_a_bug_is_masked() -> None:
    program = f"""
from services.common.process.entry_point import run_program
def main(argv):
    try:
        raise OSError(5000, "https://user:{"MARK"}" + "ER4711@host/")
    except OSError as error:
        raise KeyError("a bug") from error
run_program(main)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "KeyError: 'a bug'" in done.stderr
    assert "https://***@host/" in done.stderr


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("TORCHINDUCTOR_REDIS_PASSWORD", "x", True),
        ("TORCHINDUCTOR_REDIS_URL", "redis://:x@host", True),
        ("TORCH_INDEX_URL", "https://user:x@host/simple", True),
        ("XLA_API_TOKEN", "x", True),
        ("AWS_SECRET_ACCESS_KEY", "x", True),
        ("WANDB_API_KEY", "x", True),
        ("XLA_FLAGS", "--xla_dump_to=/x", False),
        ("TORCHINDUCTOR_CACHE_KEY", "7", False),
        ("XLA_PASS", "7", False),
        ("XLA_DBPASS", "x", True),
        ("NEURON_PAT", "x", True),
        ("NEURON_RT_KEY", "x", True),
        ("TOKENIZERS_PARALLELISM", "false", False),
        ("NEURON_RT_ROOT_COMM_ID", "10.0.0.1:62182", False),
        ("NEURON_PATH", "/opt/neuron", False),
        ("XLA_KEYBOARD", "us", False),
        ("XLA_BYPASS", "1", False),
    ],
)
def test_a_variable_is_a_secret_by_its_name_or_by_an_address_in_it(variable: str, value: str, expected: bool) -> None:
    assert is_secret(variable, value) is expected
