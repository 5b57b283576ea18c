"""What a trainer reads is what the tokenizer stored, and damage is found before anything is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from services.common.artifacts.corpus import CorpusManifest, Split
from services.common.artifacts.store import Artifact
from services.common.artifacts.token_stream import TokenStream
from services.common.errors import ArtifactError
from services.tokenizer.tests.builders import (
    make_documents,
    published,
    read_stream,
    run,
    write_documents,
    write_recipe,
)

LENGTH = 16
SPLITS: tuple[Split, ...] = ("train", "validation")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Artifact[CorpusManifest]:
    """200 documents in some 200 shards of 8 rows of 16 tokens."""
    folder = tmp_path_factory.mktemp("corpus")
    text = write_documents(folder / "text", [*make_documents(200, mean_bytes=200), b"a", b"b", b"c"])
    assert run(write_recipe(folder, text, corpus__validation_fraction=0.2), folder / "fsx") == 0
    return published(folder / "fsx")


def copy_of(corpus: Artifact[CorpusManifest], folder: Path) -> Artifact[CorpusManifest]:
    for entry in [*corpus.manifest.files]:
        target = folder / entry.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((corpus.path / entry.path).read_bytes())
    return Artifact(folder, corpus.manifest)


@pytest.mark.parametrize("split", SPLITS)
def test_samples_are_the_stored_stream_also_across_rows_and_shards(
    corpus: Artifact[CorpusManifest], split: Split
) -> None:
    stored = read_stream(corpus.path, split).tokens
    stream = TokenStream.open(corpus, split)

    expected = [stored[index * LENGTH : index * LENGTH + LENGTH + 1] for index in range(stream.num_samples)]
    assert stream.num_samples == (len(stored) - 1) // LENGTH > 2 * 8
    assert np.array_equal(stream.read(np.arange(stream.num_samples)), expected)
    assert stream.read([]).shape == (0, LENGTH + 1)


def test_documents_in_samples_are_where_the_tokenizer_began_them(corpus: Artifact[CorpusManifest]) -> None:
    stored = read_stream(corpus.path, "train")
    stream = TokenStream.open(corpus, "train")
    batch = stream.read_documents(np.arange(stream.num_samples))

    document_of_token = np.searchsorted(stored.starts, np.arange(len(stored.tokens)), side="right")
    begins = np.array([0, *stored.starts])[document_of_token]
    for index in range(stream.num_samples):
        places = np.arange(index * LENGTH, (index + 1) * LENGTH)
        documents = document_of_token[places]
        assert batch.segment_ids[index].tolist() == (documents - documents[0]).tolist()
        assert batch.positions[index].tolist() == (places - np.maximum(begins[places], places[0])).tolist()
    assert batch.segment_ids.max() > 1
    assert np.array_equal(batch.tokens, stream.read(np.arange(stream.num_samples)))


def test_a_flipped_bit_is_found_at_open(corpus: Artifact[CorpusManifest], tmp_path: Path) -> None:
    damaged = copy_of(corpus, tmp_path)
    shard = tmp_path / corpus.manifest.corpus.splits["train"].shards[3]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)

    with pytest.raises(ArtifactError, match=r"train/shard-00003\.arrow: xxh3-128 is"):
        TokenStream.open(damaged, "train")
    assert TokenStream.open(damaged, "train", verify="size").num_samples  # sizes alone do not tell
    assert TokenStream.open(damaged, "validation").num_samples


@pytest.mark.parametrize("verify", ["full", "size"])
def test_a_shorter_file_is_found_at_open(corpus: Artifact[CorpusManifest], tmp_path: Path, verify: str) -> None:
    damaged = copy_of(corpus, tmp_path)
    tail = tmp_path / "train" / "tail" / "tail.arrow"
    tail.write_bytes(tail.read_bytes()[:-1])

    with pytest.raises(ArtifactError, match=r"train/tail/tail\.arrow: .* bytes, the manifest says"):
        TokenStream.open(damaged, "train", verify=verify)  # type: ignore[arg-type]


def test_two_shards_that_changed_places_are_found_at_open(corpus: Artifact[CorpusManifest], tmp_path: Path) -> None:
    damaged = copy_of(corpus, tmp_path)
    sizes: dict[int, Path] = {}
    for name in corpus.manifest.corpus.splits["train"].shards:
        path = tmp_path / name
        other = sizes.setdefault(path.stat().st_size, path)
        if other != path:
            break
    path_content, other_content = path.read_bytes(), other.read_bytes()
    path.write_bytes(other_content)
    other.write_bytes(path_content)

    with pytest.raises(ArtifactError, match=r"2 of \d+ files are damaged"):
        TokenStream.open(damaged, "train")
