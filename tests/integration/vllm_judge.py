"""What is wrong with the tokens of a vLLM engine, beside those of FLASH_ATTN.

Greedy tokens must be the same up to the first near tie: a position where FLASH_ATTN's own two best
logits are within `NEAR_TIE` (one rounding step of bf16 for logits of 16 to 32) and the other token
is one of these two. No more answers may end in ties than `TIES` times those of a control, another
backend of vLLM's own.
"""

from __future__ import annotations

from typing import Any

NEAR_TIE = 0.125
TIES = 2.0
SPARE_TIES = 3
# Of a prompt of 1,500 tokens that was asked before.
CACHED = 1400

Row = dict[str, Any]


def difference(expected: Row, got: Row) -> tuple[int, str] | None:
    """Return where two answers part, and what is wrong there, empty for a near tie."""
    for at, (a, b) in enumerate(zip(expected["ids"], got["ids"], strict=False)):
        if a == b:
            continue
        first, second, gap = expected["tops"][at]
        if b not in (first, second):
            return at, f"token {b} at {at} is none of the two best"
        return at, "" if gap <= NEAR_TIE else f"at {at} the two best are {gap} apart"
    if len(expected["ids"]) != len(got["ids"]):
        return len(got["ids"]), "another number of tokens"
    return None


def compare(name: str, expected: list[Row], got: list[Row]) -> tuple[list[str], int]:
    """Return what is wrong with answers, and how many end in a near tie."""
    if not expected or len(expected) != len(got):
        return [f"{name}: {len(got)} answers, expected {len(expected)}"], 0
    found = [difference(a, b) for a, b in zip(expected, got, strict=True)]
    wrong = [f"{name} {i}: {one[1]}" for i, one in enumerate(found) if one is not None and one[1]]
    return wrong, sum(one is not None for one in found)


def answers(results: dict[str, Any], baseline: dict[str, Any]) -> tuple[list[str], int]:
    """Compare all answers that both have reason to give."""
    rows = baseline.get("rows", [])
    wanted = {"rows": rows, "many": rows[1:9] * 32, "facts": baseline.get("facts", [])}
    wanted["facts again"] = wanted["facts"]
    wrong: list[str] = []
    ties = 0
    for name, expected in wanted.items():
        if name in results:
            more, some = compare(name, expected, results[name])
            wrong += more
            ties += some
    return wrong, ties


def judge(
    run: Any,
    results: dict[str, Any],
    log: str,
    baseline: dict[str, Any],
    control: dict[str, Any],
) -> list[str]:
    """Return what is wrong with a run of `vllm_backends`."""
    wrong = [] if results.get("done") else ["did not end"]
    wrong += [f"no {part}" for part in run.parts if part not in results]
    more, ties = answers(results, baseline)
    wrong += more
    _, allowed = answers(control, baseline)
    if ties > TIES * allowed + SPARE_TIES:
        wrong.append(f"{ties} answers end in near ties, of the control {allowed}")
    if run.backend != "CUSTOM":
        return wrong
    if "tritonattn serves" not in log:
        wrong.append("tritonattn's line is not in the log")
    calls = results.get("calls", {})
    if run.watched:
        counted = ("build", "forward", "do_kv_cache_update")
        wrong += [f"{name} was not called" for name in counted if not calls.get(name)]
    if run.long_queries and not calls.get("long queries in a graph"):
        wrong.append("no graph held a step of several tokens a request")
    if "profile" in run.parts:
        profile = results.get("profile", {})
        if not profile.get("calls") or not profile.get("waits in all"):
            wrong.append("the profile saw nothing")
        wrong += [f"{name} inside the backend" for name in profile.get("waits inside", [])]
    if run.engine.get("enable_prefix_caching") and "facts" in run.parts:
        cached = [row["cached"] or 0 for row in results.get("facts again", [])]
        if not cached or min(cached) < CACHED:
            wrong.append(f"of the prompts asked again {cached} tokens were cached")
    if "twice" in run.parts and (results.get("twice") or [{}])[-1].get("cached", 0) < CACHED:
        wrong.append("the prefix cache was not used")
    if run.engine.get("kv_offloading_size"):
        loads = results.get("transfers", {}).get("to the GPU", 0)
        if loads < len(results.get("facts again", [])) or not loads:
            wrong.append(f"{loads} transfers from the CPU")
    return wrong
