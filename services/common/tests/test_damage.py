"""Damage of every kind is found before the artifact is used, and the message says what and where."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from services.common.artifacts.checkpoint import CheckpointManifest
from services.common.artifacts.compile_cache import CompileCacheManifest
from services.common.artifacts.files import verify_files
from services.common.artifacts.manifest import MANIFEST
from services.common.artifacts.store import open_artifact
from services.common.errors import ArtifactError
from services.common.recipe import fingerprint
from services.common.tests.builders import make_recipe, publish


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return publish(tmp_path / "fsx", make_recipe(tmp_path))[0].path


def use(artifact: Path) -> None:
    manifest = open_artifact(artifact, CompileCacheManifest).manifest
    verify_files(artifact, manifest)


def flip_byte(artifact: Path) -> None:
    content = bytearray((artifact / "graphs/two.bin").read_bytes())
    content[17] ^= 1
    (artifact / "graphs/two.bin").write_bytes(content)


def truncate_file(artifact: Path) -> None:
    (artifact / "graphs/two.bin").write_bytes(b"two")


def delete_file(artifact: Path) -> None:
    (artifact / "graphs/two.bin").unlink()


def swap_files(artifact: Path) -> None:
    one, two = artifact / "graphs/ab/inner/one.bin", artifact / "graphs/two.bin"
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)


def tear_manifest(artifact: Path) -> None:
    content = (artifact / MANIFEST).read_bytes()
    (artifact / MANIFEST).write_bytes(content[: len(content) // 2])


def change_manifest(artifact: Path) -> None:
    content = (artifact / MANIFEST).read_text()
    (artifact / MANIFEST).write_text(content.replace('"graphs_compiled": 2', '"graphs_compiled": 3'))


def remove_manifest(artifact: Path) -> None:
    (artifact / MANIFEST).unlink()


def replace_by(content: str) -> Callable[[Path], None]:
    def rewrite(artifact: Path) -> None:
        (artifact / MANIFEST).write_text(content)

    return rewrite


def reseal(**changes: object) -> Callable[[Path], None]:
    """What another version of the program would have written."""

    def rewrite(artifact: Path) -> None:
        raw = json.loads((artifact / MANIFEST).read_text())
        del raw["seal"]
        raw |= changes
        (artifact / MANIFEST).write_text(json.dumps({**raw, "seal": fingerprint(raw)}))

    return rewrite


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_byte, "1 of 3 files are damaged:\n  graphs/two.bin: xxh3-128 is "),
        (truncate_file, "graphs/two.bin: 3 bytes, the manifest says 300"),
        (delete_file, "graphs/two.bin: missing"),
        (swap_files, "2 of 3 files are damaged:\n  graphs/ab/inner/one.bin: xxh3-128 is "),
        (tear_manifest, "manifest.json: damaged: not a sealed manifest"),
        (change_manifest, "manifest.json: damaged: its content hashes to "),
        (remove_manifest, "not a published artifact (no manifest.json)"),
        (replace_by(""), "damaged: not a sealed manifest"),
        (replace_by('["seal"]'), "damaged: not a sealed manifest"),
        (replace_by('{"seal": 1, "seconds": 12e345}'), "damaged: not a sealed manifest"),
        (reseal(schema="compile_cache/2"), "schema 'compile_cache/2', this program reads 'compile_cache/1'"),
        (reseal(surprise=1), "does not follow compile_cache/1"),
    ],
)
def test_damage_is_an_artifact_error_that_says_what_and_where(
    artifact: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(artifact)

    with pytest.raises(ArtifactError) as caught:
        use(artifact)

    assert message in str(caught.value)
    assert str(artifact) in str(caught.value)


def test_all_damaged_files_are_named_at_once(artifact: Path) -> None:
    truncate_file(artifact)
    (artifact / "three.json").unlink()

    with pytest.raises(ArtifactError, match=r"(?s)graphs/two.bin: 3 bytes.*three.json: missing.*run the stage again"):
        use(artifact)


def test_no_flipped_byte_of_a_manifest_changes_what_is_read(artifact: Path) -> None:
    """A few bytes carry no meaning, such as the kind of white space; a flip there may be overlooked."""
    path = artifact / MANIFEST
    content, manifest = path.read_bytes(), open_artifact(artifact, CompileCacheManifest).manifest
    noticed = 0
    positions = range(0, len(content), 3)
    for position in positions:
        flipped = bytearray(content)
        flipped[position] ^= 0x4B  # also turns a decimal point into an exponent's e
        path.write_bytes(flipped)
        try:
            assert open_artifact(artifact, CompileCacheManifest).manifest == manifest
        except ArtifactError:
            noticed += 1

    assert noticed > 0.7 * len(positions)


def test_an_artifact_of_another_kind_is_refused_with_both_sides(artifact: Path) -> None:
    with pytest.raises(ArtifactError, match=r"schema 'compile_cache/1', this program reads 'checkpoint/1'"):
        open_artifact(artifact, CheckpointManifest)


def test_sizes_alone_can_be_checked_quickly(artifact: Path) -> None:
    manifest = open_artifact(artifact, CompileCacheManifest).manifest
    flip_byte(artifact)
    verify_files(artifact, manifest, level="size")
    truncate_file(artifact)

    with pytest.raises(ArtifactError, match="3 bytes, the manifest says 300"):
        verify_files(artifact, manifest, level="size")


def test_the_content_digest_depends_on_the_bytes_alone(tmp_path: Path) -> None:
    recipe, other = make_recipe(tmp_path), make_recipe(tmp_path, train__seed="7")
    one, _ = publish(tmp_path / "one", recipe)
    two, _ = publish(tmp_path / "two", other, "f" * 16)

    assert one.manifest.content_digest == two.manifest.content_digest
