"""Check the tests: plant one fault at a time in a copy of the sources; a named test must fail.

    python tests/planted_faults.py [NAME ...]

Each fault is a line of code that a real bug changed somewhere. A fault that no longer matches its
source, or that its test does not catch, fails the run. Grow the list with each feature.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from planted_faults_perf import PERF_FAULTS
from planted_faults_stage import STAGE_FAULTS
from planted_faults_vllm import VLLM_FAULTS

ROOT = Path(__file__).resolve().parents[1]
# A named test takes seconds; one that takes longer to fail is not worth naming.
TIMEOUT_S = 240


@dataclass(frozen=True)
class Fault:
    """One replacement in one file, and the test that must notice."""

    name: str
    file: str
    right: str
    wrong: str
    test: str


FAULTS = [
    Fault(
        "causal-top-left",
        "kernels/_common.py",
        "limit = kv_len - q_len + token + 1",
        "limit = token + 1",
        "tests/test_attention.py::test_geometry",
    ),
    Fault(
        "causal-off-by-one",
        "kernels/_common.py",
        "limit = kv_len - q_len + token + 1",
        "limit = kv_len - q_len + token",
        "tests/test_attention.py::test_geometry",
    ),
    Fault(
        "mask-includes-its-limit",
        "kernels/_common.py",
        "key[None, :] < limit[:, None]",
        "key[None, :] <= limit[:, None]",
        "tests/test_attention.py::test_geometry",
    ),
    Fault(
        "lse-base-always-two",
        "tritonattn/backends/triton.py",
        '1.0 if call.lse_base == "log2" else math.log(2.0)',
        "1.0",
        "tests/test_attention.py::test_lse_bases",
    ),
    Fault(
        "lse-without-maximum",
        "kernels/_common.py",
        "(m + tl.log2(tl.where(empty, 1.0, l))) * lse_scale",
        "tl.log2(tl.where(empty, 1.0, l)) * lse_scale",
        "tests/test_attention.py::test_geometry",
    ),
    Fault(
        "k-and-v-strides-swapped",
        "kernels/decode.py",
        "        *kernel_strides(cache.k),\n        *kernel_strides(cache.v),",
        "        *kernel_strides(cache.v),\n        *kernel_strides(cache.k),",
        "tests/test_attention.py::test_fi_860_different_value_dim",
    ),
    Fault(
        "page-offset-in-32-bits",
        "kernels/_common.py",
        "page_now = page.to(tl.int64)",
        "page_now = page.to(tl.int32)",
        "tests/test_attention.py::test_fi_3130_page_offset_past_32_bits",
    ),
    Fault(
        "tail-of-v-not-masked",
        "kernels/_common.py",
        "mask=mask_n & mask_dv, other=0.0",
        "mask=mask_dv, other=0.0",
        "tests/test_attention.py::test_vllm_47305_unread_slots_of_the_last_page",
    ),
    Fault(
        "finite-minus-infinity",
        "kernels/_common.py",
        's = tl.where(key[None, :] < limit[:, None], s, -float("inf"))',
        "s = tl.where(key[None, :] < limit[:, None], s, -5e4)",
        "tests/test_attention.py::test_fi_4267_extreme_logits",
    ),
    Fault(
        "empty-row-divides-by-zero",
        "kernels/_common.py",
        "out = acc * tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, l))[:, None]",
        "out = acc * (1.0 / l)[:, None]",
        "tests/test_attention.py::test_fi_353_empty_requests",
    ),
    Fault(
        "first-page-of-the-table-for-all",
        "kernels/_common.py",
        "tl.maximum(tl.load(indptr_ptr + request), 0)",
        "tl.load(indptr_ptr + request) - tl.load(indptr_ptr)",
        "tests/test_attention.py::test_geometry",
    ),
    Fault(
        "page-size-rounded-to-the-tile",
        "kernels/_common.py",
        "slot = (key % PAGE_SIZE).to(tl.int64)",
        "slot = (offs_n % PAGE_SIZE).to(tl.int64)",
        "tests/test_attention.py::test_geometry",
    ),
    Fault(
        "group-of-heads-mixed-up",
        "kernels/_common.py",
        "kv_head * GROUP + row % GROUP",
        "kv_head + row % GROUP",
        "tests/test_attention.py::test_fi_996_group_sizes",
    ),
    Fault(
        "merge-forgets-a-slot",
        "kernels/decode.py",
        "mask_s = done + offs_s < count",
        "mask_s = done + offs_s < count - 1",
        "tests/test_attention.py::test_splits_do_not_change_the_result",
    ),
    Fault(
        "merge-without-rescaling",
        "kernels/decode.py",
        "weight = tl.exp2(m_s - m_safe)",
        "weight = tl.exp2(m_s - m_s)",
        "tests/test_attention.py::test_splits_do_not_change_the_result",
    ),
    Fault(
        "chunk-skips-a-tile",
        "kernels/plan.py",
        "kv_start = (rank % splits) * size",
        "kv_start = (rank % splits) * (size + 1)",
        "tests/test_plan.py::test_equals_its_twin_on_any_batch",
    ),
    Fault(
        "stale-work-items",
        "kernels/plan.py",
        "split_ptr, item, item < split_capacity, q_start,",
        "split_ptr, item, live, q_start,",
        "tests/test_plan.py::test_a_smaller_plan_leaves_nothing_of_a_larger_one",
    ),
    Fault(
        "length-not-clamped-to-the-table",
        "kernels/plan.py",
        "kv_len = tl.minimum(tl.maximum(length, 0), room)",
        "kv_len = tl.maximum(length, 0)",
        "tests/test_attention.py::test_length_beyond_the_table_is_clamped",
    ),
    Fault(
        "last-page-len-counts-an-empty-request",
        "kernels/plan.py",
        "kv_len = tl.where(room > 0, room - PAGE_SIZE + last, 0)",
        "kv_len = tl.maximum(room - PAGE_SIZE, 0) + last",
        "tests/test_plan.py::test_lengths_from_last_page_len",
    ),
    Fault(
        "rows-past-the-batch-written",
        "kernels/_common.py",
        "token, kv_head * GROUP + row % GROUP, token < q_len",
        "token, kv_head * GROUP + row % GROUP, token <= q_len",
        "tests/test_attention.py::test_geometry",
    ),
    Fault(
        "plan-of-other-metadata-accepted",
        "tritonattn/plan.py",
        "if given is not None and not _same(given, planned[name]):",
        "if False:",
        "tests/test_attention.py::test_a_plan_refuses_another_step_or_geometry",
    ),
    Fault(
        "merge-reads-empty-states",
        "kernels/merge.py",
        'used_a = mask & (s_a != -float("inf"))[:, None]',
        "used_a = mask",
        "tests/test_merge.py::test_an_empty_state_changes_nothing",
    ),
    Fault(
        "merge-natural-log",
        "kernels/merge.py",
        "w_a = tl.exp2(s_a - m_safe)",
        "w_a = tl.exp(s_a - m_safe)",
        "tests/test_merge.py::test_two_parts_give_the_whole",
    ),
    Fault(
        "merge-mask-ignored",
        "kernels/merge.py",
        "HAS_MASK=mask is not None",
        "HAS_MASK=False",
        "tests/test_merge.py::test_fi_4054_in_place_with_a_mask",
    ),
    Fault(
        "graph-tail-keeps-pages",
        "tritonattn/wrappers/metadata.py",
        "ends[batch_size + 1 :].copy_(ends[batch_size])",
        "pass",
        "tests/test_wrappers_graph_mode.py::test_decode_takes_any_batch_up_to_capacity",
    ),
    Fault(
        "graph-plans-once",
        "tritonattn/wrappers/base.py",
        "if self._buffers is not None or is_capturing(self.device):\n            return",
        "if is_capturing(self.device):\n            return",
        "tests/test_wrappers_graph_mode.py::test_changes_in_place_need_no_plan",
    ),
    Fault(
        "plan-of-another-shape-kept",
        "tritonattn/wrappers/base.py",
        "if self._step is None or self._step[0] != rows:",
        "if self._step is None:",
        "tests/test_wrappers.py::test_given_outputs_and_padding_rows",
    ),
    Fault(
        "fast-plan-copies",
        "tritonattn/decode.py",
        "copy=False,",
        "copy=True,",
        "tests/test_wrappers_graph_mode.py::test_fast_decode_plan_copies_nothing_but_pads",
    ),
    Fault(
        "flashinfer-empty-rows",
        "tritonattn/backends/flashinfer.py",
        "        result.masked_fill_(state.dead.view(shape), empty)",
        "        pass",
        "tests/test_flashinfer_backend.py::test_rows_that_see_no_key_are_repaired",
    ),
    Fault(
        "flashinfer-padding-kept",
        "tritonattn/backends/flashinfer.py",
        "live = (q_lens > 0).nonzero().flatten()",
        "live = (q_lens >= 0).nonzero().flatten()",
        "tests/test_flashinfer_backend.py::test_requests_without_queries_are_left_out",
    ),
    Fault(
        "copy-of-keys-only",
        "kernels/copy_blocks.py",
        "for plane in ((source.k, target.k), (source.v, target.v))",
        "for plane in ((source.k, target.k),)",
        "tests/test_block_ops.py::test_vllm_17362_copy_moves_k_and_v",
    ),
    Fault(
        "copy-page-in-32-bits",
        "kernels/_words.py",
        "page.to(tl.int64) * stride_page",
        "(page.to(tl.int32) * stride_page.to(tl.int32)).to(tl.int64)",
        "tests/test_block_ops.py::test_fi_3130_page_offset_past_32_bits",
    ),
    Fault(
        "copy-of-padded-pairs",
        "kernels/copy_blocks.py",
        "src_exists = (src >= 0) & (src < num_src_pages)",
        "src_exists = src < num_src_pages",
        "tests/test_block_kernels.py::test_padded_pairs_are_skipped",
    ),
    Fault(
        "swap-in-the-other-direction",
        "tritonattn/block_ops.py",
        ".copy_blocks(sources, targets, src_ids, dst_ids)",
        ".copy_blocks(sources, targets, dst_ids, src_ids)",
        "tests/test_block_ops.py::test_fi_527_swap_follows_strides",
    ),
    Fault(
        "outer-stride-of-a-page",
        "kernels/_words.py",
        "(row // INNER).to(tl.int64) * stride_outer",
        "(row // INNER).to(tl.int64) * stride_inner",
        "tests/test_block_ops.py::test_fi_527_copy_follows_strides",
    ),
    Fault(
        "duplicate-targets-accepted",
        "tritonattn/block_checks.py",
        "return ordered[1:][ordered[1:] == ordered[:-1]]",
        "return ordered[:0]",
        "tests/test_block_ops_refusals.py::test_vllm_46345_bad_mappings_are_refused",
    ),
    Fault(
        "chained-targets-accepted",
        "tritonattn/block_checks.py",
        "chained = dst[is_source[dst]]",
        "chained = dst[:0]",
        "tests/test_block_ops_refusals.py::test_vllm_46345_chained_targets_are_refused",
    ),
    Fault(
        "slot-minus-one-written",
        "kernels/append.py",
        "if (slot < 0) | (page >= num_pages):",
        "if page >= num_pages:",
        "tests/test_append.py::test_fi_919_padded_tokens_are_skipped",
    ),
    Fault(
        "append-ignores-indptr-start",
        "kernels/append.py",
        "at = tl.load(kv_indptr_ptr + request)",
        "at = -tl.load(kv_indptr_ptr) + tl.load(kv_indptr_ptr + request)",
        "tests/test_page.py::test_fi_527_append_follows_strides",
    ),
    Fault(
        "append-reinterprets-bytes",
        "tritonattn/block_checks.py",
        "        if tensor.dtype != cache.dtype:",
        "        if tensor.dtype.itemsize > 4:",
        "tests/test_append.py::test_fi_append_into_fp8_is_never_a_reinterpretation",
    ),
    Fault(
        "seq-lens-of-no-pages",
        "tritonattn/page.py",
        "torch.where(pages > 0, lengths, 0)",
        "torch.where(pages >= 0, lengths, 0)",
        "tests/test_page.py::test_seq_lens_of_requests_without_pages",
    ),
    *(Fault(*fault) for fault in PERF_FAULTS + STAGE_FAULTS),
]


def verdict(fault: Fault) -> str:
    """Return "" if the test of a fault catches it, else what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("kernels", "perf", "tritonattn", "tests"):
            shutil.copytree(ROOT / name, copy / name, symlinks=True)
        shutil.copy(ROOT / "pyproject.toml", copy)
        source = copy / fault.file
        text = source.read_text()
        if text.count(fault.right) != 1:
            return f"{fault.right!r} stands {text.count(fault.right)} times in {fault.file}"
        source.write_text(text.replace(fault.right, fault.wrong))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", fault.test]
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path}
        options = {"cwd": copy, "env": environment, "timeout": TIMEOUT_S}
        try:
            run = subprocess.run(command, capture_output=True, text=True, check=False, **options)
        except subprocess.TimeoutExpired:
            return f"{fault.test} took more than {TIMEOUT_S} s"
        if run.returncode == 0:
            return f"{fault.test} passes all the same"
        # A wild address may end the process by a signal: caught as well. 1 is "tests ran and some
        # failed"; anything else (a missing test, a broken import) proves nothing.
        if run.returncode < 0:
            return ""
        if run.returncode != 1 or "ImportError" in run.stdout or "SyntaxError" in run.stdout:
            return f"{fault.test} did not run:\n{run.stdout[-1500:]}{run.stderr[-500:]}"
        return ""


def main() -> int:
    """Plant all faults, or those named; return 1 if one goes unnoticed."""
    parser = argparse.ArgumentParser(description="Plant faults and see that the tests notice.")
    parser.add_argument("name", nargs="*", help="default: all")
    parser.add_argument("--vllm", action="store_true", help="those of the adapter for vLLM")
    args = parser.parse_args()
    known = [Fault(*fault) for fault in VLLM_FAULTS] if args.vllm else FAULTS
    faults = [fault for fault in known if not args.name or fault.name in args.name]
    missed = 0
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for fault, problem in zip(faults, pool.map(verdict, faults), strict=True):
            missed += bool(problem)
            print(
                f"{'MISSED' if problem else 'caught'} {fault.name}: {problem or fault.test}",
                flush=True,
            )
    print(f"{len(faults)} planted, {missed} missed")
    return 1 if missed or not faults else 0


if __name__ == "__main__":
    sys.exit(main())
