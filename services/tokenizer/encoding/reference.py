"""Encoders that call the library which defines a vocabulary's ids. They check fast encoders, and replace them."""

from __future__ import annotations

import importlib.metadata

import numpy as np
import tokenizers

from services.common.vocabularies.sentencepiece_model import load_model
from services.common.vocabularies.tokenizer_json import load_tokenizer
from services.tokenizer.encoding.encoder import Offsets, TokenIds, join_documents, token_dtype
from services.tokenizer.text_batch import TextBatch


class SentencePieceEncoder:
    """The reference for SentencePiece models."""

    def __init__(self, model: bytes) -> None:
        self._processor = load_model(model)
        self._dtype = np.dtype(token_dtype(self._processor.vocab_size()))
        self.name = f"sentencepiece {importlib.metadata.version('sentencepiece')}"

    def encode(self, batch: TextBatch) -> tuple[TokenIds, Offsets]:
        """See `Encoder.encode`."""
        encoded = self._processor.encode(batch.documents(), out_type="numpy", num_threads=1)
        return join_documents(encoded, self._processor.bos_id(), self._processor.eos_id(), self._dtype)


class TokenizersEncoder:
    """The reference for `tokenizer.json` files: Hugging Face `tokenizers`."""

    def __init__(self, tokenizer: bytes, bos_id: int, eos_id: int, vocab_size: int) -> None:
        self._tokenizer = load_tokenizer(tokenizer)
        self._bos_id, self._eos_id = bos_id, eos_id
        self._dtype = np.dtype(token_dtype(vocab_size))
        self.name = f"tokenizers {tokenizers.__version__}"

    def encode(self, batch: TextBatch) -> tuple[TokenIds, Offsets]:
        """See `Encoder.encode`."""
        texts = [document.decode() for document in batch.documents()]
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ids = [np.array(encoding.ids, self._dtype) for encoding in encoded]
        return join_documents(ids, self._bos_id, self._eos_id, self._dtype)
