"""The only importer of megatron-core: process groups, model, log-probs, optimizer, checkpoint, and the CPU backend."""
