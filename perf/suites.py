"""The named suites of cases."""

from __future__ import annotations

from collections.abc import Callable

from tritonattn.perf.cases import BlockCase, Case, StepCase

_UNEVEN = "64x1xcycle(1,977,16000)"
_SKEWED = "1x1x131072+63x1x1024"


def _steps(op: str, model: str, *lengths: str, page_size: int = 16) -> list[Case]:
    return [StepCase(op, model, text, page_size) for text in lengths]


def peers() -> list[Case]:
    """Return the cases of the table of peers, in its order."""
    return [
        *_steps("decode", "llama3-8b", "1x1x1024", "1x1x8192", "1x1x131072", "8x1x4096"),
        *_steps("decode", "llama3-8b", "16x1x32768", "64x1x1024", "64x1x8192", "256x1x2048"),
        *_steps("decode", "llama3-70b-tp8", "1x1x131072", "8x1x4096", "16x1x32768"),
        *_steps("decode", "llama3-70b-tp8", "64x1x8192", "256x1x2048"),
        *_steps("decode", "qwen2.5-7b", "8x1x4096", "64x1x1024", "64x1x8192"),
        *_steps("decode", "mha-32", "1x1x1024", "8x1x4096", "64x1x8192"),
        *_steps("decode", "llama3-8b", _UNEVEN, _SKEWED),
        *_steps("prefill", "llama3-8b", "16x512x512", "8x2048x2048", "2x8192x8192"),
        *_steps("prefill", "llama3-8b", "1x16384x16384", "2x2048x16384", "8x512x8192"),
        *_steps("prefill", "llama3-8b", "16x128x4096"),
        *_steps("prefill", "llama3-70b-tp8", "16x512x512", "2x8192x8192"),
        *_steps("prefill", "qwen2.5-7b", "2x8192x8192"),
        *_steps("prefill", "mha-32", "2x8192x8192"),
        *_steps("mixed", "llama3-8b", "60x1x4096+2x2048x4096"),
        *_steps("speculative", "llama3-8b", "64x5x4096"),
    ]


def decode() -> list[Case]:
    """Return single-token queries: every model, batch sizes, page sizes, uneven lengths."""
    cases: list[Case] = []
    for model in _SERVED:
        cases += _steps("decode", model, "8x1x4096", "64x1x2048", "128x1x1024")
    for page_size in (1, 8, 32, 64, 128):
        cases += _steps("decode", "llama3-8b", "64x1x2048", page_size=page_size)
    cases += _steps("decode", "llama3-8b", _UNEVEN, _SKEWED, "64x1xlognormal(2048,1,0)")
    cases.append(StepCase("decode", "llama3-8b", "64x1x2048", kv_layout="HND"))
    cases.append(StepCase("decode", "llama3-8b", "64x1x2048", dtype="fp16"))
    cases.append(StepCase("decode", "mistral-large-2", "64x1x8192", window_left=4095))
    cases.append(StepCase("decode", "gemma-2-9b", "64x1x2048", logits_soft_cap=50.0))
    return cases


def prefill() -> list[Case]:
    """Return prompts: whole ones, and chunks after a cached prefix."""
    cases: list[Case] = []
    for model in _SERVED:
        cases += _steps("prefill", model, "8x1024x1024", "2x4096x4096", "4x512x8192")
    for page_size in (1, 8, 64):
        cases += _steps("prefill", "llama3-8b", "8x1024x1024", page_size=page_size)
    cases += _steps("prefill", "llama3-8b", "4x300x300+3x77x1500+1x4000x4000", "1x16384x16384")
    cases.append(StepCase("prefill", "llama3-8b", "8x1024x1024", causal=False))
    cases.append(StepCase("prefill", "llama3-8b", "8x1024x1024", kv_layout="HND"))
    return cases


def mixed() -> list[Case]:
    """Return decodes beside chunks of prompts, as engines batch them."""
    lengths = ("60x1x4096+2x2048x4096", "32x1x2048+1x512x512", "120x1x1024+1x2048x8192")
    return [
        case
        for model in ("llama3-8b", "llama3-70b-tp8", "qwen2.5-7b")
        for case in _steps("mixed", model, *lengths)
    ]


def speculative() -> list[Case]:
    """Return a few query tokens a request: the drafts that a target model verifies."""
    cases: list[Case] = []
    for tokens in (2, 3, 4, 5, 8):
        cases += _steps("speculative", "llama3-8b", f"64x{tokens}x4096")
    cases += _steps("speculative", "llama3-8b", "8x5x4096", "64x5xuniform(64,8192,0)")
    return cases + _steps("speculative", "qwen2.5-7b", "64x5x4096")


def latency() -> list[Case]:
    """Return batch 1 by length."""
    keys = (256, 1024, 4096, 16384, 65536, 131072)
    cases: list[Case] = []
    for model in ("llama3-8b", "llama3-70b-tp8", "qwen2.5-7b", "gpt-oss-20b"):
        cases += _steps("decode", model, *(f"1x1x{length}" for length in keys))
    prompts = (64, 256, 1024, 4096, 16384)
    return cases + _steps("prefill", "llama3-8b", *(f"1x{n}x{n}" for n in prompts))


def host() -> list[Case]:
    """Return steps so small that a call costs what its host work costs."""
    return _steps("host", "llama3-8b", "1x1x16", "64x1x16", "256x1x16", "1x16x16")


def blockops() -> list[Case]:
    """Return pages moved in many layers and in one, on the device and over the bus."""
    return [
        BlockCase("copy_blocks", "llama3-8b", 32, 1000, 2048),
        BlockCase("copy_blocks", "llama3-8b", 32, 16, 2048),
        BlockCase("swap_blocks", "llama3-8b", 32, 1000, 2048),
        BlockCase("swap_blocks", "llama3-8b", 1, 1000, 2048),
        BlockCase("swap_blocks to host", "llama3-8b", 1, 1000, 2048),
        BlockCase("swap_blocks from host", "llama3-8b", 1, 1000, 2048),
    ]


_SERVED = ("llama3-8b", "llama3-70b-tp8", "qwen2.5-7b", "llama4-scout", "mistral-large-2",
           "gemma-2-9b", "gpt-oss-20b", "mha-32")  # fmt: skip

SUITES: dict[str, Callable[[], list[Case]]] = {
    suite.__name__: suite
    for suite in (decode, prefill, mixed, speculative, blockops, host, latency, peers)
}


def tiny(name: str) -> list[Case]:
    """Return what Triton's interpreter does of a suite in seconds.

    The point is the way from a case to a report, not the times.
    """
    steps = {
        "decode": ("2x1x24", "3x1xcycle(1,7,16)"),
        "prefill": ("2x8x12",),
        "mixed": ("2x1x20+1x6x10",),
        "speculative": ("2x3x20",),
        "host": ("1x1x8",),
        "latency": ("1x1x16", "1x1x32"),
    }
    if name == "blockops":
        return [
            BlockCase("copy_blocks", "tiny", 2, 3, 8),
            BlockCase("swap_blocks", "tiny", 1, 3, 8),
        ]
    if name == "peers":
        return [case for op in ("decode", "prefill", "mixed", "speculative") for case in tiny(op)]
    op = "decode" if name == "latency" else name
    return _steps(op, "tiny", *steps[name], page_size=8)
