"""One vLLM engine on a real model, in a process of its own: its greedy tokens, as JSON.

    python -m tests.integration.vllm_engine BACKEND MODEL OUT.json [--engine JSON] [--part ...]

`vllm_backends` starts several of these and judges them. The file is written anew after each part,
so a run that is cut leaves what it has.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NEW_TOKENS = 64
TEXTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def quicksort(items):\n    ",
    "Water boils at a temperature of",
    "The seven days of the week are Monday,",
    "In 1969, two astronauts",
    "A recipe for bread: take flour, water, salt and",
    "<|im_start|>user\nName three rivers of Europe.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "1, 1, 2, 3, 5, 8, 13,",
]
FILLER = "The train to the coast leaves at ten past eight and arrives before noon. "
SECRET = "The password of the lighthouse is marigold. "
FACTS = 6
PARTS = ("rows", "many", "facts", "twice", "profile", "speed")


def prompts(tokenizer: Any) -> list[list[int]]:
    """Return prompts of one to about 4,000 tokens."""
    long = FILLER * 170 + SECRET + FILLER * 75 + "The password of the lighthouse is"
    ids = [tokenizer(text).input_ids for text in (*TEXTS, FILLER * 12, long)]
    return [ids[0][:1], *ids]


def facts(tokenizer: Any) -> list[list[int]]:
    """Return prompts of about 1,500 tokens that ask for what each begins with."""
    draw = random.Random(5)
    texts = []
    for room in range(FACTS):
        code = " ".join(str(draw.randrange(10)) for _ in range(6))
        texts.append(f"The code of room {room} is {code}. {FILLER * 95}The code of room {room} is")
    return [tokenizer(text).input_ids for text in texts]


def count_transfers() -> dict[str, int]:
    """Count the transfers of blocks between GPU and CPU."""
    from vllm.v1.kv_offload.cpu import gpu_worker

    counts = {"to the CPU": 0, "to the GPU": 0}
    transfer = gpu_worker.SingleDirectionOffloadingHandler.transfer_async

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts["to the CPU" if self.gpu_to_cpu else "to the GPU"] += 1
        return transfer(self, *args, **kwargs)

    gpu_worker.SingleDirectionOffloadingHandler.transfer_async = counted
    return counts


def watch(sizes: list[int]) -> dict[str, int]:
    """Let synchronizations of torch inside the backend raise; count calls, and mark them."""
    import torch

    from tritonattn.engines import vllm_backend

    counts = {"build": 0, "forward": 0, "do_kv_cache_update": 0, "long queries in a graph": 0}

    def guard(owner: type, name: str, count: str) -> None:
        call = getattr(owner, name)

        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            counts[count] += 1
            step = kwargs.get("common_attn_metadata")
            if name == "build" and step is not None:
                # Padded to a captured size, a step of several tokens a request is in its graph.
                fits = step.max_query_len > 1 and step.num_actual_tokens in sizes
                counts["long queries in a graph"] += fits
            torch.cuda.set_sync_debug_mode("error")
            try:
                with torch.profiler.record_function("tritonattn"):
                    return call(self, *args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        setattr(owner, name, run)

    builder, layer = vllm_backend.TritonAttnMetadataBuilder, vllm_backend.TritonAttnImpl
    guard(builder, "build", "build")
    guard(builder, "build_for_cudagraph_capture", "build")
    guard(layer, "forward", "forward")
    guard(layer, "do_kv_cache_update", "do_kv_cache_update")
    return counts


def is_wait(name: str) -> bool:
    """Return whether a profiler's event waits for the device, or copies from it."""
    return "Synchronize" in name or "DtoH" in name


def names_below(event: Any) -> Iterator[str]:
    """Name what a range called, and what that started on the device."""
    for child in event.cpu_children:
        yield child.name
        yield from (kernel.name for kernel in child.kernels)
        yield from names_below(child)


class Engine:
    """A vLLM engine and what it gave so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.out = args.out
        self.found: dict[str, Any] = {"backend": args.backend, "engine": args.engine}
        begin = time.perf_counter()
        from vllm import LLM

        imported = time.perf_counter()
        if args.engine.get("kv_offloading_size"):
            self.found["transfers"] = count_transfers()
        if args.watch:
            config = args.engine.get("compilation_config", {})
            self.found["calls"] = watch(config.get("cudagraph_capture_sizes", []))
        options = {
            "dtype": "bfloat16", "seed": 0, "max_num_seqs": 256, "max_num_batched_tokens": 8192,
            "gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 2 << 30,
            "enable_prefix_caching": False, "kernel_config": {"enable_flashinfer_autotune": False},
        }  # fmt: skip
        self.llm = LLM(args.model, attention_backend=args.backend, **options | args.engine)
        self.found["import_s"] = round(imported - begin, 1)
        self.found["start_s"] = round(time.perf_counter() - imported, 1)
        self.write()

    def write(self) -> None:
        self.out.write_text(json.dumps(self.found))

    def generate(self, ids: list[list[int]], tokens: int, **options: Any) -> list[Any]:
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, **options)
        return self.llm.generate(
            [{"prompt_token_ids": one} for one in ids], sampling, use_tqdm=False
        )

    def tokens(self, ids: list[list[int]]) -> list[dict[str, Any]]:
        """Return greedy tokens, and at each the two best and their distance, in logits."""
        rows = []
        for answer in self.generate(ids, NEW_TOKENS, logprobs=2):
            (best,) = answer.outputs
            tops = []
            for step in best.logprobs:
                order = sorted(step, key=lambda token: -step[token].logprob)[:2]
                gap = step[order[0]].logprob - step[order[1]].logprob
                tops.append([*order, round(gap, 4)])
            rows.append(
                {
                    "ids": list(best.token_ids),
                    "tops": tops,
                    "text": best.text,
                    "cached": answer.num_cached_tokens,
                }
            )
        return rows

    def rows(self, ids: list[list[int]], asked: list[list[int]]) -> None:
        self.found["rows"] = self.tokens(ids)

    def many(self, ids: list[list[int]], asked: list[list[int]]) -> None:
        """All at once: as many requests as the largest graph holds."""
        self.found["many"] = self.tokens(ids[1:9] * 32)

    def facts(self, ids: list[list[int]], asked: list[list[int]]) -> None:
        """One by one, then again: where blocks are offloaded, those of the first have left."""
        for name in ("facts", "facts again"):
            self.found[name] = [self.tokens([one])[0] for one in asked]

    def twice(self, ids: list[list[int]], asked: list[list[int]]) -> None:
        """Ask the longest prompt a second time, for a prefix cache to serve."""
        self.found["twice"] = [self.tokens([ids[-1]])[0] for _ in range(2)]

    def profile(self, ids: list[list[int]], asked: list[list[int]]) -> None:
        """Look for what waits inside the calls of the backend, whoever makes it."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            self.generate(ids[:4], 8)
        events = profiler.events()
        ours = [event for event in events if event.name == "tritonattn"]
        inside = {name for event in ours for name in names_below(event)}
        self.found["profile"] = {
            "calls": len(ours),
            "waits in all": sum(is_wait(event.name) for event in events),
            "waits inside": sorted(filter(is_wait, inside)),
        }  # fmt: skip

    def speed(self, ids: list[list[int]], asked: list[list[int]]) -> None:
        """64 prompts of 512 tokens, 128 new ones each, the best of three."""
        draw = random.Random(1)
        random_ids = [[draw.randrange(100, 40_000) for _ in range(512)] for _ in range(64)]
        self.generate(random_ids, 16, detokenize=False)
        seconds = []
        for _ in range(3):
            begin = time.perf_counter()
            self.generate(random_ids, 128, detokenize=False)
            seconds.append(time.perf_counter() - begin)
        self.found["tokens_per_s"] = round(64 * 128 / min(seconds), 1)


def main() -> None:
    """Run one engine."""
    parser = argparse.ArgumentParser(description="One vLLM engine, its tokens as JSON.")
    parser.add_argument("backend")
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--engine", type=json.loads, default={}, help="more engine arguments")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=["rows", "many"])
    parser.add_argument("--watch", action="store_true", help="the calls of CUSTOM, in this process")
    args = parser.parse_args()
    if args.watch:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    engine = Engine(args)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids, asked = prompts(tokenizer), facts(tokenizer)
    engine.found["lengths"] = [len(one) for one in (*ids, *asked)]
    for part in args.part:
        getattr(engine, part)(ids, asked)
        engine.write()
    engine.found["done"] = True
    engine.write()


if __name__ == "__main__":
    main()
