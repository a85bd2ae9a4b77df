"""The shape of a preset: field names, types and the range of each single field. No relation between two fields.

Field names are Megatron's flag names (and slime's or Relax's for what Megatron lacks), in groups. ``None`` means
"not written": where the framework's own default is the fault (dropout, top-p from ``generation_config.json``), a guard
must be able to tell an absent value from a written one. Relations live in the ``guards`` modules, because pydantic
stops at the first failing validator and gives it no position.

Text such as ``1e-5``, which YAML 1.1 reads as a string, is accepted for numeric fields; booleans and numbers are
never accepted for text fields.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

SCHEMA_VERSION = 1

_FLOAT_TEXT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)
_FLOAT32_MAX = 3.4028235e38


def _number_from_text(value: object) -> object:
    """``"1e-5"`` -> 1e-5: YAML 1.1 wants a dot and a signed exponent, people and Megatron do not.

    A number beyond float32 becomes infinite here already, as it would on its way into the trainer.
    """
    if isinstance(value, str) and len(value) <= 64 and _FLOAT_TEXT.fullmatch(value):
        value = float(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return math.copysign(math.inf, value) if abs(value) > _FLOAT32_MAX else float(value)
    return value


Float = Annotated[float, BeforeValidator(_number_from_text)]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(_number_from_text)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(_number_from_text)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), BeforeValidator(_number_from_text)]
PositiveInt = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]


class Group(BaseModel):
    """Base of every group: frozen, strict, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Algorithm(Group):
    """The objective."""

    advantage_estimator: Literal["p3o", "grpo"] = Field(description="`p3o` (ESS cap) or `grpo` (PPO clip), both with group-relative advantages.")
    ess_scope: Literal["step", "micro_batch"] = Field("step", description="Tokens that share one ESS: the whole optimizer step, or one micro-batch over DP x CP.")
    kl_mode: Literal["proxy_safe", "proxy", "exact"] = Field("proxy_safe", description="Gradient of the behaviour-KL proxy beyond its clamp. `proxy` is for parity tests, `exact` for verification.")
    clip_low: FiniteFloat = Field(0.2, description="Lower width of P3O's monitoring band. Does not enter the loss.")
    clip_high: FiniteFloat = Field(0.2, description="Upper width of P3O's monitoring band. Does not enter the loss.")
    eps_clip: NonNegative | None = Field(None, description="GRPO: the ratio is clipped below at 1 - eps_clip. Default 0.4 for grpo.")
    eps_clip_high: NonNegative | None = Field(None, description="GRPO: the ratio is clipped above at 1 + eps_clip_high. Default: eps_clip.")
    use_rollout_logprobs: bool | None = Field(None, description="Use the rollout engine's log-probs as denominator of the ratio. Absent means false, as in slime and Relax.")
    calculate_per_token_loss: bool | None = Field(None, description="Divide the summed token loss by the step's token count. Absent means false, as in Megatron.")
    normalize_advantages: bool = Field(True, description="Divide group-relative advantages by the group's standard deviation.")
    entropy_coef: NonNegative = Field(0.0, description="Weight of the entropy bonus. The builtin runtime supports 0 only.")
    use_tis: bool = Field(False, description="Truncated importance sampling between trainer and engine log-probs.")
    use_mis: bool = Field(False, description="Masked importance sampling between trainer and engine log-probs.")
    custom_tis_function_path: Text | None = Field(None, description="Import path of a custom importance correction.")
    use_critic: bool = Field(False, description="Train a value model.")
    critic_load: Text | None = Field(None, description="Checkpoint of a value model.")
    get_mismatch_metrics: bool = Field(False, description="Recompute trainer log-probs only to report the engine mismatch.")
    use_opsm: bool = Field(False, description="Off-policy sequence masking.")
    custom_pg_loss_reducer_function_path: Text | None = Field(None, description="Import path of a custom loss reducer.")
    use_opd: bool = Field(False, description="On-policy distillation from a teacher.")
    kl_coef: NonNegative = Field(0.0, description="Weight of a reference KL added to the reward.")
    use_kl_in_reward: bool | None = Field(None, description="Switch of the reference KL in the reward. Absent: on when the estimator applies kl_coef (grpo and p3o never do).")
    use_kl_loss: bool = Field(False, description="Add a reference KL to the loss.")
    kl_loss_coef: NonNegative = Field(0.0, description="Weight of the reference KL in the loss.")


class Model(Group):
    """Architecture, in Megatron's words; must agree with the checkpoint's `config.json`."""

    hf_checkpoint: Text = Field(description="Directory of a Hugging Face checkpoint, or `builtin:arithmetic`, the one that ships with the package.")
    num_layers: PositiveInt = Field(description="Transformer layers of the whole model.")
    hidden_size: PositiveInt = Field(description="Width of the residual stream.")
    ffn_hidden_size: PositiveInt = Field(description="Width of the feed-forward block.")
    num_attention_heads: PositiveInt = Field(description="Query heads.")
    num_query_groups: PositiveInt | None = Field(None, description="Key/value heads. Absent: as many as attention heads.")
    kv_channels: PositiveInt | None = Field(None, description="Width of one head. Absent: hidden_size / num_attention_heads.")
    vocab_size: PositiveInt = Field(description="Rows of the embedding, as in the checkpoint.")
    max_position_embeddings: PositiveInt = Field(32768, description="Longest sequence the checkpoint was made for [tokens].")
    rotary_base: Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(_number_from_text)] = Field(10000.0, description="Base of the rotary embedding (`rope_theta`).")
    norm_epsilon: NonNegative = Field(1e-6, description="Epsilon of the RMS norms.")
    qk_layernorm: bool = Field(False, description="Normalise queries and keys per head, as Qwen3 does.")
    add_qkv_bias: bool = Field(False, description="Bias in the query, key and value projections, as Qwen2 has.")
    untie_embeddings_and_output_weights: bool = Field(False, description="The output layer has weights of its own. False: it shares the embedding.")
    attention_dropout: Fraction | None = Field(None, description="Absent means Megatron's default, 0.1.")
    hidden_dropout: Fraction | None = Field(None, description="Absent means Megatron's default, 0.1.")
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = Field("auto", description="Attention kernel. `auto` lets Transformer Engine choose, which may differ between machines; `local` is Megatron's own, for the CPU.")
    lora_rank: Count = Field(0, description="Rank of a LoRA adapter; 0 is none.")
    lora_dropout: Fraction = Field(0.0, description="Dropout inside the adapter.")
    lora_merge_before_sync: bool = Field(True, description="Merge the adapter into the weights that are sent to the rollout engine.")
    num_experts: PositiveInt | None = Field(None, description="Experts of a mixture-of-experts layer. Absent: dense.")
    moe_router_topk: PositiveInt = Field(2, description="Experts per token.")
    moe_ffn_hidden_size: PositiveInt | None = Field(None, description="Width of one expert. Absent: ffn_hidden_size.")
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"] = Field("none", description="How the router is kept balanced.")
    moe_aux_loss_coeff: NonNegative = Field(0.0, description="Weight of the auxiliary balancing loss.")
    moe_z_loss_coeff: NonNegative | None = Field(None, description="Weight of the router z-loss. Absent: none.")
    moe_input_jitter_eps: NonNegative | None = Field(None, description="Random scaling of the router's input. Absent: none.")
    moe_router_force_load_balancing: bool = Field(False, description="Random routing, a benchmarking switch of Megatron's.")
    moe_router_force_biased: NonNegative | None = Field(None, description="Standard deviation of a random router bias (Megatron's benchmarking switch).")
    custom_forward_hook_path: Text | None = Field(None, description="Import path of a hook on the model's forward.")
    mtp_num_layers: PositiveInt | None = Field(None, description="Multi-token-prediction layers of the checkpoint.")
    enable_mtp_training: bool = Field(False, description="Train the multi-token-prediction layers.")


class Precision(Group):
    """Numbers and determinism."""

    bf16: bool = Field(False, description="Parameters and activations in bfloat16.")
    fp16: bool = Field(False, description="Parameters and activations in float16, with loss scaling.")
    params_dtype: Literal["float32", "float64"] | None = Field(None, description="Precision when neither bf16 nor fp16 is set. float64 is for verification on the CPU.")
    fp8: Literal["e4m3", "hybrid"] | None = Field(None, description="FP8 in the trainer.")
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] | None = Field(None, description="Scaling recipe. Absent means Megatron's default, delayed.")
    accumulate_allreduce_grads_in_fp32: bool = Field(True, description="Sum gradients in float32.")
    attention_softmax_in_fp32: bool = Field(True, description="Attention softmax in float32.")
    deterministic_mode: bool = Field(False, description="Refuse kernels whose result depends on timing; needs environment variables too.")
    cross_entropy_loss_fusion: bool = Field(False, description="Fused cross-entropy kernel.")


class Parallel(Group):
    """How one model is spread over ranks."""

    tensor_model_parallel_size: PositiveInt = Field(1, description="Ranks that share each layer (TP).")
    pipeline_model_parallel_size: PositiveInt = Field(1, description="Stages of layers (PP).")
    context_parallel_size: PositiveInt = Field(1, description="Ranks that share each sequence (CP).")
    expert_model_parallel_size: PositiveInt = Field(1, description="Ranks that share the experts (EP).")
    expert_tensor_parallel_size: PositiveInt | None = Field(None, description="Ranks that share one expert. Absent: tensor_model_parallel_size.")
    num_layers_per_virtual_pipeline_stage: PositiveInt | None = Field(None, description="Layers of one model chunk; sets virtual pipeline parallelism.")
    decoder_first_pipeline_num_layers: PositiveInt | None = Field(None, description="Layers of the first stage, when stages are uneven.")
    decoder_last_pipeline_num_layers: PositiveInt | None = Field(None, description="Layers of the last stage, when stages are uneven.")
    sequence_parallel: bool = Field(False, description="Split norms and dropouts along the sequence over the TP ranks.")
    use_distributed_optimizer: bool = Field(False, description="Split the optimizer's state over the data-parallel ranks.")
    overlap_grad_reduce: bool = Field(False, description="Reduce gradients while the backward pass runs.")
    overlap_param_gather: bool = Field(False, description="Gather parameters while the forward pass runs; needs the distributed optimizer.")
    overlap_moe_expert_parallel_comm: bool = Field(False, description="Megatron's combined 1F1B schedule.")
    cuda_graph_scope: Literal["none", "attn", "full_iteration"] = Field("none", description="What is captured in a CUDA graph.")
    recompute_granularity: Literal["none", "selective", "full"] = Field("none", description="Activations computed again in the backward pass instead of being kept.")
    recompute_method: Literal["uniform", "block"] | None = Field(None, description="Which layers full recomputation covers.")
    recompute_num_layers: PositiveInt | None = Field(None, description="Layers of one recomputed block.")
    use_routing_replay: bool = Field(False, description="Replay the router's choices between forwards of the trainer.")
    use_rollout_routing_replay: bool = Field(False, description="Replay the rollout engine's router choices in the trainer.")


class Batch(Group):
    """Prompts, samples, and how an optimizer step is cut."""

    num_rollout: PositiveInt = Field(description="Rollouts of the run; each generates rollout_batch_size x n_samples_per_prompt samples.")
    rollout_batch_size: PositiveInt = Field(description="Prompts of one rollout.")
    n_samples_per_prompt: PositiveInt = Field(description="Responses per prompt: the group that advantages are relative to.")
    global_batch_size: PositiveInt = Field(description="Samples of one optimizer step.")
    micro_batch_size: PositiveInt = Field(1, description="Samples of one forward on one data-parallel rank.")
    use_dynamic_batch_size: bool = Field(False, description="Fill micro-batches up to max_tokens_per_gpu instead of counting samples.")
    max_tokens_per_gpu: PositiveInt | None = Field(None, description="Token budget of a micro-batch under use_dynamic_batch_size.")
    sequence_padding_multiple: PositiveInt = Field(1, description="Sequences are padded to a multiple of this. Must serve CP and sequence parallel.")
    pack_sequences: bool = Field(False, description="Put several samples into one row (thd on GPU, block-diagonal attention on CPU).")


class Optimizer(Group):
    """Adam and its schedule."""

    optimizer: Literal["adam"] = Field("adam", description="Adam with decoupled weight decay.")
    lr: NonNegative = Field(description="Highest learning rate.")
    min_lr: NonNegative = Field(0.0, description="Learning rate at the end of the decay.")
    lr_decay_style: Literal["constant", "linear", "cosine"] = Field("cosine", description="Shape of the decay over the run's optimizer steps.")
    lr_warmup_fraction: Fraction = Field(0.0, description="Share of the run's optimizer steps over which the rate rises.")
    weight_decay: NonNegative = Field(0.01, description="Decoupled weight decay.")
    adam_beta1: Fraction = Field(0.9, description="Decay of the first moment.")
    adam_beta2: Fraction = Field(0.95, description="Decay of the second moment.")
    adam_eps: NonNegative = Field(1e-8, description="Added to the root of the second moment.")
    clip_grad: NonNegative = Field(1.0, description="Largest global gradient norm; 0 is no clipping.")


class Rollout(Group):
    """How training samples are drawn. Evaluation has its own group."""

    engine: Literal["megatron", "vllm", "sglang"] = Field("megatron", description="Who generates: the trainer's own weights (`megatron`), or a server.")
    engine_version: Text | None = Field(None, description="Version of the engine on the target machine, for rules that depend on it.")
    max_prompt_len: PositiveInt = Field(512, description="Longest prompt [tokens].")
    max_response_len: PositiveInt = Field(description="Longest response [tokens].")
    temperature: Float = Field(1.0, description="Behaviour temperature of the training rollouts; the trainer's log-probs stay at temperature 1.")
    top_p: Float | None = Field(None, description="Absent: filled from the checkpoint's generation_config.json by engines that read it.")
    top_k: int | None = Field(None, description="-1 means off. Absent: filled from generation_config.json by engines that read it.")
    min_p: Float | None = Field(None, description="Cut-off relative to the likeliest token. Absent: off, or filled from generation_config.json.")
    top_a: Float | None = Field(None, description="Cut-off by the squared probability of the likeliest token.")
    typical_p: Float | None = Field(None, description="Locally typical sampling.")
    epsilon_cutoff: Float | None = Field(None, description="Absolute probability cut-off.")
    eta_cutoff: Float | None = Field(None, description="Cut-off that depends on the entropy.")
    repetition_penalty: Float | None = Field(None, description="Penalty on tokens seen before; 1 is off.")
    presence_penalty: Float | None = Field(None, description="Penalty on tokens that occurred; 0 is off.")
    frequency_penalty: Float | None = Field(None, description="Penalty by how often a token occurred; 0 is off.")
    logit_bias: dict[str, Float] | None = Field(None, description="Token id to a number added to its logit.")
    extra: dict[str, Any] = Field(default_factory=dict, description="Free-form sampling parameters passed to the engine.")
    generation_config: Literal["auto", "ignore"] = Field("ignore", description="`auto`: the engine fills unset sampling values from the checkpoint's generation_config.json.")
    logprobs: Count | None = Field(0, description="Log-probs the engine returns per token: 0 is the sampled token alone; absent is none.")
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = Field("processed_logprobs", description="`processed`: of the distribution sampled, after temperature; `raw`: before it.")
    deterministic_inference: bool = Field(False, description="Batch-invariant kernels in the engine.")
    per_sample_seed: bool = Field(True, description="Give each sample of a group a seed of its own.")
    update_weights_interval: PositiveInt = Field(1, description="Rollouts between two refreshes of the rollout weights.")
    fully_async: bool = Field(False, description="Stream samples while the trainer steps.")
    max_staleness: Count = Field(0, description="Rollouts a sample may be older than the trainer under asynchronous generation.")
    colocate: bool = Field(True, description="Engines and trainer share the same GPUs.")
    weight_quantization: Literal["none", "int8", "int4", "fp8_e4m3"] = Field("none", description="Rounding of the rollout weights; the trainer's stay as they are.")
    speculative_decoding: bool = Field(False, description="Draft tokens that the model accepts or refuses.")
    enable_prefix_caching: bool = Field(False, description="Reuse the cache of a prompt already seen.")
    reset_prefix_cache_on_update: bool = Field(True, description="Empty that cache when weights change.")
    num_gpus: PositiveInt | None = Field(None, description="GPUs of the rollout engines. Absent: all.")
    num_gpus_per_engine: PositiveInt = Field(1, description="GPUs of one engine.")
    gpu_memory_utilization: Fraction = Field(0.7, description="Share of a GPU's memory that a server engine may take.")


class Evaluation(Group):
    """Evaluation rollouts; truncated sampling is allowed here."""

    interval: PositiveInt | None = Field(None, description="Rollouts between two evaluations. Absent: no evaluation.")
    before_train: bool = Field(True, description="Evaluate once before the first step.")
    n_samples_per_prompt: PositiveInt = Field(16, description="Responses per evaluation prompt.")
    temperature: Float = Field(1.0, description="Temperature of evaluation.")
    top_p: Float = Field(1.0, description="Nucleus of evaluation; 1 is off.")
    top_k: int = Field(-1, description="Candidates of evaluation; -1 is off.")
    max_response_len: PositiveInt | None = Field(None, description="Longest evaluation response [tokens]. Absent: rollout.max_response_len.")
    max_prompts: PositiveInt | None = Field(None, description="Use only the first prompts of the evaluation set.")


class Data(Group):
    """Where prompts come from."""

    prompt_data: Text = Field(description="JSONL file, or `builtin:arithmetic`.")
    eval_prompt_data: Text | None = Field(None, description="JSONL file of evaluation prompts, or `builtin:arithmetic`.")
    input_key: Text = Field("prompt", description="Key of the prompt in a record.")
    label_key: Text = Field("label", description="Key of the answer in a record.")
    apply_chat_template: bool = Field(False, description="Wrap each prompt by the tokenizer's chat template.")
    shuffle: bool = Field(True, description="Visit the prompts in an order drawn from seed.seed.")
    overlong_prompts: Literal["error", "skip"] = Field("error", description="What to do with a prompt above rollout.max_prompt_len: stop before any actor starts, or skip and count it.")
    malformed_lines: Literal["error", "skip"] = Field("error", description="What to do with a line that is not a usable record.")


class Reward(Group):
    """Rule-based verifier."""

    type: Literal["exact", "math", "mopd"] = Field("exact", description="`exact`: the answer text; `math`: boxed answer, by math-verify; `mopd`: Relax's name, unrelated to distillation.")


class Cluster(Group):
    """Declared hardware. `validate` judges by this, not by the machine it runs on."""

    device: Literal["cuda", "cpu"] = Field("cuda", description="`cuda`, or `cpu` (gloo ranks).")
    num_nodes: PositiveInt = Field(1, description="Machines.")
    gpus_per_node: PositiveInt = Field(4, description="GPUs of one node; on the CPU, ranks of one node.")
    gpu: Text | None = Field(None, description="Product name of the GPU, such as `A100-40GB`; decides compute capability and memory.")
    ray_address: Text | None = Field(None, description="Address of an existing cluster. Absent: a local one of the run's own.")
    env: dict[str, str] = Field(default_factory=dict, description="Environment of every actor.")
    runtime_env: dict[str, Any] = Field(default_factory=dict, description="Ray runtime environment.")
    threads_per_rank: PositiveInt = Field(1, description="CPU threads of one rank's arithmetic.")
    timeout_s: PositiveInt = Field(600, description="Longest wait in one collective, and for the actors to come up [s].")


class Checkpoint(Group):
    """What is saved."""

    save_interval: PositiveInt | None = Field(None, description="Rollouts between two checkpoints. Absent: one, at the end.")
    save_final: bool = Field(True, description="Save a checkpoint at the end.")
    keep: PositiveInt = Field(2, description="Checkpoints kept.")


class Logging(Group):
    """Where a run leaves its traces."""

    output_root: Text = Field("runs", description="Directory below which runs get theirs.")
    tensorboard: bool = Field(True, description="Write the metrics for TensorBoard too.")
    log_rollouts: bool = Field(True, description="Keep every prompt, response and reward.")
    pre_command: Text | None = Field(None, description="Shell command before the launch.")
    post_command: Text | None = Field(None, description="Shell command after the run.")


class Seed(Group):
    """Random numbers."""

    seed: Count = Field(42, description="Seed of initialisation, order and everything else but sampling.")
    rollout_seed: Count | None = Field(None, description="Absent: the same as seed.")


class Preset(Group):
    """A whole run. `extends`, `profile` and `ignore` are resolved by `loading.py` before this shape is applied."""

    schema_version: Literal[1] = Field(description="Version of this shape.")
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = Field(description="Name of the preset; part of the run directory.")
    description: str = Field("", description="One line for lists and records.")
    ignore: dict[str, Text] = Field(default_factory=dict, description="Codes to silence, each with the reason.")
    algorithm: Algorithm
    model: Model
    precision: Precision = Precision()
    parallel: Parallel = Parallel()
    batch: Batch
    optimizer: Optimizer
    rollout: Rollout
    evaluation: Evaluation = Evaluation()
    data: Data
    reward: Reward = Reward()
    cluster: Cluster = Cluster()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()
    seed: Seed = Seed()
