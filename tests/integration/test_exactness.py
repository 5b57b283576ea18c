"""The encoder's ids equal SentencePiece's on 100 MB of text and 200,000 fuzz documents, with two vocabularies."""

from __future__ import annotations

import pytest

from benchmarks.package_text import read_text
from services.common.testing.seeds import draw_seed
from services.common.vocabularies.fuzz import fuzz_documents
from services.common.vocabularies.sentencepiece_model import load_model
from services.tokenizer.encoding.chunk_encoder import ChunkEncoder
from services.tokenizer.encoding.encoder import find_difference
from services.tokenizer.tests.builders import load_reference
from services.tokenizer.text_batch import TextBatch, in_batches
from services.tokenizer.vocabulary.training import take_first, train_vocabulary

MEGABYTE = 10**6
VOCAB_SIZE = 32_000


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("is_code", [True, False], ids=["trained-on-code", "trained-on-prose"])
def test_no_document_of_100_megabytes_or_of_200000_of_fuzz_has_other_ids_than_sentencepieces(is_code: bool) -> None:
    others = read_text(None, 400 * MEGABYTE, half=1).documents
    chosen = [document for document in others if (b"import " in document) == is_code]
    model = train_vocabulary(take_first(chosen, 12 * MEGABYTE), VOCAB_SIZE)
    kernel, reference = ChunkEncoder.from_model(model), load_reference(model)

    text = read_text(None, 100 * MEGABYTE, half=0)
    assert text.bytes >= 100 * MEGABYTE
    for batch in in_batches(text.documents):
        assert find_difference(kernel, reference, batch) is None

    processor = load_model(model)
    pieces = [str(processor.id_to_piece(index)) for index in range(VOCAB_SIZE)]
    first_seed = draw_seed()
    for seed in range(first_seed, first_seed + 20):
        different = find_difference(kernel, reference, TextBatch.of(fuzz_documents(pieces, 10_000, seed)))
        assert different is None, seed
