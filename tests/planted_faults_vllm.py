"""Faults of the adapter for vLLM, for `planted_faults --vllm`: their tests need vLLM."""

V = "tests/test_engine_vllm.py::"
W = "tests/test_engine_vllm_steps.py::"
VLLM_FAULTS = [
    (
        "scale-of-the-layer-ignored",
        "tritonattn/engines/vllm_backend.py",
        "plan=plan, sm_scale=self.scale, out=output",
        "plan=plan, out=output",
        W + "test_steps_are_right",
    ),
    (
        "bound-of-the-capture-kept",
        "tritonattn/engines/vllm_backend.py",
        "mixed = mode.mixed_mode() == CUDAGraphMode.FULL",
        "mixed = False",
        W + "test_a_plan_serves_what_stands_there_later",
    ),
    (
        "requests-of-earlier-steps",
        "tritonattn/engines/vllm_backend.py",
        "seq_lens=step.seq_lens[:batch]",
        "seq_lens=step.seq_lens",
        W + "test_steps_are_right",
    ),
    (
        "room-for-fewer-requests",
        "tritonattn/engines/vllm_backend.py",
        "max_batch_size=scheduler.max_num_seqs",
        "max_batch_size=scheduler.max_num_seqs // 2",
        W + "test_a_step_at_capacity",
    ),
    (
        "layers-before-pages",
        "tritonattn/engines/vllm_backend.py",
        "return (1, 2, 4, 0, 3, 5) if hnd else (1, 0, 2, 3, 4, 5)",
        "return (0, 1, 2, 4, 3, 5) if hnd else (0, 1, 2, 3, 4, 5)",
        V + "test_the_cache_is_flashinfers",
    ),
    (
        "draft-models-let-in",
        "tritonattn/engines/vllm_backend.py",
        "speculation.method not in _DRAFTLESS",
        "False",
        V + "test_draft_models_are_refused",
    ),
]
