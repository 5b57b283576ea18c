"""Let a checkpoint write."""

from __future__ import annotations

import safetensors.torch
import torch
from torch import Tensor

from services.common.artifacts.checkpoint import WEIGHTS
from services.common.program.llama import Llama
from services.common.vocabularies.codec import load_codec
from services.trainer.run import Run, vocabulary_file

TOP_TOKENS = 50


class Writer:
    """A run's newest checkpoint and its vocabulary, loaded once for all that they write."""

    def __init__(self, run: Run) -> None:
        self._vocabulary = run.corpus.manifest.corpus.vocabulary
        self._codec = load_codec(vocabulary_file(run).read_bytes(), self._vocabulary)
        self._model = load_model(run)
        self._sequence_length = run.recipe.corpus.sequence_length

    def write(self, prompt: str, num_tokens: int, temperature: float, seed: int) -> str:
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
        return self._codec.decode(tokens[1:])


def load_model(run: Run) -> Llama:
    """The run's model with the weights of its newest checkpoint."""
    model = Llama(run.recipe.model, run.recipe.corpus.sequence_length)
    model.load_state_dict(
        safetensors.torch.load_file(run.checkpoint.path / WEIGHTS), strict=not run.recipe.model.tie_word_embeddings
    )
    return model.eval()


def choose_token(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int:
    """Draw from the likeliest tokens; temperature 0 takes the likeliest."""
    if temperature == 0:
        return int(logits_V.argmax())
    values, tokens = logits_V.topk(min(TOP_TOKENS, logits_V.numel()))
    drawn = torch.multinomial(torch.softmax(values / temperature, dim=-1), 1, generator=generator)
    return int(tokens[drawn])
