"""Memory one GPU needs, by arithmetic on a preset: training and generation. The formula is in docs/memory.md.

No torch, no GPU. What is counted: weights, gradients, optimizer state, the rollout copy, activations, logits, the
key/value cache. What is not: the CUDA context, communication buffers, fragmentation; so the figure is a lower bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from p3o_launch.schema import Model, Preset
    from p3o_launch.topology import Topology

GIB = 2**30
# Float32 logits, the softmax that the backward pass reads, and the gradient.
LOGITS_COPIES = 3
# Bytes of optimizer state per parameter: Adam's two moments, and the float32 master copy of a 16-bit parameter.
_ADAM = {2: 12, 4: 8, 8: 16}
# Tokens that the megatron engine caches at once: see CACHE_TOKENS in runtime/mcore/engine.py.
CACHE_TOKENS = 131_072


@dataclass(frozen=True, slots=True)
class Bar:
    """What one phase needs on the fullest GPU: (part, bytes)."""

    name: str
    parts: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        return sum(size for _, size in self.parts)


def parameter_bytes(preset: Preset) -> int:
    """Width of one parameter and activation [bytes]."""
    precision = preset.precision
    if precision.bf16 or precision.fp16:
        return 2
    return 8 if precision.params_dtype == "float64" else 4


def stage_parameters(preset: Preset) -> int:
    """Parameters of one rank on the fullest pipeline stage."""
    model, parallel = preset.model, preset.parallel
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    embedding = -(-model.vocab_size // tp) * model.hidden_size
    layers = _fullest_stage(preset) * layer_parameters(preset)
    untied = model.untie_embeddings_and_output_weights
    # Tied weights still lie on the first and on the last stage when these are two.
    ends = embedding * (2 if untied and pp == 1 else 1)
    return layers + ends + model.hidden_size


def _fullest_stage(preset: Preset) -> int:
    parallel, layers = preset.parallel, preset.model.num_layers
    pp = parallel.pipeline_model_parallel_size
    ends = [parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers]
    given = [size for size in ends if size is not None]
    if pp == 1 or not given:
        return -(-layers // pp)
    between = max(1, pp - len(given))
    return max(*given, -(-max(0, layers - sum(given)) // between))


def layer_parameters(preset: Preset) -> int:
    """Parameters of one transformer layer on one tensor-parallel rank: SwiGLU, RMS norms, grouped-query attention."""
    model, tp = preset.model, preset.parallel.tensor_model_parallel_size
    hidden, head = model.hidden_size, head_width(model)
    queries = max(1, model.num_attention_heads // tp) * head
    keys = key_groups(preset) * head
    attention = hidden * (2 * queries + 2 * keys) + (queries + 2 * keys if model.add_qkv_bias else 0)
    norms = 2 * hidden + (2 * head if model.qk_layernorm else 0)
    if model.num_experts is None:
        return attention + norms + 3 * hidden * -(-model.ffn_hidden_size // tp)
    shared = preset.parallel.expert_tensor_parallel_size or tp
    width = -(-(model.moe_ffn_hidden_size or model.ffn_hidden_size) // shared)
    experts = -(-model.num_experts // preset.parallel.expert_model_parallel_size)
    return attention + norms + hidden * model.num_experts + experts * 3 * hidden * width


def head_width(model: Model) -> int:
    """Width of one attention head."""
    return model.kv_channels or max(1, model.hidden_size // model.num_attention_heads)


def key_groups(preset: Preset) -> int:
    """Key/value heads on one tensor-parallel rank; below one they are copied."""
    model = preset.model
    groups = model.num_query_groups or model.num_attention_heads
    return max(1, groups // preset.parallel.tensor_model_parallel_size)


def row_tokens(preset: Preset, sizes: Topology) -> int:
    """Tokens of one micro-batch of the longest samples on one context-parallel rank."""
    batch = preset.batch
    if batch.use_dynamic_batch_size:
        return batch.max_tokens_per_gpu or 0
    return batch.micro_batch_size * -(-sizes.max_tokens_per_sample // sizes.cp)


def logits_bytes(preset: Preset, sizes: Topology) -> int:
    """Float32 blocks [tokens, vocabulary / TP] that one micro-batch of the longest samples holds at once [bytes]."""
    return row_tokens(preset, sizes) * -(-preset.model.vocab_size // sizes.tp) * 4 * LOGITS_COPIES


def layer_activations(preset: Preset) -> int:
    """Numbers one layer keeps per token for its backward pass, with a flash attention kernel."""
    model, parallel = preset.model, preset.parallel
    tp, head = parallel.tensor_model_parallel_size, head_width(model)
    queries, keys = max(1, model.num_attention_heads // tp) * head, key_groups(preset) * head
    # Both norms' inputs and outputs; sequence parallel splits the inputs over the tensor-parallel ranks.
    whole = 4 * model.hidden_size // (tp if parallel.sequence_parallel else 1)
    attention = 2 * queries + 2 * keys + (queries + keys if model.qk_layernorm else 0)
    if model.num_experts is None:
        return whole + attention + 3 * -(-model.ffn_hidden_size // tp)
    width = model.moe_ffn_hidden_size or model.ffn_hidden_size
    shared = parallel.expert_tensor_parallel_size or tp
    return whole + attention + model.moe_router_topk * (model.hidden_size + 3 * -(-width // shared))


def activation_bytes(preset: Preset, sizes: Topology) -> int:
    """Activations of the micro-batches in flight on the first pipeline stage [bytes]."""
    tokens, width = row_tokens(preset, sizes), parameter_bytes(preset)
    layers = _fullest_stage(preset)
    kept = layer_activations(preset)
    in_flight = min(sizes.pp, sizes.micro_batches_per_step or sizes.pp)
    if preset.parallel.recompute_granularity == "full":
        number, hidden = max(1, preset.parallel.recompute_num_layers or 1), preset.model.hidden_size
        if preset.parallel.recompute_method == "block":
            # So many layers of a stage keep their input alone, the others everything; one is computed again at a time.
            again = min(number, layers)
            return tokens * width * (in_flight * (again * hidden + (layers - again) * kept) + kept)
        # Each block of so many layers keeps its input; the backward pass holds one block in full.
        return tokens * width * (in_flight * -(-layers // number) * hidden + min(number, layers) * kept)
    return tokens * width * in_flight * layers * kept


def optimizer_bytes(preset: Preset, sizes: Topology) -> int:
    """Adam's state of one rank [bytes]."""
    shards = (sizes.dp or 1) * sizes.cp if preset.parallel.use_distributed_optimizer else 1
    return -(-state_bytes(preset) // shards)


def state_bytes(preset: Preset) -> int:
    """Adam's state for one tensor- and pipeline-parallel rank's parameters, on however many ranks it is spread."""
    return stage_parameters(preset) * _ADAM[parameter_bytes(preset)]


def gradient_bytes(preset: Preset) -> int:
    """Megatron's gradient buffer of one rank [bytes]."""
    width = parameter_bytes(preset)
    wide = preset.precision.accumulate_allreduce_grads_in_fp32
    return stage_parameters(preset) * (max(4, width) if wide else width)


def cache_bytes(preset: Preset, sizes: Topology) -> int:
    """The megatron engine's key/value cache at its largest [bytes]."""
    width = sizes.max_tokens_per_sample
    rows = -(-sizes.samples_per_rollout // ((sizes.dp or 1) * sizes.cp))
    tokens = max(width, min(rows * width, CACHE_TOKENS))
    per_token = 2 * _fullest_stage(preset) * key_groups(preset) * head_width(preset.model) * parameter_bytes(preset)
    return tokens * per_token


def bars(preset: Preset, sizes: Topology) -> tuple[Bar, Bar]:
    """What training and generation need on the fullest GPU. Server engines bring memory management of their own:
    for them the generation bar holds what the trainer leaves resident.
    """
    weights = stage_parameters(preset) * parameter_bytes(preset)
    resident = [
        ("weights", weights),
        ("gradients", gradient_bytes(preset)),
        ("optimizer", optimizer_bytes(preset, sizes)),
    ]
    builtin = preset.rollout.engine == "megatron"
    if builtin:
        resident.append(("rollout weights", weights))
    step = [("activations", activation_bytes(preset, sizes)), ("logits", logits_bytes(preset, sizes))]
    generation = [("key/value cache", cache_bytes(preset, sizes))] if builtin else []
    return Bar("training", (*resident, *step)), Bar("generation", (*resident, *generation))
