"""Generates text with the model of a checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor

from services.common.errors import ArtifactError
from services.common.program.transformer import Transformer, parameter_shapes
from services.common.vocabularies.codec import load_codec
from services.trainer.checkpoints.shards import ShardReader
from services.trainer.runs.run import Run, vocabulary_file

TOP_TOKENS = 50
SMALL_MODEL_PARAMETERS = 20_000_000
"""A smaller model generates with one thread: several would wait for each other, for 8 times the CPU time."""


class TextGenerator:
    """Generates texts with the model of a run's newest checkpoint, which is loaded once."""

    def __init__(self, run: Run) -> None:
        self._vocabulary = run.corpus.manifest.corpus.vocabulary
        self._codec = load_codec(vocabulary_file(run.corpus), self._vocabulary)
        self._model = load_model(run)
        self._sequence_length = run.recipe.corpus.sequence_length

    @torch.no_grad()
    def generate(self, prompt: str, num_tokens: int, temperature: float, seed: int) -> str:
        """Return the prompt with up to `num_tokens` tokens of its continuation, which ends with the document."""
        generator, num_threads = torch.Generator().manual_seed(seed), torch.get_num_threads()
        bos, prompted = self._vocabulary.bos_id, self._codec.encode(prompt) if prompt else []
        # A text without BOS and prompt follows the EOS of the text before it, as in the corpus.
        first = [bos] if bos is not None else [] if prompted else [self._vocabulary.eos_id]
        tokens = [*first, *prompted]
        if sum(each.numel() for each in self._model.parameters()) < SMALL_MODEL_PARAMETERS:
            torch.set_num_threads(1)
        try:
            for _ in range(num_tokens):
                window_1S = torch.tensor([tokens[-self._sequence_length :]])
                token = choose_token(self._model.logits(window_1S)[0, -1], temperature, generator)
                if token == self._vocabulary.eos_id:
                    break
                tokens.append(token)
        finally:
            torch.set_num_threads(num_threads)
        return self._codec.decode(tokens[len(first) :])


def load_model(run: Run) -> Transformer:
    """Load the run's model with the weights of its newest checkpoint."""
    model = Transformer(run.recipe.model, run.recipe.corpus.sequence_length)
    model.load_state_dict(load_weights(run), strict=not run.recipe.model.tie_word_embeddings)
    return model.eval()


def load_weights(run: Run) -> dict[str, Tensor]:
    """Load the weights of the run's newest checkpoint. Raises `ArtifactError` if they are not its model's."""
    shapes = parameter_shapes(run.recipe.model)
    return ShardReader(run.checkpoint, shapes).read_weights(shapes)


def choose_token(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int:
    """Sample from the TOP_TOKENS most likely tokens; a temperature below 0.001 is greedy."""
    if not torch.isfinite(logits_V).all():
        raise ArtifactError("The checkpoint's weights give logits that are not finite: its training has diverged.")
    if temperature < 1e-3:  # by less, float32 cannot divide every logit
        return int(logits_V.argmax())
    values, tokens = logits_V.topk(min(TOP_TOKENS, logits_V.numel()))
    drawn = torch.multinomial(torch.softmax(values / temperature, dim=-1), 1, generator=generator)
    return int(tokens[drawn])
