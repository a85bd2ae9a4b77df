"""p3o-launch: validate and run P3O (arXiv:2605.12380) presets on Megatron."""

__version__ = "0.1.0"
