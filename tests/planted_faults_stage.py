"""Faults of stage buffers and dispatch; see `planted_faults.py`."""

B, D = "tests/test_buffers.py::", "tests/test_dispatch.py::"

STAGE_FAULTS = [
    (
        "stage-padding-keeps-starts",
        "kernels/stage_metadata.py",
        "tl.load(qo_indptr_ptr + tl.minimum(request + 1, batch_size), mask=first, other=0)",
        "tl.load(qo_indptr_ptr + request + 1, mask=first & live, other=0)",
        B + "test_update_pads_up_to_capacity",
    ),
    (
        "stage-table-pads-with-page-0",
        "kernels/stage_metadata.py",
        "page = tl.load(page_ids_ptr + at, mask=used, other=-1)",
        "page = tl.load(page_ids_ptr + at, mask=used, other=0)",
        B + "test_update_pads_up_to_capacity",
    ),
    (
        "stage-leaves-old-lengths",
        "kernels/stage_metadata.py",
        "tl.store(seq_lens_out_ptr + request, seq_len, mask=first)",
        "tl.store(seq_lens_out_ptr + request, seq_len, mask=first & live)",
        B + "test_a_smaller_step_leaves_nothing_of_a_larger_one",
    ),
    (
        "stage-csr-row-runs-on",
        "kernels/stage_metadata.py",
        "pages = tl.maximum(tl.minimum(end, width) - begin, 0)",
        "pages = width + 0 * request",
        B + "test_update_pads_up_to_capacity",
    ),
    (
        "stage-for-one-tile-only",
        "kernels/_config.py",
        "return [replace(spec, max_q_len=q_len) for q_len in sorted(q_lens)]",
        "return [spec]",
        B + "test_a_stage_holds_whatever_is_within_its_capacity",
    ),
    (
        "stage-planned-over-unnoticed",
        "tritonattn/stage.py",
        "if self._owner is None or self._owner() is not owner:",
        "if self._owner is None:",
        B + "test_a_plan_that_was_planned_over_is_refused",
    ),
    (
        "stage-over-capacity-unnoticed",
        "tritonattn/stage.py",
        "        self._check_batch_size(page_table.batch_size)\n",
        "",
        B + "test_update_refuses_and_leaves_the_stage_alone",
    ),
    (
        "environment-before-context",
        "tritonattn/dispatch.py",
        '    if _context.get() != "auto":\n',
        '    if _context.get() != "auto" and env.backend() == "auto":\n',
        D + "test_the_order_of_those_who_may_choose",
    ),
    (
        "explicit-choice-falls-back",
        "tritonattn/dispatch.py",
        "raise UnsupportedError(decision.refusal)",
        'return "reference"',
        D + "test_an_explicit_choice_does_not_fall_back",
    ),
    (
        "policy-forgets-captures",
        "tritonattn/dispatch.py",
        "if refusal is None and request.capturing:",
        "if False:",
        D + "test_a_graph_gets_what_can_plan_in_it",
    ),
    (
        "ties-go-to-the-peer",
        "tritonattn/policy.py",
        'self.us["triton"] <= TIE * self.us[best]',
        'self.us["triton"] <= self.us[best]',
        D + "test_ties_go_to_triton",
    ),
    (
        "policy-reaches-anywhere",
        "tritonattn/policy.py",
        "if max(octaves) <= REACH else None",
        "if octaves else None",
        D + "test_the_nearest_case",
    ),
]
