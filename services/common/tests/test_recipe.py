"""A recipe is read from its file and the command line, and checked before anything runs; nodes and batches follow."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.errors import RecipeError
from services.common.recipe.cluster import Cluster
from services.common.recipe.derived import derive
from services.common.recipe.file import load_recipe
from services.common.recipe.schema import Model, stage_nodes
from services.common.recipe.section import MAX_NAME_LENGTH
from services.common.testing.recipes import load_small, make_recipe, read_texts, write_recipe


def test_a_recipe_is_read_with_its_defaults(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)

    assert (recipe.name, recipe.optimizer.learning_rate, recipe.corpus.rows_per_shard) == ("small", 1e-2, 32_768)


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("train.max_steps", "500", 500),
        ("optimizer.learning_rate", "3e-2", 3e-2),
        ("optimizer.weight_decay", "0", 0.0),
        ("compile.enabled", "false", False),
        ("corpus.name", "other-corpus", "other-corpus"),
        ("corpus.name", '"quoted"', "quoted"),
        ("checkpoint.keep_interval_steps", "50", 50),
    ],
)
def test_an_override_beats_the_file(tmp_path: Path, key: str, text: str, expected: object) -> None:
    value = load_small(tmp_path, {key: text})
    for part in key.split("."):
        value = getattr(value, part)

    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("train.max_step", "1", "unknown key 'train.max_step'. Did you mean 'train.max_steps'?"),
        ("trian.max_steps", "1", "unknown key 'trian'. Did you mean 'train'?"),
        ("model.max_steps", "1", "unknown key 'model.max_steps'. Did you mean 'train.max_steps'?"),
        ("tokenizer.train.vocab_sizes", "1", "Did you mean 'tokenizer.train.vocab_size'?"),
        ("compile.zzz", "1", "unknown key 'compile.zzz'. Known here: enabled, require_warm, trace_on, "),
        ("corpus.sources", '[{ url = "nowhere" }]', "'corpus.sources.0.url'. Did you mean 'corpus.sources.0.uri'?"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(tmp_path: Path, key: str, text: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_small(tmp_path, {key: text})

    assert message in str(caught.value)
    assert str(caught.value).startswith(f"--{key}: ")
    with pytest.raises(RecipeError, match=r"small\.toml"):  # the other problem is the file's
        load_recipe(write_recipe(tmp_path, max_step=1), read_texts({key: text}))


@pytest.mark.parametrize(
    ("key", "text"),
    [
        *(("train.max_steps", text) for text in ('"500"', "5.5", "0")),
        *(("optimizer.learning_rate", text) for text in ("inf", "nan")),
        ("compile.enabled", "1"),
        ("corpus.name", "2024"),
        ("corpus.name", "../up"),
        *((key, "n" * (MAX_NAME_LENGTH + 1)) for key in ("name", "corpus.name")),
        ("corpus.validation_fraction", "1"),
        ("train.z_loss", "-1e-4"),
        ("train.dtype", "float16"),
        ("model.preset", '["llama2-7b"]'),
        ("corpus.sources", "[]"),
        ("corpus.sources.uri", "x"),
        ("name.x", "1"),
        ("train.", "1"),
        ("tokenizer.model", "https://me:secret@example.com/a.model"),
        ("tokenizer.model", "https://example.com/a?X-Amz-Signature=0"),
    ],
)
def test_a_value_that_a_key_cannot_have_is_refused_with_the_key(tmp_path: Path, key: str, text: str) -> None:
    with pytest.raises(RecipeError, match=key.removesuffix(".x")):
        load_small(tmp_path, {key: text})


XLA = {"parallel.device": "xla", "train.reduction": "fast"}
INSTANCE = "cluster.trainer_instance_type"
BRANCH = '{ run = "small-01234567", step = 5 }'
EIGHT = {
    "parallel.tensor_parallel_size": "8",
    "model.hidden_size": "96",
    "model.intermediate_size": "96",
    "model.num_attention_heads": "8",
    "model.num_key_value_heads": "2",
    "model.vocab_size": "301",  # padded
    "tokenizer.train.vocab_size": "301",
}


@pytest.mark.parametrize(
    ("overrides", "both"),
    [
        ({"batch.global_batch_size": "7"}, "global_batch_size 7 .* micro_batch_size 2"),
        ({"parallel.data_parallel_size": "3"}, "4 micro-batches per step .* parallel.data_parallel_size 3"),
        ({"batch.global_batch_size": "12", "parallel.data_parallel_size": "3"}, "6 micro-batches .* a power of two"),
        ({"parallel.device": "xla"}, "'xla' needs .*train.reduction = 'fast'"),
        (XLA | {"cluster.min_nodes": "1"}, "cluster.min_nodes 1 .* parallel.device 'xla'"),
        (
            {"parallel.device": "neuron", "parallel.tensor_parallel_size": "2", "cluster.min_nodes": "1"},
            "cluster.min_nodes 1 .* parallel.device 'neuron'",
        ),
        (XLA | {INSTANCE: "trn2.48xlarge"}, "trn2.48xlarge, .* 'neuron'"),
        ({"parallel.device": "cuda", INSTANCE: "trn2.48xlarge"}, "'cuda' .* trn2.48xlarge"),
        ({"parallel.device": "neuron", INSTANCE: "p5.48xlarge"}, "'neuron' .* p5.48xlarge"),
        (XLA | {INSTANCE: "p5.48xlarge"}, "'xla' .* p5.48xlarge"),
        (
            {"parallel.data_parallel_size": "4", "cluster.trainer_workers_per_node": "3"},
            "the 4 workers .* cluster.trainer_workers_per_node 3",
        ),
        ({"model.padded_vocab_size": "299"}, "padded_vocab_size 299 .* vocab_size 300"),
        ({"tokenizer.train.vocab_size": "301"}, "tokenizer.train.vocab_size 301 and model.vocab_size 300"),
        ({"optimizer.min_learning_rate": "1"}, "min_learning_rate 1.0 .* learning_rate 0.01"),
        ({"optimizer.warmup_steps": "20"}, "warmup_steps 20 .* decay_steps 20"),
        ({"optimizer.schedule": "wsd"}, "'wsd' needs cooldown_steps"),
        ({"optimizer.cooldown_steps": "5"}, "'cosine' has no cooldown_steps, got 5"),
        ({"optimizer.schedule": "constant"}, "'constant' has no decay_steps, got 20"),
        (
            {"optimizer.schedule": "wsd", "optimizer.cooldown_steps": "19"},
            "warmup_steps 2 and cooldown_steps 19 .* decay_steps 20",
        ),
        ({"train.branch": BRANCH, "train.initial_weights": "0" * 64}, "train.branch .* train.initial_weights"),
        ({"train.branch": BRANCH, "train.max_steps": "5"}, "train.branch.step 5 .* train.max_steps 5"),
        ({"optimizer.warmup_begin_step": "5"}, "optimizer.warmup_begin_step 5"),
        ({"tokenizer.model": "a.model"}, "tokenizer.model"),
        ({"model.num_attention_heads": "3"}, "hidden_size 16 .* num_attention_heads 3"),
        (
            {"model.num_attention_heads": "4", "model.num_key_value_heads": "3"},
            "num_attention_heads 4 .* num_key_value_heads 3",
        ),
        ({"model.head_dim": "7"}, "head_dim 7"),
        ({"train.param_dtype": "bfloat16"}, "train.param_dtype 'bfloat16' .* 'float32'"),
        ({"parallel.reduce_dtype": "bfloat16"}, "parallel.reduce_dtype 'bfloat16' .* 'float32'"),
        ({"compile.flags": '["--model-type transformer"]'}, "'--model-type transformer'"),
        ({"compile.flags": '["O1"]'}, "'O1'"),
        ({"compile.flags": '["--target=trn1"]'}, "--target"),
        ({"compile.flags": '["--cache_dir=/tmp"]'}, "--cache_dir"),
        ({"model.preset": "llama9"}, "'llama9'; .*llama2-7b"),
        (EIGHT | {"model.num_attention_heads": "4"}, "model.num_attention_heads 4 .* parallel.tensor_parallel_size 8"),
        (EIGHT | {"corpus.sequence_length": "12"}, "corpus.sequence_length 12 .* parallel.tensor_parallel_size 8"),
        (EIGHT | {"model.num_attention_heads": "24", "model.num_key_value_heads": "3"}, "model.num_key_value_heads 3"),
    ],
)
def test_sections_that_disagree_are_refused_with_both_values(
    tmp_path: Path, overrides: dict[str, str], both: str
) -> None:
    with pytest.raises(RecipeError, match=both):
        load_small(tmp_path, overrides)


def test_sections_that_agree_are_accepted(tmp_path: Path) -> None:
    """Tensor parallel workers take equal parts; the fast reduction takes any number of micro-batches."""
    fast = {"batch.global_batch_size": "12", "parallel.data_parallel_size": "3", "train.reduction": "fast"}

    assert load_small(tmp_path, EIGHT).parallel.num_workers == 8
    assert load_small(tmp_path, fast).batch.num_micro_batches == 6


@pytest.mark.parametrize("content", [b"name = ", b"name = '\xff'", b"", None])
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "bad.toml"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(RecipeError, match=r"bad\.toml"):
        load_recipe(path)


# The published sizes, of these repositories' config.json: meta-llama/Llama-2-7b-hf, -13b-hf, Meta-Llama-3-8B, 3.1-8B,
# Qwen/Qwen3-0.6B-Base, -1.7B-Base, -4B-Base, -8B-Base; a tied head counts once.
@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
        ("llama3-8b", 8_030_261_248),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
    ],
)
def test_a_preset_has_the_published_number_of_parameters(preset: str, parameters: int) -> None:
    assert Model.model_validate({"preset": preset}).num_parameters == parameters


def test_a_key_beside_a_preset_overrides_it() -> None:
    model = Model.model_validate({"preset": "llama2-7b", "num_hidden_layers": 2})

    assert (model.num_hidden_layers, model.hidden_size) == (2, 4096)


def test_a_recipe_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    plain = write_recipe(tmp_path)
    marked = tmp_path / "marked.toml"
    marked.write_text(plain.read_text(encoding="utf-8"), encoding="utf-8-sig")
    assert load_recipe(marked) == load_recipe(plain)


def test_derived_numbers_follow_from_the_recipe(tmp_path: Path) -> None:
    rows = derive(make_recipe(tmp_path, parallel__data_parallel_size="2"), None)

    assert rows["tokens per step"] == "128"
    assert rows["tokens in max_steps"] == "2,560"
    assert rows["micro-batches per step"] == "4 (2 per worker)"


@pytest.mark.parametrize(
    ("evaluation_tokens", "expected"),
    [
        ("0", "none"),
        ("590", "592 tokens every 10 steps, 13.4% of all operations"),  # rows of 16; 1,280 trained tokens in 10 steps
    ],
)
def test_a_dry_run_shows_the_share_of_evaluations(tmp_path: Path, evaluation_tokens: str, expected: str) -> None:
    changed = {"train__evaluation_tokens": evaluation_tokens, "train__evaluation_interval_steps": "10"}

    assert derive(make_recipe(tmp_path, **changed), None)["evaluation"] == expected


@pytest.mark.parametrize(
    ("overrides", "numbers"),
    [
        ({}, ()),
        ({"train.max_steps": "30"}, ("30", "20", "last 10 steps", "0.001")),
        ({"train.max_steps": "30", "optimizer.min_learning_rate": "0"}, ("last 10 steps", "change no weight")),
        ({"train.max_steps": "15"}, ("15", "20", "5 steps before", "0.001")),
    ],
)
def test_a_run_that_does_not_end_with_its_schedule_is_warned_of(
    tmp_path: Path, overrides: dict[str, str], numbers: tuple[str, ...]
) -> None:
    warning = derive(load_small(tmp_path, overrides), None).get("warning, schedule", "")

    assert bool(warning) == bool(numbers)
    assert all(number in warning for number in numbers)


@pytest.mark.parametrize(("workers_per_node", "nodes"), [("1", 4), ("2", 2), ("4", 1)])
def test_the_trainers_nodes_follow_from_its_workers(tmp_path: Path, workers_per_node: str, nodes: int) -> None:
    workers = {"parallel.data_parallel_size": "4", "cluster.trainer_workers_per_node": workers_per_node}
    recipe = load_small(tmp_path, workers)

    assert stage_nodes(recipe, "trainer") == nodes
    assert derive(recipe, None)["nodes on a cluster"] == f"tokenizer 1, compiler 1, trainer {nodes}"


def test_the_compilers_nodes_are_said_or_follow_from_its_tasks(tmp_path: Path) -> None:
    tasks = {"compile.num_workers": "8", "parallel.device": "xla", "train.reduction": "fast"}
    said = load_small(tmp_path, tasks | {"cluster.compiler_nodes": "1"})

    assert "as many as 8 tasks" in derive(load_small(tmp_path, tasks), None)["nodes on a cluster"]
    assert "compiler 1," in derive(said, None)["nodes on a cluster"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, ()),
        ({"cluster.min_nodes": "1"}, (4, 2, 1)),
        ({"cluster.min_nodes": "3"}, (4,)),
        ({"cluster.min_nodes": "8"}, ()),
        ({"cluster.min_nodes": "1", "cluster.trainer_workers_per_node": "4"}, (1,)),
        ({"cluster.min_nodes": "1", "batch.global_batch_size": "24", "train.reduction": "fast"}, (6, 4, 3, 2, 1)),
    ],
)
def test_a_gang_that_lost_a_node_goes_on_with_as_many_as_share_the_batch(
    tmp_path: Path, overrides: dict[str, str], expected: tuple[int, ...]
) -> None:
    eight = {"batch.micro_batch_size": "2", "batch.global_batch_size": "16", "parallel.data_parallel_size": "8"}
    if overrides.get("train.reduction") == "fast":
        eight |= {"parallel.data_parallel_size": "12"}

    recipe = load_small(tmp_path, eight | overrides)
    workers, micro_batches = recipe.parallel.data_parallel_size, recipe.batch.num_micro_batches

    assert recipe.cluster.fewer_nodes(workers, 1, micro_batches) == expected


def test_a_gang_of_split_models_goes_on_with_whole_ones(tmp_path: Path) -> None:
    cluster = Cluster(trainer_workers_per_node=2, min_nodes=1)

    assert cluster.fewer_nodes(num_workers=16, tensor_parallel_size=4, num_micro_batches=8) == (4, 2)
    assert cluster.fewer_nodes(num_workers=16, tensor_parallel_size=1, num_micro_batches=8) == (4, 2, 1)
