"""Let a checkpoint write."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from services.common.errors import ArtifactError, RecipeError
from services.common.program.llama import Llama, parameter_shapes
from services.common.vocabularies.codec import load_codec
from services.trainer.checkpoints.shards import ShardReader
from services.trainer.run import Run, vocabulary_file

TOP_TOKENS = 50
MIN_TEMPERATURE = 1e-3
"""Below it float32 cannot divide every logit."""


class TextGenerator:
    """A run's newest checkpoint and its vocabulary, loaded once for all that they write."""

    def __init__(self, run: Run) -> None:
        self._corpus = run.corpus.path
        self._vocabulary = run.corpus.manifest.corpus.vocabulary
        self._codec = load_codec(vocabulary_file(run), self._vocabulary)
        self._model = load_model(run)
        self._sequence_length = run.recipe.corpus.sequence_length

    def generate(self, prompt: str, num_tokens: int, temperature: float, seed: int) -> str:
        """The prompt and up to `num_tokens` tokens of its continuation, ending at a document's end."""
        generator = torch.Generator().manual_seed(seed)
        tokens = [self._vocabulary.bos_id, *(self._codec.encode(prompt) if prompt else [])]
        for _ in range(num_tokens):
            window_1S = torch.tensor([tokens[-self._sequence_length :]])
            with torch.no_grad():
                token = choose_token(self._model.logits(window_1S)[0, -1], temperature, generator)
            if token == self._vocabulary.eos_id:
                break
            tokens.append(token)
        try:
            return self._codec.decode(tokens[1:])
        except LookupError as error:
            raise ArtifactError(
                f"{self._corpus}: its vocabulary has no text for an id that it claims to have ({error})."
            ) from error


def load_model(run: Run) -> Llama:
    """The run's model with the weights of its newest checkpoint."""
    model = Llama(run.recipe.model, run.recipe.corpus.sequence_length)
    model.load_state_dict(load_weights(run), strict=not run.recipe.model.tie_word_embeddings)
    return model.eval()


def load_weights(run: Run) -> dict[str, Tensor]:
    """The weights of the run's newest checkpoint. Raises `ArtifactError` when they are not those of its model."""
    shapes = parameter_shapes(run.recipe.model)
    return ShardReader(run.checkpoint, shapes).read_weights(shapes)


def require_drawable(num_tokens: int, temperature: float, seed: int) -> None:
    """Raise `RecipeError` for what no text can be drawn with."""
    if num_tokens < 0:
        raise RecipeError(f"--tokens {num_tokens}: expected 0 or more.")
    if not (temperature == 0 or MIN_TEMPERATURE <= temperature < math.inf):
        raise RecipeError(
            f"--temperature {temperature}: expected 0, which takes the likeliest token, or {MIN_TEMPERATURE} or more."
        )
    if not 0 <= seed < 2**63:
        raise RecipeError(f"--seed {seed:,}: expected 0 to 2^63 - 1.")


def choose_token(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int:
    """Draw from the likeliest tokens; temperature 0 takes the likeliest."""
    if not torch.isfinite(logits_V).all():
        raise ArtifactError("The checkpoint's weights give logits that are not finite: its training has diverged.")
    if temperature == 0:
        return int(logits_V.argmax())
    values, tokens = logits_V.topk(min(TOP_TOKENS, logits_V.numel()))
    drawn = torch.multinomial(torch.softmax(values / temperature, dim=-1), 1, generator=generator)
    return int(tokens[drawn])
