"""One vLLM engine on a real model, in a process of its own: its greedy tokens, as JSON.

    python -m tests.integration.vllm_engine BACKEND MODEL OUT.json [--engine JSON] [--offload]

`vllm_backends` starts several of these and compares. Written anew after each part, so a run that is
cut leaves what it has.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import time
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
# Requests of the offloading run, each long enough that few fit on the GPU together.
OFFLOADED = 6


def prompts(tokenizer: Any) -> list[list[int]]:
    """Return prompts of one to about 4,000 tokens."""
    long = FILLER * 170 + SECRET + FILLER * 75 + "The password of the lighthouse is"
    ids = [tokenizer(text).input_ids for text in (*TEXTS, FILLER * 12, long)]
    return [ids[0][:1], *ids]


def count_transfers() -> dict[str, int]:
    """Count the blocks' ways between GPU and CPU."""
    from vllm.v1.kv_offload.cpu import gpu_worker

    counts = {"to the CPU": 0, "to the GPU": 0}
    transfer = gpu_worker.SingleDirectionOffloadingHandler.transfer_async

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts["to the CPU" if self.gpu_to_cpu else "to the GPU"] += 1
        return transfer(self, *args, **kwargs)

    gpu_worker.SingleDirectionOffloadingHandler.transfer_async = counted
    return counts


def forbid_waiting() -> dict[str, int]:
    """Let every synchronization inside the backend raise; count its calls."""
    import torch

    from tritonattn.engines import vllm_backend

    counts = {"build": 0, "forward": 0, "do_kv_cache_update": 0}

    def guarded(owner: type, name: str) -> None:
        call = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            torch.cuda.set_sync_debug_mode("error")
            try:
                return call(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        setattr(owner, name, run)

    guarded(vllm_backend.TritonAttnMetadataBuilder, "build")
    guarded(vllm_backend.TritonAttnImpl, "forward")
    guarded(vllm_backend.TritonAttnImpl, "do_kv_cache_update")
    return counts


class Engine:
    """A vLLM engine and what it gave so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.out = args.out
        self.found: dict[str, Any] = {"backend": args.backend, "engine": args.engine}
        begin = time.perf_counter()
        from vllm import LLM

        imported = time.perf_counter()
        if args.offload:
            self.found["transfers"] = count_transfers()
        in_process = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
        planned_on_host = os.environ.get("TRITONATTN_BACKEND", "auto") not in ("auto", "triton")
        if args.backend == "CUSTOM" and in_process and not planned_on_host:
            self.found["calls"] = forbid_waiting()
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
        """Return greedy tokens, and by how much each beats the next best, in logits."""
        rows = []
        for answer in self.generate(ids, NEW_TOKENS, logprobs=2):
            (best,) = answer.outputs
            gaps = []
            for step in best.logprobs:
                top = sorted((one.logprob for one in step.values()), reverse=True)
                gaps.append(round(top[0] - top[1], 4))
            rows.append({"ids": list(best.token_ids), "gaps": gaps, "text": best.text})
        return rows

    def offload(self, ids: list[int]) -> None:
        """Ask for long prompts twice, so that those of the first round have left the GPU."""
        asked = [[*ids[7 * i : 7 * i + 1500]] for i in range(OFFLOADED)]
        self.found["first"] = [row["ids"] for one in asked for row in self.tokens([one])]
        before = dict(self.found["transfers"])
        self.found["again"] = [row["ids"] for one in asked for row in self.tokens([one])]
        self.found["loads_of_the_second_round"] = (
            self.found["transfers"]["to the GPU"] - before["to the GPU"]
        )

    def speed(self, lock: Path) -> None:
        """Measure 64 prompts of 512 tokens, 128 new ones each, while no other engine does."""
        draw = random.Random(1)
        ids = [[draw.randrange(100, 40_000) for _ in range(512)] for _ in range(64)]
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self.generate(ids, 16, detokenize=False)
            seconds = []
            for _ in range(3):
                begin = time.perf_counter()
                self.generate(ids, 128, detokenize=False)
                seconds.append(time.perf_counter() - begin)
        self.found["tokens_per_s"] = round(64 * 128 / min(seconds), 1)


def main() -> None:
    """Run one engine."""
    parser = argparse.ArgumentParser(description="One vLLM engine, its tokens as JSON.")
    parser.add_argument("backend")
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--engine", type=json.loads, default={}, help="more engine arguments")
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--speed", type=Path, metavar="LOCK")
    args = parser.parse_args()
    engine = Engine(args)
    from transformers import AutoTokenizer

    ids = prompts(AutoTokenizer.from_pretrained(args.model))
    engine.found["lengths"] = [len(one) for one in ids]
    if args.offload:
        engine.offload(ids[-1])
    else:
        engine.found["rows"] = engine.tokens(ids)
        engine.write()
        # All at once: as many requests as the largest graph holds.
        engine.found["many"] = [row["ids"] for row in engine.tokens(ids[1:9] * 32)]
    engine.write()
    if args.speed:
        engine.speed(args.speed)
    engine.found["done"] = True
    engine.write()


if __name__ == "__main__":
    main()
