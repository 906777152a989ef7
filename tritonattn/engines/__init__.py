"""Adapters for inference engines, one module each, which need their engine to register only.

`transformers` Hugging Face transformers' continuous batching.
`vllm` vLLM's `--attention-backend CUSTOM`, with its classes in `vllm_backend`.
"""
