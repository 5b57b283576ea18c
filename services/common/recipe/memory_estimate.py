"""Estimates the device memory of a trainer's worker, part by part, from the recipe alone.

It counts the tensors that the program keeps while each of its operations runs by itself. A compiler may keep less: it
merges casts and frees buffers earlier. The peak was 0.96 to 1.07 times that of traced steps of 8 layers of Llama 2 7B,
in every mode of checkpointing, with 1 and 8 workers a model (2026-11), and 1.16 times where 32 workers share a model,
whose layers are then small beside its embedding tables.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from services.common.hardware.instance_types import GIB, MIB
from services.common.recipe.schema import Model, Recipe, key_value_copies

FLOAT32_BYTES = 4
MOMENTS_PER_PARAMETER = 2


@dataclass(frozen=True)
class Part:
    """Bytes of one part of the memory at each of the three moments of a step at which memory peaks."""

    name: str
    forward: int = 0
    """Bytes at the end of the last micro-batch's forward pass."""
    backward: int = 0
    """Bytes at the end of the last micro-batch's backward pass."""
    update: int = 0
    """Bytes during the optimizer's update."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.forward, self.backward, self.update


@dataclass(frozen=True)
class WorkerMemory:
    parts: tuple[Part, ...]

    @property
    def together(self) -> Part:
        return Part("together", *map(sum, zip(*(part.sizes for part in self.parts), strict=True)))

    @property
    def peak_bytes(self) -> int:
        return max(self.together.sizes)


class _Sizes:
    """Numbers of elements on one of the t workers that share a model, for a micro-batch of B sequences of S tokens,
    and the bytes of an element.
    """

    def __init__(self, recipe: Recipe) -> None:
        model, batch, parts = recipe.model, recipe.batch, recipe.parallel.tensor_parallel_size
        width, tokens = model.hidden_size, batch.micro_batch_size * recipe.corpus.sequence_length
        heads = model.num_key_value_heads * model.head_dim * key_value_copies(recipe) // parts
        inner, vocab_rows = model.intermediate_size // parts, -(-model.num_vocab_rows // parts)
        queries = model.query_size // parts
        layer = 2 * width * (queries + heads) + 3 * width * inner
        self.layer = layer  # its matrices
        self.is_split = parts > 1
        self.table = vocab_rows * width  # of the embeddings
        self.largest_bucket = max(layer, self.table)
        self.matrices = model.num_hidden_layers * layer + self.table * (1 if model.tie_word_embeddings else 2)
        self.parameters = self.matrices + (2 * model.num_hidden_layers + 1) * width
        self.parameters += 2 * model.num_hidden_layers * model.head_dim if model.qk_norm else 0
        # A lookup reads the embeddings without a cast.
        self.multiplied = self.matrices - (0 if model.tie_word_embeddings else self.table)
        self.stream = tokens * width // parts  # the residual stream between layers, split along the sequence: B S/t D
        self.sequence = tokens * width  # the residual stream as a layer gathers it: B S D
        self.queries = tokens * queries
        self.keys = tokens * heads  # the values have as many
        self.normalised = self.queries + self.keys if model.qk_norm else 0  # by QK norm
        self.inner = tokens * inner
        self.mask = tokens * recipe.corpus.sequence_length if recipe.train.attention_mask == "block_causal" else 0
        # One worker that has the whole model keeps all logits.
        self.logits = (min(batch.loss_chunk_tokens, tokens) if self.is_split else tokens) * vocab_rows
        self.param_bytes = FLOAT32_BYTES if recipe.train.param_dtype == "float32" else 2
        self.compute_bytes = FLOAT32_BYTES if recipe.train.dtype == "float32" else 2
        # The workers of a model sum activations in this type.
        self.sum_bytes = FLOAT32_BYTES if recipe.parallel.reduce_dtype == "float32" else self.compute_bytes


def memory_of_worker(recipe: Recipe) -> WorkerMemory:
    """Return the parts of the state and of a train step that take memory. Every rank of a run holds as much."""
    sizes, train, stage = _Sizes(recipe), recipe.train, recipe.parallel.zero_stage
    sum_bytes, models = FLOAT32_BYTES * sizes.parameters, recipe.parallel.data_parallel_size
    shares = models if stage else 1
    of_shares = f", 1 of {shares} shares" if shares > 1 else ""
    masters = sum_bytes // shares if shares > 1 or stage == 3 or train.param_dtype != "float32" else 0
    moments = MOMENTS_PER_PARAMETER * sum_bytes // shares
    sums = int(sum_bytes * sums_beside_a_gradient(recipe, micro_batches_per_model(recipe)))
    total = sum_bytes // (models if stage >= 2 else 1)
    kept, *in_a_layer = _activation_bytes(recipe, sizes)
    loss = _loss_bytes(recipe, sizes)
    step = _step_by_layer(recipe, sizes, sum(in_a_layer), loss) if stage == 3 else _step_of_whole_model(recipe, sizes)
    parts = (
        Part(f"weights, {train.param_dtype}{of_shares if stage == 3 else ''}", *[step.weights] * 3),
        step.two_layers,
        Part(f"casts of them to {train.dtype}", forward=step.casts),
        Part(f"master weights{of_shares}", masters, masters, masters),
        Part(f"AdamW moments{of_shares}", moments, moments, moments),
        Part(f"gradient accumulators ({train.reduction}){of_shares if stage >= 2 else ''}", sums, sums, total),
        step.gradient,
        step.bucket_sum,
        Part(f"activations ({train.activation_checkpointing})", recipe.model.num_hidden_layers * kept, kept),
        Part("mask of documents", sizes.mask, sizes.mask),
        replace(step.in_a_layer, backward=max(step.in_a_layer.backward, sum(in_a_layer))),
        Part("loss: hidden states, logits", forward=loss),
        Part("all-gather of a bucket", update=step.gathered),
    )
    return WorkerMemory(tuple(part for part in parts if any(part.sizes)))


@dataclass(frozen=True)
class _StepMemory:
    """What a step holds of weights and gradients, which depends on whether a worker gathers weights by layers."""

    weights: int
    gradient: Part
    bucket_sum: Part
    casts: int = 0
    gathered: int = 0
    two_layers: Part = Part("weights of a layer and of the next one")
    in_a_layer: Part = Part("backward pass of a layer")


def _step_of_whole_model(recipe: Recipe, sizes: _Sizes) -> _StepMemory:
    train, models, weights = recipe.train, recipe.parallel.data_parallel_size, sizes.param_bytes * sizes.parameters
    copies = models + 1 if _gathers_sums(recipe) else 1  # buckets are summed one after the other
    summed = FLOAT32_BYTES * sizes.largest_bucket * copies if models > 1 else 0
    is_sharded = recipe.parallel.zero_stage > 0 and models > 1
    return _StepMemory(
        weights,
        Part("gradient of a micro-batch", backward=weights),
        Part("sum of a bucket over the workers", backward=summed if copies > 1 else 0, update=summed),
        casts=sizes.compute_bytes * sizes.multiplied if train.dtype != train.param_dtype else 0,
        gathered=sizes.param_bytes * sizes.largest_bucket if is_sharded else 0,
    )


def _step_by_layer(recipe: Recipe, sizes: _Sizes, in_a_layer: int, loss: int) -> _StepMemory:
    """ZeRO-3, on a CPU or a GPU: weights are rounded to the type of products, and those of float32 are the masters."""
    item, layer, table = sizes.compute_bytes, sizes.layer, sizes.table
    # A bucket's gradient in float32 is sent, and with exact sums as much is received, while the next one is made.
    sent = FLOAT32_BYTES * (2 if recipe.train.reduction == "exact" else 1)
    summed = sent * layer // 2
    forward, backward = item * (layer + table), item * 2 * layer
    # The backward pass begins with the activations of all layers, in the head and then in the last layer.
    head = forward + (item + sent) * table
    first = max(head, backward + sent * table + in_a_layer) - forward - loss
    return _StepMemory(
        item * sizes.parameters // recipe.parallel.data_parallel_size if item < FLOAT32_BYTES else 0,
        Part("gradient of a layer", backward=item * layer),
        Part("sum of a bucket over the workers", backward=summed, update=summed),
        two_layers=Part(_StepMemory.two_layers.name, forward, backward),
        in_a_layer=Part(_StepMemory.in_a_layer.name, max(0, first), FLOAT32_BYTES * layer),
    )


def gradient_bytes_sent(recipe: Recipe) -> int:
    """Return the bytes of gradients that a worker sends to the others of the data axis in a step, around a ring."""
    parallel, models = recipe.parallel, recipe.parallel.data_parallel_size
    passes = 1 if parallel.zero_stage else 2  # without shards the sums are gathered, too
    if _gathers_sums(recipe):
        passes += models - 1
    return sums_per_step(recipe) * passes * FLOAT32_BYTES * _Sizes(recipe).parameters * (models - 1) // models


def weight_bytes_sent(recipe: Recipe) -> int:
    """Return the bytes of weights that a worker sends in a step, around a ring: with ZeRO-1 and 2 all of them after the
    update, and with ZeRO-3 those of a layer forward and backward in each micro-batch.
    """
    sizes, models, stage = _Sizes(recipe), recipe.parallel.data_parallel_size, recipe.parallel.zero_stage
    layers, rounded = recipe.model.num_hidden_layers * sizes.layer, 0
    if recipe.parallel.device != "xla":  # weights that are only multiplied are rounded before
        rounded = sizes.matrices - sizes.table
    if stage == 3:  # the embedding forward, the head once
        times, in_products = micro_batches_per_model(recipe), layers + rounded
        others = 2 * (layers + sizes.table) - in_products
    else:
        times, in_products, others = min(stage, 1), rounded, sizes.parameters - rounded
    sent = times * (sizes.compute_bytes * in_products + sizes.param_bytes * others)
    return sent * (models - 1) // models


def sums_per_step(recipe: Recipe) -> int:
    """Return how often in a step the workers sum a gradient: from ZeRO-2 on that of each micro-batch."""
    return micro_batches_per_model(recipe) if recipe.parallel.zero_stage >= 2 else 1


def _gathers_sums(recipe: Recipe) -> bool:
    """Whether every worker gathers the gradients of all for an exact sum, because its device has no all-to-all."""
    return recipe.train.reduction == "exact" and recipe.parallel.device == "neuron"


def show_size(num_bytes: float) -> str:
    """Format a size in MiB, or in GiB from 1 GiB on."""
    return f"{num_bytes / GIB:,.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:,.2f} MiB"


def checkpoint_bytes(recipe: Recipe) -> int:
    """Return the bytes of a recipe's checkpoint: float32 master weights and both moments of every parameter."""
    return checkpoint_bytes_of(recipe.model)


def checkpoint_bytes_of(model: Model) -> int:
    """Return the bytes of a checkpoint of a model."""
    return model.num_parameters * FLOAT32_BYTES * (1 + MOMENTS_PER_PARAMETER)


def memory_copy_bytes(recipe: Recipe, num_nodes: int) -> int:
    """Return the bytes of a node's memory that copies of `checkpoint.memory_interval_steps` take: of two states, each
    on its own node and, where there is one, on the next.
    """
    return 2 * min(2, num_nodes) * checkpoint_bytes(recipe) // num_nodes


def micro_batches_per_model(recipe: Recipe) -> int:
    """Return the number of micro-batches that a model, and each of its workers, takes in a step."""
    return recipe.batch.num_micro_batches // recipe.parallel.data_parallel_size


def sums_beside_a_gradient(recipe: Recipe, micro_batches: int) -> float:
    """Return the gradient sums, of a tree or of a row, that a worker holds during its last micro-batch, in gradients of
    all its weights.
    """
    sums = micro_batches.bit_length() - 1 if recipe.train.reduction == "exact" else min(1, micro_batches - 1)
    return sums / (recipe.parallel.data_parallel_size if recipe.parallel.zero_stage >= 2 else 1)


def _activation_bytes(recipe: Recipe, sizes: _Sizes) -> tuple[int, int, int]:
    """Return the bytes kept of a layer for the backward pass, computed again in it, and of gradients in a layer.

    An element takes `a` bytes in matrix products, and `r` in the residual stream, which has the type of the weights.
    """
    a, r, s, mode = sizes.compute_bytes, sizes.param_bytes, sizes.sum_bytes, recipe.train.activation_checkpointing
    norms = 2 * (FLOAT32_BYTES + r) * sizes.stream  # a norm computes in float32
    inputs = 2 if a == r else 5  # each of five products casts the input that two or three of them share
    queries = sizes.queries
    norms += (FLOAT32_BYTES + a) * sizes.normalised
    everything = norms + a * (inputs * sizes.sequence + 3 * queries + 2 * sizes.keys + 4 * sizes.inner + sizes.mask)
    products = a * (2 * queries + 2 * sizes.keys + 2 * sizes.inner + 2 * sizes.sequence)
    # An exact sum is computed from the parts of all workers, which the collective returns.
    scattered = sizes.sequence if recipe.train.reduction == "exact" else sizes.stream
    collectives = 2 * r * sizes.sequence + 2 * s * scattered if sizes.is_split else 0
    layer_input = r * sizes.stream
    kept = {"none": everything, "selective": layer_input + products + collectives, "full": layer_input}[mode]
    recomputed = 0 if mode == "none" else everything
    passing = 4 * r * sizes.sequence + 3 * a * sizes.inner
    if sizes.is_split and s > r:
        passing += s * sizes.sequence  # a gradient in the type in which it is summed
    return kept, recomputed, passing


def _loss_bytes(recipe: Recipe, sizes: _Sizes) -> int:
    """Return the bytes of hidden states, their gradient, float32 logits, and the head's gradients of all chunks.

    Where nothing is compiled, a chunk holds its logits three times more, and once in the type of products.
    """
    hidden = 2 * sizes.param_bytes * sizes.sequence
    if sizes.is_split:
        return hidden + sizes.compute_bytes * sizes.sequence + FLOAT32_BYTES * (2 * sizes.table + 5 * sizes.logits)
    if recipe.compile.enabled:
        return hidden + FLOAT32_BYTES * (sizes.table + sizes.logits)
    tokens = recipe.batch.micro_batch_size * recipe.corpus.sequence_length
    chunk = sizes.logits // tokens * min(recipe.batch.loss_chunk_tokens, tokens)
    return (
        hidden + (FLOAT32_BYTES + sizes.compute_bytes) * sizes.table + (3 * FLOAT32_BYTES + sizes.compute_bytes) * chunk
    )
