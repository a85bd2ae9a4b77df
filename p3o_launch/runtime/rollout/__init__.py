"""What a rollout is made of besides the engine: tokenizer, prompts, rewards. Importing this package loads nothing."""
