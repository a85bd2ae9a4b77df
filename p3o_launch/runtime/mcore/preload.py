"""What a fork server imports before it forks ranks: torch, and what a rank needs of megatron-core. No import here."""

MODULES = (
    "torch",
    "torch.distributed",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.optimizer_param_scheduler",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.dist_checkpointing",
)
