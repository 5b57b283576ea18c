"""Every kind of damage is found before an artifact is used, and the error names the file."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.common.artifacts.compile_cache import CompileCacheManifest
from services.common.artifacts.files import copy_files, verify_files
from services.common.artifacts.manifest import MANIFEST
from services.common.artifacts.store import Artifact, open_artifact
from services.common.artifacts.verification import FILES_PER_TASK, verify_on_nodes
from services.common.errors import ArtifactError, TryAgain, UnreadableError
from services.common.launch.launcher import choose_launcher
from services.common.testing.artifacts import FILES, fill, publish
from services.common.testing.file_opens import noticing_opens
from services.common.testing.manifests import forge, reseal
from services.common.testing.recipes import make_recipe

TWO = "graphs/two.bin"


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return publish(tmp_path / "fsx", make_recipe(tmp_path))[0].path


def use(artifact: Path) -> None:
    verify_files(artifact, open_artifact(artifact, CompileCacheManifest).manifest)


def rewrite(path: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda artifact: (artifact / path).write_bytes(change((artifact / path).read_bytes()))


def flip_byte(artifact: Path) -> None:
    rewrite(TWO, lambda content: content[:17] + bytes([content[17] ^ 1]) + content[18:])(artifact)


def truncate_file(artifact: Path) -> None:
    rewrite(TWO, lambda content: content[:3])(artifact)


def delete(path: str) -> Callable[[Path], None]:
    return lambda artifact: (artifact / path).unlink()


def swap_files(artifact: Path) -> None:
    one, two = artifact / "graphs/ab/inner/one.bin", artifact / TWO
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)


def set_fields(**changes: object) -> Callable[[Path], None]:
    """Return a damage that changes fields of the manifest and seals it again."""
    return lambda artifact: reseal(artifact, lambda fields: fields.update(changes))


def list_also(path: str) -> Callable[[Path], None]:
    """Return a damage that lists this path in the manifest, with the checksums of an existing file."""
    return lambda artifact: forge(artifact, lambda fields: fields["files"].append({**fields["files"][0], "path": path}))


@pytest.mark.parametrize(
    ("damage", "place"),
    [
        (flip_byte, TWO),
        (truncate_file, TWO),
        (delete(TWO), TWO),
        (swap_files, TWO),
        (list_also("three.json/x"), "three.json/x"),
        (rewrite(MANIFEST, lambda content: content[: len(content) // 2]), MANIFEST),
        (rewrite(MANIFEST, lambda content: content.replace(b'_compiled": 2', b'_compiled": 3')), MANIFEST),
        (rewrite(MANIFEST, lambda content: b'["seal"]'), MANIFEST),
        (delete(MANIFEST), MANIFEST),
        (set_fields(schema="compile_cache/2"), MANIFEST),
        (set_fields(surprise=1), "surprise"),
        (set_fields(created_at="2026-01-01T00:00:00"), "created_at"),
        (set_fields(files=[{}] * 1_000), "files.0.path"),
        *((list_also(path), "files.3.path") for path in ("/etc/hostname", "a/../../b", "", MANIFEST)),
    ],
)
def test_damage_is_an_artifact_error_that_names_the_place(
    artifact: Path, damage: Callable[[Path], object], place: str
) -> None:
    damage(artifact)

    with pytest.raises(ArtifactError) as caught:
        use(artifact)

    assert str(artifact) in str(caught.value)
    assert place in str(caught.value)


def test_no_flipped_byte_of_a_manifest_changes_what_is_read(artifact: Path) -> None:
    """A few bytes carry no meaning, such as the kind of white space; a flip there may be overlooked."""
    path = artifact / MANIFEST
    content, manifest = path.read_bytes(), open_artifact(artifact, CompileCacheManifest).manifest
    noticed = 0
    positions = range(0, len(content), 7)
    for position in positions:
        flipped = bytearray(content)
        flipped[position] ^= 0x4B  # also turns a decimal point into an exponent's e
        path.write_bytes(flipped)
        try:
            assert open_artifact(artifact, CompileCacheManifest).manifest == manifest
        except ArtifactError:
            noticed += 1

    assert noticed > 0.7 * len(positions)


def test_a_copy_is_verified_with_one_read_of_each_file(artifact: Path, tmp_path: Path) -> None:
    manifest = open_artifact(artifact, CompileCacheManifest).manifest
    targets = {path: tmp_path / f"copy-{number}" for number, path in enumerate(FILES)}

    with noticing_opens(artifact) as opens:
        copy_files(artifact, manifest, targets)

    assert {path: target.read_bytes() for path, target in targets.items()} == FILES
    assert sorted(opens.paths) == sorted(artifact / path for path in FILES)


@pytest.mark.parametrize("damage", [flip_byte, truncate_file, delete(TWO)])
def test_a_damaged_file_leaves_no_copy(artifact: Path, tmp_path: Path, damage: Callable[[Path], object]) -> None:
    manifest = open_artifact(artifact, CompileCacheManifest).manifest
    damage(artifact)

    with pytest.raises(ArtifactError, match=TWO):
        copy_files(artifact, manifest, {TWO: tmp_path / "copy"})

    assert not (tmp_path / "copy").exists()


def test_a_target_that_cannot_be_written_is_no_damage_of_the_artifact(artifact: Path, tmp_path: Path) -> None:
    manifest = open_artifact(artifact, CompileCacheManifest).manifest

    with pytest.raises(FileNotFoundError) as caught:
        copy_files(artifact, manifest, {"three.json": tmp_path / "absent" / "copy"})

    assert caught.value.filename == str(tmp_path / "absent" / "copy")


def test_the_content_digest_depends_on_the_bytes_alone(tmp_path: Path) -> None:
    recipe, other = make_recipe(tmp_path), make_recipe(tmp_path, train__seed="7")
    one, _ = publish(tmp_path / "one", recipe)
    two, _ = publish(tmp_path / "two", other, "f" * 16)

    assert one.manifest.content_digest == two.manifest.content_digest


def test_only_a_listed_and_intact_file_is_used(artifact: Path) -> None:
    manifest = open_artifact(artifact, CompileCacheManifest).manifest
    (artifact / "four.json").write_text("{}")
    flip_byte(artifact)

    for path in ("four.json", TWO):
        with pytest.raises(ArtifactError, match=path):
            verify_files(artifact, manifest, paths=[path])
    verify_files(artifact, manifest, paths=["three.json"])


@pytest.mark.parametrize("name", ["open", "readinto"])
@pytest.mark.parametrize(
    ("number", "error"), [(errno.EACCES, UnreadableError), (errno.EIO, ArtifactError), (errno.ESTALE, TryAgain)]
)
def test_a_file_that_cannot_be_read_is_named_and_is_damage_for_some_reasons_alone(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int, error: type[Exception]
) -> None:
    really_open = Path.open

    class Broken(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            raise OSError(number, os.strerror(number))

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if not str(path).endswith(TWO):
            return really_open(path, *arguments, **options)
        if name == "open":
            raise OSError(number, os.strerror(number), str(path))
        return Broken(path)

    monkeypatch.setattr(Path, "open", refuse)

    with pytest.raises(error, match=TWO) as caught:
        use(artifact)
    assert type(caught.value) is error


MANY_FILES = {f"graphs/{number:03d}.bin": b"graph" * (number + 1) for number in range(2 * FILES_PER_TASK + 6)}
INLINE = choose_launcher("inline")


@pytest.fixture
def large(tmp_path: Path) -> Artifact[CompileCacheManifest]:
    build = lambda workspace: fill(workspace, MANY_FILES)  # noqa: E731
    return publish(tmp_path / "fsx", make_recipe(tmp_path), build=build)[0]


def test_each_file_is_read_once_and_each_task_advances_by_its_bytes(
    large: Artifact[CompileCacheManifest],
) -> None:
    advances: list[int] = []

    with noticing_opens(large.path) as opens:
        verify_on_nodes(INLINE, large.path, large.manifest, "full", advances.append)

    assert sorted(opens.paths) == sorted(large.path / path for path in MANY_FILES)
    assert len(advances) == 3
    assert sum(advances) == sum(map(len, MANY_FILES.values()))


def test_damages_of_several_tasks_are_named_in_one_error(large: Artifact[CompileCacheManifest]) -> None:
    first, *_, last = MANY_FILES
    (large.path / first).write_bytes(b"grape")
    (large.path / last).unlink()

    with pytest.raises(
        ArtifactError, match=rf"2 of 70 files are damaged:\n  {first}: xxh3-128 is .*\n  {last}: missing"
    ):
        verify_on_nodes(INLINE, large.path, large.manifest)
    with pytest.raises(ArtifactError, match="1 of 70 files are damaged"):
        verify_on_nodes(INLINE, large.path, large.manifest, "size")
