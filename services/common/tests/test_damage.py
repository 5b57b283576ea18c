"""Every kind of damage is found before an artifact is used, and the message names the file and the difference."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.common.artifacts.checkpoint import CheckpointManifest
from services.common.artifacts.compile_cache import CompileCacheManifest
from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.files import copy_files, listed_file, verify_files
from services.common.artifacts.manifest import MANIFEST, MAX_FILES, Manifest
from services.common.artifacts.store import open_artifact
from services.common.errors import ArtifactError, RecipeError, TryAgain, UnreadableError
from services.common.testing.artifacts import FILES, publish
from services.common.testing.file_opens import noticing_opens
from services.common.testing.manifests import forge, reseal, write_sealed
from services.common.testing.recipes import make_recipe
from services.common.tests.builders import REPOSITORY


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


def replace_by_folder(artifact: Path) -> None:
    (artifact / MANIFEST).unlink()
    (artifact / MANIFEST).mkdir()


def replace_by_pipe(artifact: Path) -> None:
    (artifact / MANIFEST).unlink()
    os.mkfifo(artifact / MANIFEST)


def replace_by_device(artifact: Path) -> None:
    (artifact / MANIFEST).unlink()
    (artifact / MANIFEST).symlink_to("/dev/zero")


def replace_by_loop(artifact: Path) -> None:
    (artifact / MANIFEST).unlink()
    (artifact / MANIFEST).symlink_to(artifact / MANIFEST)


BAD_PATHS = (
    *("../outside", "/etc/hostname", "graphs/../../outside", "graphs//two.bin", "./three.json", "", "x" * 256),
    *("graphs\\..\\..\\outside", "three.json\0", "\u202etxt.exe"),
)


def list_also(*paths: str) -> Callable[[Path], None]:
    """Return a damage that lists these paths in the manifest, with the checksums of an existing file."""

    def rewrite(artifact: Path) -> None:
        forge(artifact, lambda fields: fields["files"].extend({**fields["files"][0], "path": path} for path in paths))

    return rewrite


def link(path: str, target: str) -> Callable[[Path], None]:
    """Move what is at `path` out of the artifact, to `target`, and leave a link."""

    def move(artifact: Path) -> None:
        (artifact / path).rename(artifact / target)
        (artifact / path).symlink_to(artifact / target)

    return move


def replace_file_by_pipe(artifact: Path) -> None:
    (artifact / "three.json").unlink()
    os.mkfifo(artifact / "three.json")


def rewrite(**changes: object) -> Callable[[Path], None]:
    """Return a damage that changes fields of the manifest and seals it again."""

    return lambda artifact: reseal(artifact, lambda fields: fields.update(changes))


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
        (rewrite(schema="compile_cache/2"), "schema 'compile_cache/2', this program reads 'compile_cache/1'"),
        (rewrite(surprise=1), "does not follow compile_cache/1"),
        (rewrite(created_at="2026-01-01T00:00:00"), "created_at: Input should have timezone info"),
        (rewrite(name="x" * 10_001), "name: String should have at most 10000 characters"),
        (rewrite(files=[{}] * 1_000), "and 3,990 more"),
        (rewrite(files=[{}] * 2_001), "\n    and 7,994 more: missing"),
        (replace_by('{"files": [' + "1," * 300_000 + "1]}"), "it lists 300,001 files, expected at most 300,000"),
        (rewrite(inputs=[{}] * 300_001), "300,001 entries, expected at most 300,000"),
        (rewrite(**{f"field{number}": 1 for number in range(1_000)}), "and 990 more: extra_forbidden"),
        (replace_by('{"seal": ' + "[" * 100_000), "damaged: not a sealed manifest (nested deeper than 64)"),
        (replace_by('{"seal": 1, "recipe": ' + '{"a":' * 300 + "1" + "}" * 301), "nested deeper than 64"),
        (replace_by('{"seal": ' + "9" * 5_000 + "}"), "damaged: not a sealed manifest"),
        (replace_by('{"seal": 1, "name": "\\ud800"}'), "damaged: not a sealed manifest"),
        (replace_by('{"seal": NaN}'), "NaN"),
        (replace_by_folder, "manifest.json: cannot be read: a folder, expected a regular file"),
        (replace_by_pipe, "manifest.json: cannot be read: a pipe, expected a regular file"),
        (replace_by_device, "manifest.json: cannot be read: a device, expected a regular file"),
        (replace_by_loop, "manifest.json: cannot be read: Too many levels of symbolic links"),
        *((list_also(path), f"files.3.path: Value error, {path[:200]!r}") for path in BAD_PATHS),
        (list_also(MANIFEST), "a manifest cannot list itself"),
        (list_also("three.json"), "three.json is listed 2 times"),
        (list_also("three.json/x"), "three.json/x: missing"),
        (list_also("graphs"), "graphs: cannot be read: a folder, expected a regular file"),
        (link("three.json", "../three.json"), "three.json: cannot be read: a link that leads out of "),
        (link("graphs/ab", "../ab"), "graphs/ab/inner/one.bin: cannot be read: a link that leads out of "),
        (link("graphs", "../graphs"), "graphs/two.bin: cannot be read: a link that leads out of "),
        (replace_file_by_pipe, "three.json: cannot be read: a pipe, expected a regular file"),
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

    with pytest.raises(ArtifactError, match=r"(?s)graphs/two.bin: 3 bytes.*three.json: missing"):
        use(artifact)


def test_ten_of_a_kind_are_named_and_the_others_counted(artifact: Path) -> None:
    """A corpus without its folder `train` lacks as many files as it had shards."""
    list_also(*(f"train/shard-{number:05d}.arrow" for number in range(3_000)))(artifact)
    truncate_file(artifact)

    with pytest.raises(ArtifactError, match=r"3001 of 3003 files are damaged(?s:.*)and 2,990 more: missing") as caught:
        use(artifact)
    assert len(str(caught.value).splitlines()) < 20
    assert "graphs/two.bin: 3 bytes, the manifest says 300" in str(caught.value)


def test_an_artifact_of_more_files_than_a_manifest_is_read_with_is_not_published(artifact: Path) -> None:
    manifest = open_artifact(artifact, CompileCacheManifest).manifest
    more = manifest.model_copy(update={"files": manifest.files[:1] * (MAX_FILES + 1)})

    with pytest.raises(RecipeError, match=r"300,001 files, .*300,000"):
        more.write(artifact)


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
    with pytest.raises(ArtifactError, match=r"'compile_cache/1'.*'checkpoint/4'"):
        open_artifact(artifact, CheckpointManifest)


def test_sizes_alone_can_be_checked_quickly(artifact: Path) -> None:
    manifest = open_artifact(artifact, CompileCacheManifest).manifest
    flip_byte(artifact)
    verify_files(artifact, manifest, level="size")
    truncate_file(artifact)

    with pytest.raises(ArtifactError, match="3 bytes, the manifest says 300"):
        verify_files(artifact, manifest, level="size")


def test_a_copy_is_verified_with_one_read_of_each_file(artifact: Path, tmp_path: Path) -> None:
    manifest = open_artifact(artifact, CompileCacheManifest).manifest
    targets = {path: tmp_path / f"copy-{number}" for number, path in enumerate(FILES)}

    with noticing_opens(artifact) as opens:
        copy_files(artifact, manifest, targets)

    assert {path: target.read_bytes() for path, target in targets.items()} == FILES
    assert sorted(opens.paths) == sorted(artifact / path for path in FILES)


@pytest.mark.parametrize("damage", [flip_byte, truncate_file, delete_file])
def test_a_damaged_file_leaves_no_copy(artifact: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    manifest = open_artifact(artifact, CompileCacheManifest).manifest
    damage(artifact)

    with pytest.raises(ArtifactError, match=r"1 of 1 files are damaged:\n  graphs/two.bin: "):
        copy_files(artifact, manifest, {"graphs/two.bin": tmp_path / "copy"})

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


def test_links_that_stay_inside_of_an_artifact_are_followed(artifact: Path) -> None:
    link("graphs/ab", "elsewhere")(artifact)
    link("three.json", "3.json")(artifact)

    use(artifact)


def test_an_artifact_behind_a_link_is_used(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(artifact)

    use(tmp_path / "link")


def test_a_file_that_the_manifest_does_not_list_is_not_opened(artifact: Path) -> None:
    manifest = open_artifact(artifact, CompileCacheManifest).manifest
    (artifact / "four.json").write_text("{}")

    with pytest.raises(ArtifactError, match=r"four\.json: not among the files"):
        listed_file(artifact, manifest, "four.json")
    assert listed_file(artifact, manifest, "three.json") == artifact / "three.json"


def test_a_damaged_file_is_not_opened(artifact: Path) -> None:
    manifest = open_artifact(artifact, CompileCacheManifest).manifest
    flip_byte(artifact)

    with pytest.raises(ArtifactError, match=r"graphs/two\.bin: xxh3-128 is"):
        listed_file(artifact, manifest, "graphs/two.bin")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "schema None, this program reads"),
        ({"schema": "corpus/1"}, "'corpus/1'.*'corpus/4'"),
        ({"schema": ["corpus/4"]}, "this program reads"),
    ],
)
@pytest.mark.parametrize("manifest_type", [CorpusManifest, CheckpointManifest, CompileCacheManifest])
def test_a_manifest_that_lacks_almost_everything_is_damaged(
    tmp_path: Path, raw: dict[str, Any], message: str, manifest_type: type[Manifest]
) -> None:
    write_sealed(tmp_path, raw)

    with pytest.raises(ArtifactError, match=message if manifest_type is CorpusManifest else "this program reads"):
        open_artifact(tmp_path, manifest_type)


@pytest.mark.parametrize(
    ("number", "error", "message"),
    [
        (errno.EACCES, UnreadableError, r"two\.bin: .*Permission denied"),
        (errno.EIO, ArtifactError, r"two\.bin: .*Input/output error"),
        (errno.ESTALE, TryAgain, r"two\.bin: .*Stale file handle"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception], message: str
) -> None:
    really_open = os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path).endswith("two.bin"):
            raise OSError(number, os.strerror(number), str(path))
        return really_open(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)

    with pytest.raises(error, match=message) as caught:
        use(artifact)
    assert type(caught.value) is error


@pytest.mark.parametrize("name", [MANIFEST, "graphs/two.bin", "graphs"])
def test_what_this_user_may_not_read_is_not_called_an_unwritable_root(tmp_path: Path, name: str) -> None:
    setpriv = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    if os.getuid() or not shutil.which("setpriv"):
        pytest.skip("needs root and setpriv, to become a user without rights")
    if subprocess.run([*setpriv, sys.executable, "-c", "import pydantic"], capture_output=True, check=False).returncode:
        pytest.skip("needs packages that other users may read; Pants keeps its own in root's home")
    with tempfile.TemporaryDirectory() as folder:  # pytest closes its own to other users
        Path(folder).chmod(0o755)
        artifact = publish(Path(folder) / "fsx", make_recipe(tmp_path))[0].path
        (artifact / name).chmod(0)
        done = subprocess.run(
            [*setpriv, sys.executable, "-m", "services.common.artifacts", "verify", str(artifact)],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
        )

    assert done.returncode == 3, done.stderr
    assert f"{artifact / name}" in done.stderr
    assert "Permission denied" in done.stderr
    assert "--root" not in done.stderr
