"""The faults that `planted_faults.py` plants in the performance sweep.

Each is (name, file, what is right there, what is planted, the test that must notice).
"""

from __future__ import annotations

PERF_FAULTS = [
    (
        "gate-always-accepts",
        "perf/steps.py",
        '        """Return what is wrong, or None. NaN is wrong."""\n',
        '        """Return what is wrong, or None. NaN is wrong."""\n        return None\n',
        "tests/test_perf_steps.py::test_one_wrong_row_among_many",
    ),
    (
        "gate-looks-at-the-mean",
        "perf/steps.py",
        "(error.norm(dim=-1) / norms.clamp(min=floor)).max()",
        "(error.norm(dim=-1) / norms.clamp(min=floor)).mean()",
        "tests/test_perf_steps.py::test_one_wrong_row_among_many",
    ),
    (
        "gate-without-rms",
        "perf/steps.py",
        "if not self.rms_rel <= MAX_RMS_STEPS * self.step:",
        "if self.rms_rel == math.inf:",
        "tests/test_perf_steps.py::test_both_bounds_count",
    ),
    (
        "outputs-not-poisoned",
        "perf/measure.py",
        "        step.poison()\n        result = calls[0]()",
        "        result = calls[0]()",
        "tests/test_perf_measure.py::test_what_was_not_written_is_wrong",
    ),
    (
        "cold-uses-one-layer",
        "perf/measure.py",
        "calls = side.calls if cold else side.calls[:1]",
        "calls = side.calls[:1]",
        "tests/test_perf_measure.py::test_cold_goes_round_all_layers_and_warm_stays",
    ),
    (
        "cold-layers-share-memory",
        "perf/steps.py",
        "layer.kv_cache.clone()",
        "layer.kv_cache",
        "tests/test_perf_steps.py::test_cold_layers_are_apart_in_memory",
    ),
    (
        "graph-not-checked",
        "perf/measure.py",
        "accuracy = step.check(results[0])",
        "accuracy = side.accuracy",
        "tests/test_perf_measure_graphs.py::test_a_graph_that_gives_another_result_is_wrong",
    ),
    (
        "one-side-after-the-other",
        "perf/timing.py",
        "    for _ in range(n):\n        for name, unit in units.items():",
        "    for name, unit in units.items():\n        for _ in range(n):",
        "tests/test_perf_timing.py::test_sides_take_turns",
    ),
    (
        "one-failure-fails-all",
        "perf/measure.py",
        "            del units[error.name]\n",
        "            units.clear()\n",
        "tests/test_perf_measure.py::test_a_call_that_fails_late_takes_nobody_along",
    ),
    (
        "roofs-swapped",
        "perf/steps.py",
        "self.bytes / (roofs.read_gbps * 1e9)",
        "self.bytes / (roofs.copy_gbps * 1e9)",
        "tests/test_perf_measure.py::test_figures_by_hand",
    ),
    (
        "torn-line-kept",
        "perf/schema.py",
        'return data[: data.rfind(b"\\n") + 1]',
        "return data",
        "tests/test_perf_schema.py::test_a_torn_last_line_is_dropped",
    ),
    (
        "budget-ignored",
        "perf/sweep.py",
        "time.monotonic() - begin > settings.budget_s",
        "time.monotonic() < begin",
        "tests/test_perf_sweep.py::test_a_budget_of_nothing",
    ),
    (
        "not-run-rows-kept",
        "perf/sweep.py",
        'frame = frame[frame["status"] != schema.NOT_RUN]',
        "frame = frame[:]",
        "tests/test_perf_sweep.py::test_a_budget_of_nothing",
    ),
    (
        "layout-of-the-plan-forgotten",
        "perf/providers/ours.py",
        "            kv_layout=step.kv_layout,\n",
        "",
        "tests/test_perf_providers.py::test_ours_and_the_reference",
    ),
]
