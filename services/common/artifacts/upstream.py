"""Finds and opens the artifacts that a stage reads, and compares them with the recipe before any work starts."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

from services.common.artifacts.compile_cache import CompileCacheManifest, compile_cache_name
from services.common.artifacts.corpus import CorpusManifest, CorpusPayload
from services.common.artifacts.manifest import read_sealed
from services.common.artifacts.store import Artifact, find_artifact, open_artifact, published_ids, require_in_place
from services.common.errors import ArtifactError, shell_command
from services.common.problem_list import list_names
from services.common.recipe.derived import corpus_weights
from services.common.recipe.file import read_override
from services.common.recipe.schema import Recipe, Stage

_OWN = {"tokenizer": "tokenize", "compiler": "compile", "trainer": "train"}


def stage_command(stage: Stage, recipe_path: Path, root: Path, subcommand: str = "", *options: str) -> str:
    """Return the command of a stage or of its subcommand, quoted for a shell.

    It has the overrides of this program's own command line: without them it would be about another recipe.
    """
    start = shell_command(f"services.{stage}", subcommand or _OWN[stage], shlex.quote(str(recipe_path)))
    overrides = [word for word in sys.argv[1:] if read_override(word)]
    return f"{start} {shlex.join(['--root', str(root), *overrides, *options])}"


def open_corpus(
    recipe: Recipe, recipe_path: Path, root: Path, explicit: Path | None = None
) -> Artifact[CorpusManifest]:
    """Open the corpus of this recipe, or the one at `explicit`.

    Raises `ArtifactError` where its vocabulary or its rows have another size than the recipe's, or it has no sample.
    """
    tokenizer = _made_by("tokenizer", recipe_path, root)
    if explicit:
        corpus = open_artifact(explicit.absolute(), CorpusManifest)
    else:
        corpus = find_artifact(root, "corpus", recipe.corpus.name, recipe, CorpusManifest, tokenizer)
    return _require_fit(corpus, recipe, tokenizer)


def open_corpora(
    recipe: Recipe, recipe_path: Path, root: Path, own: Path | None = None
) -> dict[str, Artifact[CorpusManifest]]:
    """Open the corpora of the recipe's run, by their names in `corpus_weights`; this reads a manifest of each.

    Raises `ArtifactError` as `open_corpus` does, and where two are the same, or have other vocabularies.
    """
    first = open_corpus(recipe, recipe_path, root, own)
    found, vocabulary = {recipe.corpus.name: first}, first.manifest.corpus.vocabulary
    for name in list(corpus_weights(recipe))[1:]:
        published = _find_published(root, name, first.manifest.corpus)
        corpus = _require_fit(published, recipe, "the tokenizer stage with its own recipe")
        theirs, digest = corpus.manifest.corpus.vocabulary, corpus.manifest.content_digest
        if theirs.model_copy(update={"path": vocabulary.path}) != vocabulary:
            raise ArtifactError(
                f"{corpus.path}: has the vocabulary {theirs.sha256[:12]}, and {first.path} has "
                f"{vocabulary.sha256[:12]}: in a mixture (train.mixture) each id means one text. "
                f"{advise_tokenizer(first, name)}"
            )
        if twice := [each.path for each in found.values() if each.manifest.content_digest == digest]:
            raise ArtifactError(f"{corpus.path}: train.mixture has it twice, also as {twice[0]}. Add up the weights.")
        found[name] = corpus
    return found


def advise_tokenizer(corpus: Artifact[CorpusManifest], name: str) -> str:
    """Return the advice to tokenize the text of the corpus `name` with the tokenizer of another one."""
    own, vocabulary = corpus.manifest.recipe["tokenizer"], corpus.manifest.corpus.vocabulary
    path = corpus.path / vocabulary.path
    keys = {"model": str(path.parent if vocabulary.kind == "hugging_face" else path)}
    keys |= {key: own[key] for key in ("bos_token", "eos_token") if own.get(key)}
    lines = "\n  ".join(f"{key} = {json.dumps(value)}" for key, value in keys.items())
    return f"Tokenize {name} with this in place of its [tokenizer] and [tokenizer.train]:\n\n  [tokenizer]\n  {lines}"


def _find_published(root: Path, name: str, first: CorpusPayload) -> Artifact[CorpusManifest]:
    """Open the corpus NAME or NAME/ID of a mixture, where ID may be the beginning of one. Of several, it is the one
    with the vocabulary and the length of rows of the `first` corpus.
    """
    folder, _, start = name.partition("/")
    collection = root / "corpus" / folder
    fitting = [each for each in published_ids(collection) if each.startswith(start)]
    if len(fitting) > 1:
        found = {each: read_sealed(collection / each)["corpus"] for each in fitting}
        alike = [each for each in fitting if found[each]["vocabulary"]["sha256"] == first.vocabulary.sha256]
        fitting = [each for each in alike if found[each]["sequence_length"] == first.sequence_length] or fitting
    if len(fitting) != 1:
        there = list_names(sorted(each.name for each in collection.parent.glob("*")))
        problem = (
            f"fits {list_names(fitting)}: name one as {folder}/ID"
            if fitting
            else f"is not published; published: {there}. Tokenize it with its own recipe, or correct the name"
        )
        raise ArtifactError(f"{collection}: train.mixture: corpus {name!r} {problem}.")
    return require_in_place(open_artifact(collection / fitting[0], CorpusManifest))


def _require_fit(corpus: Artifact[CorpusManifest], recipe: Recipe, tokenizer: str) -> Artifact[CorpusManifest]:
    payload = corpus.manifest.corpus
    if payload.vocabulary.vocab_size != recipe.model.vocab_size:
        raise ArtifactError(
            f"{corpus.path}: its vocabulary has {payload.vocabulary.vocab_size:,} pieces, model.vocab_size is "
            f"{recipe.model.vocab_size:,}. {advise_vocab_size(recipe, payload.vocabulary.vocab_size)} or use the "
            f"corpus of a tokenizer with {recipe.model.vocab_size:,} pieces."
        )
    if payload.sequence_length != recipe.corpus.sequence_length:
        raise ArtifactError(
            f"{corpus.path}: its rows have {payload.sequence_length:,} tokens, corpus.sequence_length is "
            f"{recipe.corpus.sequence_length:,}. Omit --corpus, and run {tokenizer}."
        )
    if payload.num_samples("train") == 0:
        raise ArtifactError(
            f"{corpus.path}: no training sample: a sample takes {payload.sequence_length + 1:,} tokens, and the split "
            f"has {payload.splits['train'].tokens:,}. Add text to corpus.sources, or lower corpus.sequence_length or "
            f"corpus.validation_fraction, and run {tokenizer}."
        )
    return corpus


def advise_vocab_size(recipe: Recipe, num_pieces: int) -> str:
    """Return the start of a sentence with the options by which a recipe fits a vocabulary of `num_pieces`."""
    rows = recipe.model.num_vocab_rows
    trained = f" --tokenizer.train.vocab_size={num_pieces}" if recipe.tokenizer.train else ""
    padding = f" --model.padded_vocab_size={rows} (if the model has {rows:,} rows)" if rows > num_pieces else ""
    return f"Set --model.vocab_size={num_pieces}{trained}{padding}"


def find_cache(recipe: Recipe, recipe_path: Path, root: Path) -> Artifact[CompileCacheManifest]:
    """Open the newest compile cache of this recipe. Only the trainer's machine can tell whether the cache fits it."""
    made_by = _made_by("compiler", recipe_path, root)
    return find_artifact(root, "compile_cache", compile_cache_name(recipe), recipe, CompileCacheManifest, made_by)


def _made_by(stage: Stage, recipe_path: Path, root: Path) -> str:
    return f"the {stage} stage: `{stage_command(stage, recipe_path, root)}`"
