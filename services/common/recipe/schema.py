"""One TOML file describes a run; this module is its type.

Every field states its unit and legal range. Fields that decide the bytes of an artifact carry an
`Identity` mark naming that artifact's kind: `identity(recipe, kind)` collects them, and ids are hashes
of what it returns. A field without a mark (worker counts, intervals, logging) may change freely.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from services.common.hardware.instance_types import TRN1, Accelerators, family_of, read_instance_types
from services.common.input.credentials import require_no_credentials
from services.common.recipe.presets import MODEL_PRESETS

Kind = Literal["corpus", "compile_cache", "checkpoint"]
Stage = Literal["tokenizer", "compiler", "trainer"]
Device = Literal["cpu", "cuda", "neuron", "xla"]
ActivationCheckpointing = Literal["none", "selective", "full"]
STAGES: tuple[Stage, ...] = ("tokenizer", "compiler", "trainer")
ACCELERATORS: dict[Device, Accelerators] = {"cuda": "GPUs", "neuron": "NeuronCores", "xla": "NeuronCores"}
"""Kind of accelerator that each device of a recipe is; a CPU is none."""


@dataclass(frozen=True)
class Identity:
    """Marks a recipe field as part of what artifacts of these kinds are made from."""

    kinds: tuple[Kind, ...]
    is_added: bool = False
    """The field is newer than artifacts that are kept: at its default it is left out, so that they keep their ids."""


@dataclass(frozen=True)
class Constant:
    """Marks a field that was part of the identity of these kinds while it had one legal value: artifacts keep their ids
    by that value."""

    kinds: tuple[Kind, ...]
    value: Any


CORPUS = Identity(("corpus",))
TRACED = Identity(("compile_cache", "checkpoint"))  # a constant of the compiled graphs, and of the weights
TRACED_ADDED = Identity(TRACED.kinds, is_added=True)  # runs from before the field keep their ids
TRAINED = Identity(("checkpoint",))
COMPILED = Identity(("compile_cache",))

MAX_NAME_LENGTH = 128
"""File systems take names of 255 bytes; hashes, endings and writers' tokens are added to a name."""

MAX_ENTRIES = 10_000
"""Entries of a list, such as the sources of a corpus: a folder, or a glob, is one for any number of files. To tell what
is wrong with a million would take gigabytes."""
MAX_ADDRESS_CHARACTERS = 8_000
"""Characters of the address of a source or of a vocabulary. Paths of Linux end at 4,096 bytes."""

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=MAX_NAME_LENGTH)]
Positive = Annotated[int, Field(gt=0)]

_FLAGS_OF_THE_STAGE = ("--framework", "--output", "-o", "--target")
_FLAGS_OF_THE_CACHE = ("--cache_dir", "--no_cache", "--retry_failed_compilation", "--log_level")


def _require_compiler_flag(flag: str) -> str:
    """One flag of neuronx-cc, as one argument: nothing splits it or expands it."""
    name = flag.partition("=")[0]
    if not flag.startswith("-") or not flag.isprintable() or any(character.isspace() for character in flag):
        raise ValueError(f"{flag!r} is no flag: write each as one text with its value, as in '--optlevel=2'")
    if name in _FLAGS_OF_THE_STAGE:
        raise ValueError(f"{name} is the compiler stage's to set")
    if name in _FLAGS_OF_THE_CACHE:
        raise ValueError(f"{name} is for libneuronxla and no flag of neuronx-cc: the stages keep the cache themselves")
    return flag


CompilerFlag = Annotated[str, AfterValidator(_require_compiler_flag)]


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,  # it may hold what is refused
    )

    @model_validator(mode="before")
    @classmethod
    def _has_short_lists(cls, fields: Any) -> Any:
        for name, value in fields.items() if isinstance(fields, dict) else ():
            if isinstance(value, (list, tuple)) and len(value) > MAX_ENTRIES:
                raise ValueError(f"{name}: {len(value):,} entries, expected at most {MAX_ENTRIES:,}")
        return fields

    @field_validator("*")
    @classmethod
    def _fits_the_machine(cls, value: Any) -> Any:
        """Integers of 64 bits, as TOML has them and arithmetic with floats stays finite; text that can be a path, and
        that everybody may read who reads what is made by it.
        """
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError("an integer of more than 64 bits")
        if isinstance(value, str) and "\0" in value:
            raise ValueError(f"{value[:80]!r} has a NUL character, which no path and no name can have")
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, str):
                require_no_credentials(each, "the value")
        return value


class Source(Section):
    """Where documents come from, in the order in which they enter the corpus."""

    uri: Annotated[str, Field(max_length=MAX_ADDRESS_CHARACTERS)]
    """`pydoc://` (the documentation that ships with CPython), a local or fsspec path, folder or glob, or
    `datasets://NAME`, a data set on the Hugging Face hub or in a folder.

    An address with a user, a password, or a parameter that may be a secret is refused, because recipes are stored and
    shown: credentials belong into `~/.netrc`, the hub's token (`HF_TOKEN`) and AWS's credential chain. Of web addresses
    every parameter is refused that is not known to be harmless, such as `download` or `version`; an `@` in the path of
    an address with a port is written as `%40`.
    """
    format: Literal["auto", "text", "jsonl", "parquet", "arrow", "wikicorpus"] = "auto"
    """`auto` goes by the file name's ending; `text` makes each file one document; `wikicorpus` is the format of the
    original `raw.en.tgz`.
    """
    column: str = "text"
    """The jsonl key, or the parquet or arrow column, that holds the document."""
    revision: str | None = None
    """Of a repository on the Hugging Face hub: a commit, or a branch that `make pin` turns into one."""
    subset: str | None = None
    """Of `datasets://`: the configuration's name."""
    split: str = "train"
    """Of `datasets://`."""
    weight: Annotated[float, Field(gt=0, le=100)] = 1.0
    """How often each document enters the corpus, on average: 0.25 takes a quarter, chosen by the documents' hashes, and
    2.5 takes every document twice and half of them once more.
    """

    @model_validator(mode="after")
    def _keys_fit_the_uri(self) -> Self:
        is_dataset = self.uri.startswith("datasets://")
        if self.subset is not None and not is_dataset:
            raise ValueError(f"subset is a key of datasets:// sources, and this one is {self.uri}")
        if self.revision is not None and not (is_dataset or self.uri.startswith("hf://")):
            raise ValueError(f"revision is a key of hf:// and datasets:// sources, and this one is {self.uri}")
        return self


class Corpus(Section):
    name: Name
    sources: Annotated[tuple[Source, ...], Field(min_length=1, strict=False), CORPUS]
    sequence_length: Annotated[int, Field(ge=8, le=1_048_576), Identity(("corpus", "compile_cache", "checkpoint"))]
    """Tokens in a row of the corpus, and in a training sequence."""
    rows_per_shard: Annotated[Positive, CORPUS] = 32_768
    validation_fraction: Annotated[float, Field(ge=0, lt=1), CORPUS] = 0.01
    """Share of the documents, chosen by their hash, that training never sees."""
    min_document_bytes: Annotated[int, Field(ge=0), CORPUS] = 0
    """Shorter documents are dropped and counted."""
    invalid_utf8: Annotated[Literal["replace", "reject"], CORPUS] = "replace"
    """`replace` puts U+FFFD where bytes are not UTF-8 and counts the documents; `reject` stops."""
    control_text: Annotated[Literal["text"], CORPUS] = "text"
    """What `</s>` typed in a document becomes: `text` is the tokens of its characters, never the special token."""
    max_document_bytes: Positive = 128 * 2**20
    """Bytes of the largest document. A longer one, or a longer line that would hold it, ends the stage (exit code 3)
    once so much of it was read: nothing is dropped, and no file takes memory without a limit. The longest books and
    source files in known corpora have some 10 MB; a worker takes less than 1 GB for documents of 64 MB.
    """
    split_bytes: Positive = 64 * 2**20
    """Input bytes that one encode task reads. Changes the number of tasks, never the corpus."""


class VocabularyTraining(Section):
    """SentencePiece BPE with Llama 2's settings: byte fallback, split digits, identity normalisation."""

    vocab_size: Annotated[int, Field(ge=300, le=1_000_000)]
    max_bytes: Positive = 256 * 2**20
    """Text read for training, from the first document on."""


class Tokenizer(Section):
    model: Annotated[str | None, Field(max_length=MAX_ADDRESS_CHARACTERS), CORPUS] = None
    """Path, or an address without credentials, of a SentencePiece model, a `tokenizer.json` or a tiktoken file. When
    absent, `train` makes a model.
    """
    train: Annotated[VocabularyTraining | None, CORPUS] = None
    bos_token: Annotated[str | None, CORPUS] = None
    """Of a `tokenizer.json`: the special token before each document. Known for Llama 2 and 3."""
    eos_token: Annotated[str | None, CORPUS] = None
    """Of a `tokenizer.json`: the special token after each document. Known for Llama 2 and 3."""
    encoder: Literal["auto", "reference"] = "auto"
    """`auto` takes the fastest that gives the reference's ids; `reference` is the library that defines them."""
    num_workers: Positive = 1
    """Encode tasks that run at the same time."""

    @model_validator(mode="after")
    def _has_one_vocabulary(self) -> Self:
        if (self.model is None) == (self.train is None):
            raise ValueError("give exactly one of tokenizer.model (a path) and [tokenizer.train] (how to make one)")
        return self


class RopeScaling(Section):
    """Llama 3.1's frequency scaling (arXiv 2407.21783; transformers' `rope_type = "llama3"`)."""

    factor: Annotated[float, Field(ge=1)]
    low_freq_factor: Annotated[float, Field(gt=0)]
    high_freq_factor: Annotated[float, Field(gt=0)]
    original_max_position_embeddings: Positive


class Model(Section):
    """A Llama. Field names are those of a Hugging Face `config.json`."""

    preset: str | None = None
    """A named size whose values the other keys of this section override."""
    vocab_size: Annotated[int, Field(ge=2)]
    hidden_size: Positive
    intermediate_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    initializer_range: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of the initial weights."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(values.get("preset"), str):
            return values
        preset = values["preset"]
        if preset not in MODEL_PRESETS:
            raise ValueError(f"unknown preset {preset!r}; known: {', '.join(MODEL_PRESETS)}")
        return {**MODEL_PRESETS[preset], **values}

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} must be an even multiple of num_attention_heads "
                f"{self.num_attention_heads}: rotary embedding pairs the dimensions of a head"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} must be a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        return self

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def num_parameters(self) -> int:
        attention = 2 * self.hidden_size * self.hidden_size
        attention += 2 * self.hidden_size * self.num_key_value_heads * self.head_dim
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_hidden_layers * layer + self.hidden_size


class Parallel(Section):
    data_parallel_size: Positive = 1
    """Models, each of `tensor_parallel_size` workers, that each process a part of the global batch."""
    tensor_parallel_size: Annotated[Positive, COMPILED, Constant(("checkpoint",), 1)] = 1
    """Workers that share one model: each has a part of every matrix, and of the sequence between the layers."""
    reduce_dtype: Annotated[Literal["float32", "bfloat16"], TRACED_ADDED] = "float32"
    """Type in which the workers of a model sum activations and their gradients; the result has the activations' type.
    `bfloat16` needs train.dtype `bfloat16` and sends half the bytes of these sums, which then round at each addition.
    Sums of gradients of weights are float32 always."""
    zero_stage: Literal[0, 1] = 0
    """1: each data-parallel worker holds and updates a share of the optimizer's state, with the same bits (ZeRO-1)."""
    threads_per_worker: Annotated[Positive, COMPILED] = 1
    """CPU threads of a worker. Compiled loops are cut for this number, so it is declared and never detected."""
    device: Annotated[Device, Identity(("compile_cache",), is_added=True)] = "cpu"
    """Where a worker computes, each on a device of its own. `xla` is a NeuronCore of trn1 by torch_xla, `neuron` one of
    trn2 by TorchNeuron, operation by operation. `cuda` is an NVIDIA GPU. `cuda` and `neuron` are written by their
    documentation and have not run."""

    @property
    def num_workers(self) -> int:
        return self.data_parallel_size * self.tensor_parallel_size


class Batch(Section):
    micro_batch_size: Annotated[Positive, TRACED]
    """Sequences in one forward and backward pass."""
    global_batch_size: Annotated[Positive, TRAINED]
    """Sequences in one optimizer step, over all workers."""
    loss_chunk_tokens: Annotated[Positive, TRACED] = 256
    """Tokens whose logits exist at once: the full float32 logits are the largest tensor of a small model."""

    @property
    def num_micro_batches(self) -> int:
        return self.global_batch_size // self.micro_batch_size


class Optimizer(Section):
    """AdamW (arXiv 1711.05101), linear warm-up, then cosine decay to `min_learning_rate`."""

    learning_rate: Annotated[float, Field(gt=0), TRAINED]
    min_learning_rate: Annotated[float, Field(ge=0), TRAINED]
    warmup_steps: Annotated[int, Field(ge=0), TRAINED]
    decay_steps: Annotated[Positive, TRAINED]
    """Step at which the rate reaches its minimum. Independent of train.max_steps, so a run can be made longer."""
    beta1: Annotated[float, Field(ge=0, lt=1), TRACED] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1), TRACED] = 0.95
    epsilon: Annotated[float, Field(gt=0), TRACED] = 1e-8
    weight_decay: Annotated[float, Field(ge=0), TRACED] = 0.1
    """Applied to matrices, not to norm weights."""
    max_grad_norm: Annotated[float, Field(gt=0), TRACED] = 1.0


class Compile(Section):
    enabled: Annotated[bool, TRAINED] = True
    require_warm: bool = False
    """Make the trainer stop (exit 4) as soon as a graph is not in the cache, instead of compiling it."""
    trace_on: Literal["device", "cpu"] = "device"
    """Where Neuron graphs are traced: on a node that has the device, or on any, where both give the same graphs."""
    flags: Annotated[tuple[CompilerFlag, ...], Field(strict=False), Identity(("compile_cache",), is_added=True)] = ()
    """Of neuronx-cc, in their order, such as "--model-type=transformer". Its target follows from the instance type."""
    num_workers: Positive = 5
    """Graphs that are compiled for Neuron at the same time, each by a task of its own. By default as many as a run has:
    the nodes are paid for until the last graph is compiled."""
    task_cpus: Annotated[int, Field(ge=1, le=1024)] = 8
    """CPUs that a task takes of its node."""
    task_memory_gib: Annotated[float, Field(gt=0, le=16_384)] = 32.0
    """GiB of memory that a task takes of its node, at first: one that is killed for memory is given twice as much."""
    task_timeout_seconds: Annotated[float, Field(gt=0)] = 7_200.0
    """A task that takes longer is ended, and its graph has failed. Large graphs have been seen to take an hour."""
    task_attempts: Annotated[int, Field(ge=1, le=20)] = 3
    """Tasks for one graph, at most: those that were killed, lost or ended with 70 are followed by another."""


class Train(Section):
    max_steps: Positive
    seed: Annotated[int, Field(ge=0, lt=2**63), TRAINED] = 0
    initial_weights: Annotated[
        Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None, Identity(("checkpoint",), is_added=True)
    ] = None
    """Digest of the weights that the run begins with, as the trainer's `import` prints it; when absent, drawn ones."""
    dtype: Annotated[Literal["float32", "bfloat16"], TRACED] = "float32"
    """Arithmetic of matrix products. Master weights, moments and reductions are float32 always."""
    param_dtype: Annotated[Literal["float32", "bfloat16"], TRACED_ADDED] = "float32"
    """Type of all weights in the model, of norms too, of a micro-batch's gradients, and of activations between layers.
    `bfloat16` needs dtype `bfloat16`: the optimizer then holds float32 masters, and each update ends with the model's
    weights rounded from them."""
    attention_mask: Annotated[Literal["causal", "block_causal"], TRACED_ADDED] = "causal"
    """What a token attends to: all tokens before it in its row, or (`block_causal`) those of its document alone, with
    positions that begin again at each document. Either way a document's last token predicts the next one's first."""
    z_loss: Annotated[float, Field(ge=0), TRACED_ADDED] = 0.0
    """Coefficient of log(Z)^2, the mean over tokens, in what is differentiated (PaLM, arXiv 2204.02311, has 1e-4). The
    losses that are reported, of training and evaluation, are cross-entropy alone. 0 leaves it out."""
    activation_checkpointing: Annotated[ActivationCheckpointing, COMPILED] = "none"
    """What of a layer's forward pass the backward pass computes again instead of keeping it: nothing; all but matrix
    products and attention (`selective`); or all (`full`). The bits are the same; on `xla` the compiler fuses, and so
    rounds, otherwise."""
    reduction: Annotated[Literal["exact", "fast"], TRAINED] = "exact"
    """`exact` sums micro-batches in one fixed binary tree, so any number of workers gives the same bits; `fast` sums a
    worker's in a row, and leaves the rest to the library. Of m micro-batches a worker's tree holds log2(m) sums of the
    gradient, and a row one."""
    evaluation_interval_steps: Positive = 100
    evaluation_batches: Annotated[int, Field(ge=0)] = 8
    """Micro-batches of the validation split in one evaluation; 0 switches evaluation off."""
    time_limit_seconds: Annotated[float, Field(gt=0)] | None = None
    """Stop with a committed checkpoint and exit 75 once a run command has taken this long."""
    max_consecutive_skipped_steps: Annotated[int, Field(ge=0)] = 10
    """A step whose gradient is not finite updates nothing. More of them in a row end the run, with exit 2."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """Times that lost workers are started again within one command, since its newest checkpoint."""
    watchdog_factor: Annotated[float, Field(ge=0)] = 10.0
    """A worker whose step takes longer than this many median steps writes the stacks of its threads and ends, and with
    it the group, which starts again. 0 switches it off."""
    watchdog_min_seconds: Annotated[float, Field(gt=0, le=86_400)] = 120.0
    """No step is ended before it has taken this long. Collectives end a minute after twice the limit."""
    loss_spike_sigma: Annotated[float, Field(ge=0), Identity(("checkpoint",), is_added=True)] = 0.0
    """A loss that exceeds the mean of the last ones by more than this many standard deviations is a spike: the run goes
    back to its newest checkpoint and leaves the batch out. 0 lets every loss pass; OLMo has 6."""
    loss_spike_window: Annotated[int, Field(ge=2, le=1_000), Identity(("checkpoint",), is_added=True)] = 128
    """Losses that the next one is compared with. Until there are as many, every loss passes."""

    @model_validator(mode="after")
    def _weights_are_as_wide_as_products(self) -> Self:
        if self.param_dtype == "bfloat16" and self.dtype != "bfloat16":
            raise ValueError(
                f"train.param_dtype 'bfloat16' needs train.dtype 'bfloat16', got {self.dtype!r}: products of rounded "
                f"weights gain nothing from float32"
            )
        return self


class Checkpoint(Section):
    interval_steps: Positive = 100
    keep_latest: Annotated[int, Field(ge=2)] = 2
    """Newest checkpoints kept. At least 2: the newest may turn out to be damaged."""
    keep_interval_steps: Positive | None = None
    """Checkpoints whose step is a multiple of this are kept for good."""


class Cluster(Section):
    """Where the stages run on a cluster: a node is a pod, and a node of Ray. Nothing of it matters on one machine."""

    tokenizer_nodes: Positive = 1
    """Nodes that share the tokenizer's tasks."""
    compiler_nodes: Positive = 1
    """Nodes of the compiler stage; when absent, one, or for Neuron as many as `compile.num_workers` tasks fill."""
    trainer_workers_per_node: Positive = 1
    """Of the data_parallel_size x tensor_parallel_size workers, those that share a node. The trainer's nodes follow."""
    trainer_instance_type: str | None = None
    """EC2 type of the trainer's nodes, with NeuronCores or GPUs, whose memory, peak and price `plan` goes by; when
    absent, it goes without."""
    min_nodes: Positive | None = None
    """The trainer goes on with as few when nodes are lost and none takes their place; when absent, it waits for all."""

    @field_validator("trainer_instance_type")
    @classmethod
    def _is_a_known_instance_type(cls, value: str | None) -> str | None:
        if value is not None and value not in read_instance_types():
            raise ValueError(f"unknown instance type {value!r}; known: {', '.join(read_instance_types())}")
        return value

    @property
    def has_compiler_nodes(self) -> bool:
        """Does the recipe say how many?"""
        return "compiler_nodes" in self.model_fields_set

    def fewer_nodes(self, num_workers: int, tensor_parallel_size: int, num_micro_batches: int) -> tuple[int, ...]:
        """Numbers of nodes with which the trainer may go on after a loss, largest first; none without `min_nodes`.

        With each, there are whole models, which all have as many micro-batches. Under `train.reduction = "exact"` the
        bits stay the same.
        """
        if self.min_nodes is None:
            return ()

        def shares_evenly(nodes: int) -> bool:
            models, rest = divmod(nodes * self.trainer_workers_per_node, tensor_parallel_size)
            return models > 0 and rest == 0 and num_micro_batches % models == 0

        candidates = range(self.nodes_of("trainer", num_workers) - 1, self.min_nodes - 1, -1)
        return tuple(filter(shares_evenly, candidates))

    def nodes_of(self, stage: Stage, num_workers: int) -> int:
        """Nodes of the stage's group; `num_workers` are the trainer's."""
        return {
            "tokenizer": self.tokenizer_nodes,
            "compiler": self.compiler_nodes,
            "trainer": num_workers // self.trainer_workers_per_node,
        }[stage]


class Recipe(Section):
    name: Name
    corpus: Corpus
    tokenizer: Tokenizer
    model: Annotated[Model, TRACED]
    parallel: Parallel = Parallel()
    batch: Batch
    optimizer: Optimizer
    compile: Compile = Compile()
    train: Train
    checkpoint: Checkpoint = Checkpoint()
    cluster: Cluster = Cluster()

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        batch, models, workers = self.batch, self.parallel.data_parallel_size, self.parallel.num_workers
        if batch.global_batch_size % batch.micro_batch_size:
            raise ValueError(
                f"batch.global_batch_size {batch.global_batch_size} must be a multiple of "
                f"batch.micro_batch_size {batch.micro_batch_size}"
            )
        if batch.num_micro_batches % models:
            raise ValueError(
                f"{batch.num_micro_batches} micro-batches per step (batch.global_batch_size / batch.micro_batch_size) "
                f"cannot be shared by parallel.data_parallel_size {models}"
            )
        if self.parallel.device == "xla" and not (self.compile.enabled and self.train.reduction == "fast"):
            raise ValueError(
                f"parallel.device 'xla' needs compile.enabled = true and train.reduction = 'fast', got "
                f"{self.compile.enabled} and {self.train.reduction!r}: torch_xla runs compiled graphs alone, and the "
                f"tree of exact sums is another graph for each micro-batch"
            )
        self._require_accelerators()
        if self.parallel.reduce_dtype == "bfloat16" and self.train.dtype != "bfloat16":
            raise ValueError(
                f"parallel.reduce_dtype 'bfloat16' needs train.dtype 'bfloat16', got {self.train.dtype!r}: activations "
                f"are summed in no narrower type than their own"
            )
        family = family_of(self.cluster.trainer_instance_type)
        if self.parallel.device == "xla" and not family.startswith(TRN1):
            raise ValueError(
                f"parallel.device 'xla' is a NeuronCore of trn1, and cluster.trainer_instance_type is "
                f"{self.cluster.trainer_instance_type}, whose cores take 'neuron'"
            )
        if self.parallel.device == "xla" and self.cluster.min_nodes is not None:
            raise ValueError(
                f"cluster.min_nodes {self.cluster.min_nodes} cannot be with parallel.device 'xla': its graphs list the "
                f"workers that sum together, so a run with fewer needs a compile cache of its own"
            )
        if workers % self.cluster.trainer_workers_per_node:
            raise ValueError(
                f"the {workers} workers (parallel.data_parallel_size {models} x parallel.tensor_parallel_size "
                f"{workers // models}) must be a multiple of cluster.trainer_workers_per_node "
                f"{self.cluster.trainer_workers_per_node}: every node has as many workers. Change one of them, "
                f"for example --cluster.trainer_workers_per_node=1"
            )
        self._require_equal_parts()
        if self.train.reduction == "exact" and batch.num_micro_batches & (batch.num_micro_batches - 1):
            raise ValueError(
                f"train.reduction = 'exact' sums micro-batches in a binary tree and needs a power of two of them, "
                f"got {batch.num_micro_batches} (batch.global_batch_size / batch.micro_batch_size)"
            )
        trained = self.tokenizer.train
        if trained and trained.vocab_size != self.model.vocab_size:
            raise ValueError(
                f"tokenizer.train.vocab_size {trained.vocab_size} and model.vocab_size {self.model.vocab_size} differ"
            )
        if self.optimizer.min_learning_rate > self.optimizer.learning_rate:
            raise ValueError(
                f"optimizer.min_learning_rate {self.optimizer.min_learning_rate} exceeds "
                f"optimizer.learning_rate {self.optimizer.learning_rate}"
            )
        if self.optimizer.warmup_steps >= self.optimizer.decay_steps:
            raise ValueError(
                f"optimizer.warmup_steps {self.optimizer.warmup_steps} must be below "
                f"optimizer.decay_steps {self.optimizer.decay_steps}"
            )
        return self

    def _require_accelerators(self) -> None:
        """Raise `ValueError` where the trainer's nodes have no accelerators of the kind that the device is one of."""
        name, wanted = self.cluster.trainer_instance_type, ACCELERATORS.get(self.parallel.device)
        if name is None or wanted is None or read_instance_types()[name].accelerators == wanted:
            return
        fitting = [each.name for each in read_instance_types().values() if each.accelerators == wanted]
        device = "cuda" if wanted == "NeuronCores" else "neuron, or xla on trn1"
        raise ValueError(
            f"parallel.device {self.parallel.device!r} is one of a node's {wanted}, and cluster.trainer_instance_type "
            f"{name} has {read_instance_types()[name].accelerators}. Name a type with {wanted} ({', '.join(fitting)}), "
            f"or the device that {name} has ({device})"
        )

    def _require_equal_parts(self) -> None:
        """Raise `ValueError` unless tensor-parallel workers can have as much of everything."""
        model, parts = self.model, self.parallel.tensor_parallel_size
        shared = {
            "model.num_attention_heads": model.num_attention_heads,
            "model.intermediate_size": model.intermediate_size,
            "model.vocab_size": model.vocab_size,
            "corpus.sequence_length": self.corpus.sequence_length,
        }
        heads = model.num_key_value_heads

        def possible() -> str:
            largest = math.gcd(*shared.values())
            sizes = [
                size
                for size in range(1, largest + 1)
                if largest % size == 0 and (heads % size == 0 or size % heads == 0)
            ]
            return f"Possible sizes: {', '.join(map(str, sizes))}"

        for name, size in shared.items():
            if size % parts:
                raise ValueError(
                    f"{name} {size:,} cannot be shared by parallel.tensor_parallel_size {parts}: each of its workers "
                    f"has an equal part. {possible()}"
                )
        if heads % parts and parts % heads:
            raise ValueError(
                f"model.num_key_value_heads {heads} and parallel.tensor_parallel_size {parts}: one must be a multiple "
                f"of the other, so that each worker has whole heads, or as many workers hold each head. {possible()}"
            )


def stage_nodes(recipe: Recipe, stage: Stage) -> int:
    """Nodes of the stage's group on a cluster."""
    return recipe.cluster.nodes_of(stage, recipe.parallel.num_workers)


def key_value_copies(recipe: Recipe) -> int:
    """Workers of a model that hold the same key-value head; 1 where there are no more workers than heads."""
    return max(1, recipe.parallel.tensor_parallel_size // recipe.model.num_key_value_heads)


def identity(recipe: Recipe, kind: Kind) -> dict[str, Any]:
    """The recipe's fields that decide the bytes of an artifact of this kind, by dotted name."""
    return dict(_identity_fields(recipe, kind, prefix=""))


def fingerprint(value: Any) -> str:
    """SHA-256 of a JSON value in canonical form (sorted keys, no spaces), as hex."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _identity_fields(section: BaseModel, kind: str, prefix: str) -> list[tuple[str, Any]]:
    fields: list[tuple[str, Any]] = []
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        constants = [mark.value for mark in field.metadata if isinstance(mark, Constant) and kind in mark.kinds]
        if constants:
            fields.append((prefix + name, constants[0]))
            continue
        marks = [mark for mark in field.metadata if isinstance(mark, Identity) and kind in mark.kinds]
        if any(not mark.is_added or value != field.default for mark in marks):
            # A preset is a way of writing the other fields, so it never tells two runs apart.
            plain = value.model_dump(mode="json", exclude={"preset"}) if isinstance(value, BaseModel) else value
            if isinstance(plain, tuple):
                plain = [item.model_dump(mode="json") if isinstance(item, BaseModel) else item for item in plain]
            fields.append((prefix + name, plain))
        elif isinstance(value, BaseModel):
            fields.extend(_identity_fields(value, kind, f"{prefix}{name}."))
    return fields
