"""Which backend takes a call: the order of those who may choose, policies, reasons."""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import tritonattn
from tritonattn import dispatch, env, load_policy, use_backend
from tritonattn import policy as policy_module
from tritonattn.backends import BACKENDS, FLASHINFER_KERNELS, UnsupportedError, get_backend
from tritonattn.cases import AttentionCase, make_inputs
from tritonattn.graph_step import GraphStep
from tritonattn.policy import Entry, Policy, read_policy, write_policy
from tritonattn.spec import AttentionSpec

INTERPRETED = pytest.mark.skipif(not env.INTERPRET, reason="triton needs the interpreter here")
SPEC = AttentionSpec(
    device=torch.device("cpu"), q_dtype=torch.bfloat16, kv_dtype=torch.bfloat16, num_qo_heads=32,
    num_kv_heads=8, head_dim_qk=128, head_dim_vo=128, page_size=16, batch_size=8, total_q=8,
    max_q_len=1, max_kv_len=4096, is_csr=False, causal=True,
)  # fmt: skip
HERE = {"gpu": "none"}


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Start and end without a choice of the environment or a policy."""
    for name in ("TRITONATTN_BACKEND", "TRITONATTN_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for cached in (dispatch.decide, dispatch._policy_of_environment, dispatch._log_once):
        cached.cache_clear()
    yield
    load_policy(None)
    for cached in (dispatch.decide, dispatch._policy_of_environment):
        cached.cache_clear()


def entry(batch_size: int = 8, kv_len: int = 4096, **fields: Any) -> Entry:
    values = {
        "op": "decode", "dtype": "bf16", "head_dim": 128, "num_qo_heads": 32, "num_kv_heads": 8,
        "us": {"triton": 50.0, "flashinfer": 40.0},
    }  # fmt: skip
    return Entry(batch_size=batch_size, kv_len=kv_len, **values | fields)


def written(path: Path, *entries: Entry, **environment: str) -> Path:
    write_policy(path, HERE | environment, entries)
    return path


@pytest.fixture
def willing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let FlashInfer take CPU tensors, as far as dispatch is concerned."""
    monkeypatch.setattr(type(get_backend("flashinfer")), "refusal", lambda self, spec: None)


@INTERPRETED
def test_the_order_of_those_who_may_choose(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, willing: None
) -> None:
    reasons = []

    def chosen(backend: str = "auto") -> str:
        reasons.append(dispatch.explain_spec(SPEC, backend).reason)
        return dispatch.choose(SPEC, backend)

    assert chosen() == "triton"
    load_policy(written(tmp_path / "p.json", entry()))
    assert chosen() == "flashinfer"
    monkeypatch.setenv("TRITONATTN_BACKEND", "reference")
    assert chosen() == "reference"
    with use_backend("triton"):
        assert chosen() == "triton"
        assert chosen("flashinfer") == "flashinfer"
        with use_backend("auto"):
            assert chosen() == "reference"
    assert reasons[0] == "auto is triton without a measured policy"
    assert reasons[1].startswith("flashinfer was 1.25 times as fast in the nearest case of ")
    assert reasons[1].endswith("decode of 8 x 4096 keys, 32/8 heads of 128, bf16")
    assert reasons[2:] == [
        "chosen by TRITONATTN_BACKEND", "chosen by use_backend", "chosen by the backend argument",
        "chosen by TRITONATTN_BACKEND",
    ]  # fmt: skip


@pytest.mark.parametrize("how", ["argument", "context", "environment"])
def test_an_explicit_choice_does_not_fall_back(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(AttentionCase((1, 1), (5, 9), 4, 2, 16, page_size=4))
    out = torch.full_like(inputs.q, 7.0)
    arguments: dict[str, Any] = {**inputs.arguments(), "out": out}
    if how == "environment":
        monkeypatch.setenv("TRITONATTN_BACKEND", "flashinfer")

    def context() -> Any:
        return use_backend("flashinfer" if how == "context" else "auto")

    if how == "argument":
        arguments["backend"] = "flashinfer"
    with context(), pytest.raises(UnsupportedError, match="flashinfer backend needs CUDA tensors"):
        tritonattn.paged_attention(**arguments)
    assert (out == 7.0).all()
    with context():
        explained = tritonattn.explain(**{k: v for k, v in arguments.items() if k != "out"})
    assert explained.backend is None
    assert "needs CUDA tensors" in explained.reason
    assert set(explained.verdicts) == {*BACKENDS, *FLASHINFER_KERNELS}


def test_names_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(ValueError, match=r"backend must be one of .*, got 'cuda'"),
        use_backend("cuda"),
    ):
        pass
    monkeypatch.setenv("TRITONATTN_BACKEND", "cuda")
    with pytest.raises(ValueError, match=r"TRITONATTN_BACKEND must be one of .*, got 'cuda'"):
        dispatch.choose(SPEC)


def test_a_context_is_of_its_thread_and_ends_with_an_error() -> None:
    seen: list[tuple[str, str]] = []
    with use_backend("reference"):
        thread = threading.Thread(target=lambda: seen.append(dispatch.asked()))
        thread.start()
        thread.join()
    assert seen == [("auto", "")]
    with pytest.raises(ZeroDivisionError), use_backend("reference"):
        raise ZeroDivisionError
    assert dispatch.asked() == ("auto", "")


@INTERPRETED
def test_a_policy_gives_way_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_policy(written(tmp_path / "p.json", entry()))
    with caplog.at_level(logging.INFO, "tritonattn"):
        # Another number of rows is another call, but no news.
        for total_q in (8, 9, 10, 8):
            assert dispatch.choose(dataclasses.replace(SPEC, total_q=total_q)) == "triton"
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.startswith("auto falls back to triton: the flashinfer backend needs CUDA")
    assert dispatch.explain_spec(SPEC).backend == "triton"


@INTERPRETED
def test_a_graph_gets_what_can_plan_in_it(tmp_path: Path, willing: None) -> None:
    load_policy(written(tmp_path / "p.json", entry(), entry(op="short")))
    assert dispatch.choose(SPEC) == "flashinfer"
    for how, spec, why in (
        ("plain", SPEC, "plans on the host, which a CUDA graph cannot repeat: capture by stage"),
        ("replanned", dataclasses.replace(SPEC, max_q_len=8), "take their grid from the lengths"),
    ):
        request = dispatch.Request(spec, "auto", "", dispatch.current_policy(), how)
        decision = dispatch.decide(request)
        assert decision.backend == "triton"
        assert why in decision.reason
        refusal = dispatch.decide(dispatch.Request(spec, "flashinfer", "he", None, how)).refusal
        assert refusal is not None
        assert why in refusal


def test_the_nearest_case() -> None:
    entries = (
        entry(8, 4096), entry(64, 4096), entry(8, 65536), entry(8, 4096, op="prefill"),
        entry(8, 4096, dtype="fp16"), entry(8, 4096, head_dim=64),
        entry(8, 4096, num_qo_heads=8, num_kv_heads=1),
    )  # fmt: skip
    policy = Policy("p", {}, entries)

    def nearest(**changes: Any) -> int | None:
        found = policy.nearest(dataclasses.replace(SPEC, **changes))
        return None if found is None else entries.index(found)

    assert nearest() == 0
    assert nearest(batch_size=40) == 1
    assert nearest(batch_size=20) == 0  # 1.3 octaves to 8, 1.7 to 64
    assert nearest(max_kv_len=40000) == 2
    assert nearest(max_q_len=512) == 3
    assert nearest(q_dtype=torch.float16) == 4
    assert nearest(head_dim_qk=64) == 5
    assert nearest(num_qo_heads=8, num_kv_heads=1) == 6
    assert nearest(max_q_len=5) is None
    assert nearest(head_dim_qk=96) is None
    assert nearest(batch_size=257) is None  # a little more than two octaves above 64
    assert nearest(batch_size=256) == 1
    assert nearest(max_kv_len=1023) is None
    assert nearest(batch_size=0, max_kv_len=0) is None


@pytest.mark.parametrize(
    ("us", "winner", "margin"),
    [
        ({"triton": 50.0, "flashinfer": 40.0}, "flashinfer", 1.25),
        ({"triton": 40.0, "flashinfer": 50.0}, "triton", 1.25),
        ({"triton": 40.8, "flashinfer": 40.0}, "triton", 40.0 / 40.8),  # a tie
        ({"triton": 40.9, "flashinfer": 40.0}, "flashinfer", 40.9 / 40.0),
        ({"flashinfer": 3.0}, "flashinfer", float("inf")),
    ],
)
def test_ties_go_to_triton(us: dict[str, float], winner: str, margin: float) -> None:
    found, by = entry(us=us).winner
    assert found == winner
    assert by == pytest.approx(margin)


def test_a_policy_comes_back_from_its_file(tmp_path: Path) -> None:
    entries = (entry(), entry(64, 1, us={"triton": 1.25}))
    path = written(tmp_path / "p.json", *entries, triton="3.6.0")
    found = read_policy(path)
    assert found.entries == entries
    assert found.environment == {"gpu": "none", "triton": "3.6.0"}
    assert len(path.read_text().splitlines()) == len(entries) + 2
    assert load_policy(str(path)) is dispatch.current_policy()
    assert load_policy(None) is dispatch.current_policy() is None


def policy_text(changes: dict[str, Any], gpu: str = "none", whole: bool = True) -> str:
    """Return the text of a policy with one entry."""
    one = dataclasses.asdict(entry()) | changes if whole else changes
    environment = {"gpu": gpu} if gpu else {}
    return json.dumps({"format": 1, "environment": environment, "entries": [one]})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is no policy"),
        ("[]", "is no policy"),
        ("{}", "is no policy: 'format'"),
        (json.dumps({"format": 2, "environment": {}, "entries": []}), "its format is 2, 1 is"),
        (policy_text({"op": "decode"}, whole=False), "is no policy"),
        (policy_text({}, gpu=""), "does not say which GPU"),
        (policy_text({"us": {}}), "has no times"),
        (policy_text({"us": {"triton": 0.0}}), "has no times"),
        (policy_text({"us": {"triton": float("inf")}}), "has no times"),
        (policy_text({"us": {"cutlass": 1.0}}), r"names the backends \['cutlass'\]"),
        (policy_text({"batch_size": "2"}), "no positive integer"),
        (policy_text({"num_qo_heads": None}), "no positive integer"),
        (policy_text({"op": "decoding"}), "an op or a dtype that is unknown"),
    ],
)  # fmt: skip
def test_files_that_are_no_policy(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=said):
        load_policy(path)
    with pytest.raises(ValueError, match="is no policy"):
        load_policy(tmp_path / "absent.json")
    assert dispatch.current_policy() is None


@INTERPRETED
def test_a_policy_of_another_gpu_or_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, willing: None
) -> None:
    path = written(tmp_path / "p.json", entry(), gpu="NVIDIA A100")
    monkeypatch.setenv("TRITONATTN_POLICY", str(path))
    explained = dispatch.explain_spec(SPEC)
    assert explained.backend == "triton"
    assert "was measured with gpu NVIDIA A100, here it is none" in explained.reason
    assert policy_module.environment_of(torch.device("cpu"))["gpu"] == "none"
    # Asked for by a call of `load_policy`, it is refused; where there is a GPU to compare with.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(dispatch, "environment_of", lambda device: {"gpu": "NVIDIA H200"})
    with pytest.raises(ValueError, match=r"A100, here it is NVIDIA H200: run `tritonattn tune`"):
        load_policy(path)


@INTERPRETED
def test_a_policy_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, willing: None
) -> None:
    monkeypatch.setenv("TRITONATTN_POLICY", str(written(tmp_path / "p.json", entry())))
    assert dispatch.choose(SPEC) == "flashinfer"
    load_policy(written(tmp_path / "q.json", entry(us={"triton": 1.0, "flashinfer": 2.0})))
    assert dispatch.choose(SPEC) == "triton"


@INTERPRETED
def test_a_file_of_the_environment_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITONATTN_POLICY", "/nowhere/policy.json")
    explained = dispatch.explain_spec(SPEC)
    assert explained.backend == dispatch.choose(SPEC) == "triton"
    assert "TRITONATTN_POLICY is ignored: /nowhere/policy.json is no policy" in explained.reason


@INTERPRETED
def test_a_warm_up_chooses_as_its_capture(tmp_path: Path, willing: None) -> None:
    load_policy(written(tmp_path / "p.json", entry(), entry(op="short")))
    short = dataclasses.replace(SPEC, max_q_len=8)
    assert dispatch.choose(short) == "flashinfer"
    step = GraphStep({})
    with step.run():
        assert dispatch.choose(short) == "triton"
        # What stage.capture plans anew before each replay may be captured.
        assert dispatch.choose(SPEC) == "flashinfer"
        verdicts = dispatch.explain_spec(short).verdicts
        assert "capture decode with max_q_len=1" in verdicts["flashinfer:fa2"]
        # A replay plans before all that it does: not for what the step writes.
        step.metadata_is_written()
        assert dispatch.choose(SPEC) == "triton"
    with step.run():
        assert dispatch.choose(SPEC) == "flashinfer"


@INTERPRETED
def test_the_next_best_is_taken(tmp_path: Path, willing: None) -> None:
    """A graph holds no fa2, however fast it was; what it holds comes before triton."""
    times = {"triton": 50.0, "flashinfer:tc": 40.1, "flashinfer:fa2": 40.0}
    load_policy(written(tmp_path / "p.json", entry(us=times)))
    assert dispatch.choose(SPEC) == "flashinfer:fa2"
    with GraphStep({}).run():
        explained = dispatch.explain_spec(SPEC)
    assert explained.backend == "flashinfer:tc"
    assert explained.reason.startswith("auto falls back to flashinfer:tc: FlashInfer's prefill")


def test_a_planned_step_keeps_its_backend(tmp_path: Path, willing: None) -> None:
    """Its layers ask nothing, unless they ask for another by name."""
    load_policy(written(tmp_path / "p.json", entry()))
    assert dispatch.choose(SPEC, planned="reference") == "reference"
    assert dispatch.choose(SPEC, "triton" if env.INTERPRET else "flashinfer", "reference") != (
        "reference"
    )
    with use_backend("flashinfer"):
        assert dispatch.choose(SPEC, planned="reference") == "flashinfer"


@INTERPRETED
def test_choices_are_recorded() -> None:
    inputs = make_inputs(AttentionCase((1, 1), (5, 9), 4, 2, 16, page_size=4))
    with dispatch.record() as choices, use_backend("reference"):
        tritonattn.paged_attention(**inputs.arguments())
        tritonattn.paged_attention(**inputs.arguments(), backend="triton")
    tritonattn.paged_attention(**inputs.arguments())
    assert [(c.asked, c.backend) for c in choices] == [
        (("reference", "use_backend"), "reference"),
        (("triton", "the backend argument"), "triton"),
    ]


def test_policies_that_ship(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in policy_module.shipped():
        assert read_policy(name).environment["gpu"].endswith(name.upper())
    written(tmp_path / "here.json", entry())
    monkeypatch.setattr(policy_module, "_SHIPPED", tmp_path)
    assert read_policy("here").entries == (entry(),)
    with pytest.raises(ValueError, match="nor a policy that ships: these do: here"):
        read_policy("there")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_policy("~/here.json") is dispatch.installed_policy()


def test_a_policy_names_no_backend_that_lacks_lse(tmp_path: Path) -> None:
    path = written(tmp_path / "p.json", entry(us={"triton": 2.0, "flashinfer:xqa": 1.0}))
    with pytest.raises(ValueError, match="names flashinfer:xqa, which gives no LSE"):
        read_policy(path)
