"""The command line's frame: help, exit statuses, devices, and what importing it may cost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tritonattn
from tritonattn import cli, env, info
from tritonattn.backends import UnsupportedError

ROOT = Path(__file__).resolve().parent.parent


def python(*args: str, **variables: str | None) -> subprocess.CompletedProcess[str]:
    """Run Python with the project importable, installed or not; None unsets a variable."""
    environ = {**env.with_interpreter(), "PYTHONPATH": str(ROOT), **variables}
    environ = {name: value for name, value in environ.items() if value is not None}
    return subprocess.run(
        [sys.executable, *args],
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    for name, (_, line) in cli.COMMANDS.items():
        assert f"    {name} " in shown
        assert line.split()[0] in shown
    assert "3 something that is" in shown


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_each_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    assert stop.value.code == 0
    assert f"usage: tritonattn {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv", [[], ["nothing"], ["info", "--nothing"], ["demo", "--tokens", "x"]]
)
def test_wrong_arguments(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == cli.USAGE
    assert "usage: tritonattn" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"tritonattn {tritonattn.__version__}\n"


def fake_command(monkeypatch: pytest.MonkeyPatch, run: Any, *, device: bool = False) -> None:
    """Make `tritonattn info` run a function instead."""

    def add_arguments(parser: Any) -> None:
        if device:
            parser.add_argument("--device")

    module = SimpleNamespace(__doc__="A command.", add_arguments=add_arguments, run=run)
    monkeypatch.setitem(sys.modules, "tritonattn.fake", module)
    monkeypatch.setattr(cli, "COMMANDS", {"info": ("tritonattn.fake", "a line")})


def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_command(monkeypatch, lambda args: cli.need("no_such_package.part", "perf"))
    assert cli.main(["info"]) == cli.INCOMPLETE
    shown = capsys.readouterr().err
    assert shown.startswith("tritonattn info: the package 'no_such_package' is needed")
    assert "pip install 'tritonattn[perf]'" in shown


def test_need_returns_the_module() -> None:
    assert cli.need("json", "perf") is json


def test_the_status_of_a_command_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_command(monkeypatch, lambda args: 7)
    assert cli.main(["info"]) == 7


def test_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: Any) -> int:
        raise KeyboardInterrupt

    fake_command(monkeypatch, run)
    assert cli.main(["info"]) == 130


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: Any) -> int:
        raise ImportError("a bug of ours")

    fake_command(monkeypatch, run)
    with pytest.raises(ImportError, match="a bug of ours"):
        cli.main(["info"])


def test_a_refusal_of_a_backend_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: Any) -> int:
        raise UnsupportedError("the triton backend cannot do this")

    fake_command(monkeypatch, run)
    assert cli.main(["info"]) == cli.USAGE
    assert capsys.readouterr().err == "tritonattn info: the triton backend cannot do this\n"


def test_a_wrong_flag_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITONATTN_VALIDATE", "maybe")
    assert cli.main(["info"]) == cli.USAGE
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "tritonattn info: TRITONATTN_VALIDATE must be 0 or 1, got 'maybe'\n"


@pytest.mark.parametrize(("given", "chosen"), [([], "cpu"), (["--device", "cpu"], "cpu")])
def test_device_without_a_gpu(
    given: list[str], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(env, "INTERPRET", True)
    fake_command(monkeypatch, lambda args: seen.append(args.device) or 0, device=True)
    assert cli.main(["info", *given]) == 0
    assert seen == [chosen]


def test_device_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(env, "INTERPRET", False)
    assert cli.choose_device(None) == "cuda"
    assert cli.choose_device("cuda:1") == "cuda:1"
    with pytest.raises(cli.UsageError, match=r"cuda:2 is not there: torch sees 2 GPU"):
        cli.choose_device("cuda:2")
    monkeypatch.setattr(env, "INTERPRET", True)
    assert cli.choose_device(None) == "cpu"
    with pytest.raises(cli.UsageError, match="TRITON_INTERPRET=1 is for the CPU"):
        cli.choose_device("cuda")


@pytest.mark.parametrize("name", ["nonsense", "meta", "cuda:x"])
def test_unknown_device(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_command(monkeypatch, lambda args: 0, device=True)
    assert cli.main(["info", "--device", name]) == cli.USAGE
    assert f"must be cuda, cuda:N or cpu, got '{name}'" in capsys.readouterr().err


def test_missing_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(cli.UsageError, match=r"cuda is not there: torch sees 0 GPU\(s\)"):
        cli.choose_device("cuda")


def test_no_restart_in_somebody_elses_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "INTERPRET", False)
    monkeypatch.setattr(cli.os, "execve", lambda *args: pytest.fail("restarted"))
    with pytest.raises(cli.UsageError, match="TRITON_INTERPRET=1 set from the start"):
        cli.choose_device("cpu")


def test_restart_from_the_shell_keeps_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(env, "INTERPRET", False)
    monkeypatch.setattr(sys, "argv", ["/x/tritonattn", "demo", "--device", "cpu"])
    monkeypatch.setattr(cli.os, "execve", lambda *args: calls.append(args))
    cli.choose_device("cpu", from_shell=True)
    ((program, command, environ),) = calls
    assert program == sys.executable
    assert command == [sys.executable, "-m", "tritonattn", "demo", "--device", "cpu"]
    assert environ["TRITON_INTERPRET"] == "1"


def test_info_in_a_process_of_its_own(tmp_path: Path) -> None:
    done = python("-m", "tritonattn", "info", "--json", TRITONATTN_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["tritonattn"] == tritonattn.__version__
    assert facts["torch"] == torch.__version__
    assert facts["cache folder"] == str(tmp_path)
    assert "reference" in facts["backends"]
    assert ("triton" in facts["backends"]) == (
        facts["TRITON_INTERPRET"] == "1" or bool(facts["devices"])
    )


def test_help_imports_nothing_heavy() -> None:
    """Neither engines, nor what extras bring, nor Triton, which fixes TRITON_INTERPRET."""
    code = (
        "import sys; from tritonattn import cli; cli.build_parser(); "
        "print([m for m in ('transformers', 'pandas', 'triton', 'flashinfer') if m in sys.modules])"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_cache_dir_follows_the_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TRITONATTN_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    expected = {
        "linux": tmp_path / "xdg" / "tritonattn",
        "darwin": tmp_path / "Library" / "Caches" / "tritonattn",
        "win32": tmp_path / "local" / "tritonattn",
    }
    for platform, folder in expected.items():
        monkeypatch.setattr(env.sys, "platform", platform)
        assert env.cache_dir() == folder
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(env.sys, "platform", "linux")
    assert env.cache_dir() == tmp_path / ".cache" / "tritonattn"
    monkeypatch.setenv("TRITONATTN_CACHE_DIR", str(tmp_path / "own"))
    assert env.cache_dir() == tmp_path / "own"


def test_size_of_stage_buffers(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--json", "--size", f"{info.SIZE_EXAMPLE},device=cpu"]) == cli.OK
    shown = json.loads(capsys.readouterr().out)
    size = tritonattn.PipelineBuffers.size_bytes(
        num_stages=4, max_batch_size=512, max_num_tokens=8192, max_pages_per_request=2048,
        num_qo_heads=32, num_kv_heads=8, head_dim=128, page_size=16, dtype=torch.bfloat16,
        device="cpu",
    )  # fmt: skip
    assert shown == {
        "device": "cpu",
        "bytes": size,
        "bytes of a stage": size // 4,
        "MiB": round(size / 2**20, 2),
    }
    # Tables alone take batch x pages x 4 bytes in each stage.
    assert size > 4 * 512 * 2048 * 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("num_stages=4", "missing: max_batch_size"),
        (info.SIZE_EXAMPLE + ",color=red", "unknown: color"),
        (info.SIZE_EXAMPLE.replace("bf16", "int8"), "dtype must be one of bf16, fp16, fp32"),
        (info.SIZE_EXAMPLE.replace("stages=4", "stages=0"), "num_stages must be at least 1"),
        (info.SIZE_EXAMPLE.replace("512", "many"), "--size: invalid literal"),
    ],
)
def test_sizes_that_are_none(text: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--size", text]) == cli.USAGE
    assert said in capsys.readouterr().err
