"""`tritonattn tune`: a policy from a sweep."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tritonattn import cli, dispatch, env, load_policy
from tritonattn.perf import schema, tune
from tritonattn.policy import Entry, read_policy


def row(case: str, provider: str, ms: float | None, **fields: Any) -> dict[str, Any]:
    facts = {
        "case": case, "provider": provider, "ms_p50": ms, "max_q_len": 1, "dtype": "bf16",
        "head_dim": 128, "num_qo_heads": 32, "num_kv_heads": 8, "batch_size": 4,
        "max_kv_len": 100, "status": schema.OK if ms else schema.UNSUPPORTED,
    }  # fmt: skip
    return facts | fields


def test_entries_by_hand() -> None:
    frame = schema.to_frame([
        row("a", "triton", 0.050, plan_us=320.0),
        row("a", "flashinfer", 0.049, plan_us=640.0),
        row("b", "triton", 0.010, max_q_len=5, batch_size=2),
        row("b", "flashinfer", None),
        row("c", "triton", 1.0, max_q_len=512, head_dim=64, max_kv_len=900),
        row("c", "flashinfer", 0.5, max_q_len=512, head_dim=64, max_kv_len=900),
        row("d", "triton", None),
    ])  # fmt: skip
    first, second, third = tune.entries_of(frame, num_layers=32)
    assert first.us == pytest.approx({"triton": 60.0, "flashinfer": 69.0})
    assert (first.op, first.batch_size, first.kv_len, first.head_dim) == ("decode", 4, 100, 128)
    assert first.winner == ("triton", pytest.approx(69.0 / 60.0))
    # Over more layers the plan weighs less: 51 and 50 us, which is a tie.
    (few, *_) = tune.entries_of(frame, num_layers=320)
    assert few.us == pytest.approx({"triton": 51.0, "flashinfer": 51.0})
    assert (second.op, second.us) == ("short", pytest.approx({"triton": 10.0}))
    assert (third.op, third.head_dim, third.winner) == ("prefill", 64, ("flashinfer", 2.0))


def test_what_auto_loses_by_hand() -> None:
    entry = Entry("decode", "bf16", 128, 32, 8, 4, 100, {"triton": 10.0, "a": 8.0, "auto": 9.0})
    alone = replace(entry, us={"auto": 3.0})
    unmeasured = replace(entry, us={"triton": 10.0})
    assert tune.lost_by_auto([entry, alone, unmeasured]) == [(9.0 / 8.0, str(entry))]


def test_a_backend_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be measured as auto."""
    monkeypatch.setenv("TRITONATTN_BACKEND", "reference")
    assert cli.main(["tune", "--out", str(tmp_path / "p.json")]) == cli.USAGE
    assert "TRITONATTN_BACKEND asks for reference" in capsys.readouterr().err


@pytest.mark.skipif(not env.INTERPRET, reason="kernels take CPU tensors in the interpreter only")
def test_the_command_writes_a_policy_that_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "policy.json"
    command = ["tune", "--suite", "latency", "--out", str(path), "--quick"]
    assert cli.main([*command, "--check", str(tmp_path / "check")]) == cli.OK
    shown = capsys.readouterr().out
    assert "decode of 1 x 16 keys, 4/2 heads of 16, bf16: triton, alone" in shown
    assert f"TRITONATTN_POLICY={path}" in shown
    assert f"auto with {path}: " in shown
    assert "times the time of each case's best backend, at worst " in shown
    checked = schema.read_results(tmp_path / "check" / "results.csv")
    auto = checked[(checked["provider"] == "auto") & (checked["status"] == schema.OK)]
    assert len(auto) == 2
    assert dispatch.installed_policy() is None
    policy = read_policy(path)
    assert [entry.kv_len for entry in policy.entries] == [16, 32]
    assert all(set(entry.us) == {"triton"} for entry in policy.entries)
    assert policy.environment["gpu"] == "none"
    try:
        assert load_policy(path) is dispatch.current_policy()
    finally:
        load_policy(None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--layers", "0"], "--layers must be at least 1, got 0"), (["--suite", "host"], "invalid")],
)
def test_what_is_refused(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["tune", "--out", str(tmp_path / "p.json"), "--device", "cpu", *arguments]
    try:
        status = cli.main(argv)
    except SystemExit as error:
        status = error.code
    assert status == cli.USAGE
    assert said in capsys.readouterr().err
