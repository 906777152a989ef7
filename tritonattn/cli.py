"""The command line: `python -m tritonattn COMMAND`, or `tritonattn COMMAND` where it is installed.

A command is a module with `add_arguments(parser)` and `run(args)`, which returns an exit status,
and a line in `COMMANDS`. All modules are imported for any command line, so they import what is
heavy or optional inside their functions, through `need`. A command with `--device` finds the
device of its kernels in `args.device`, a string that is never empty: see `choose_device`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

import torch

from tritonattn import __version__, env
from tritonattn.backends import UnsupportedError

# name -> module, line of help
COMMANDS = {
    "demo": ("tritonattn.demo", "a real language model on our kernels, beside torch's attention"),
    "diff": ("tritonattn.diff.grid", "a grid of cases against a second implementation and fp64"),
    "sweep": ("tritonattn.perf.sweep", "a suite of performance cases, with every peer there is"),
    "report": ("tritonattn.perf.report", "what sweeps found, as Markdown, a page and pictures"),
    "compare": ("tritonattn.perf.compare", "two sets of sweeps, or this checkout with a commit"),
    "tune": ("tritonattn.perf.tune", "measure which backend is faster where, write the policy"),
    "info": ("tritonattn.info", "versions, devices, backends and settings"),
}

OK = 0
FAILED = 1  # a check failed, or a run did
USAGE = 2  # what argparse uses
INCOMPLETE = (
    3  # something that the command needs is not there; the message says what and how to get it
)


class UsageError(ValueError):
    """The command line asks for something that cannot be done here."""


class RestartError(RuntimeError):
    """A process that cannot go on, where the same command in a new one can; nothing is lost."""


class MissingExtraError(ImportError):
    """A package is not installed; the message says which extra brings it."""


def need(package: str, extra: str) -> ModuleType:
    """Import a package of an extra; raise `MissingExtraError` with the command that installs it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingExtraError(
            f"the package {package.partition('.')[0]!r} is needed ({error}): "
            f"pip install 'tritonattn[{extra}]'"
        ) from error


def choose_device(name: str | None, *, from_shell: bool = False) -> str:
    """Return the device to run kernels on: the one named, or the GPU if there is one.

    On the CPU the kernels need Triton's interpreter, which a process chooses before it imports
    Triton: a process started `from_shell` then starts over with `TRITON_INTERPRET=1`, and this
    does not return.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() and not env.INTERPRET else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cuda", "cpu"):
        raise UsageError(f"--device must be cuda, cuda:N or cpu, got {name!r}")
    if device.type == "cuda":
        _check_gpu(device)
    elif not env.INTERPRET:
        if not from_shell:
            raise UsageError(
                "kernels run on the CPU only with TRITON_INTERPRET=1 set from the start"
            )
        sys.stdout.flush()
        command = [sys.executable, "-m", "tritonattn", *sys.argv[1:]]
        os.execve(sys.executable, command, env.with_interpreter())
    return name


def _check_gpu(device: torch.device) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise UsageError(f"--device {device} is not there: torch sees {count} GPU(s)")
    if env.INTERPRET:
        raise UsageError(
            "TRITON_INTERPRET=1 is for the CPU: unset it to use the GPU, or pass --device cpu"
        )


def _check_flags() -> None:
    """Refuse a flag that is neither 0 nor 1 before a command meets it halfway."""
    try:
        env.validate_values()
    except ValueError as error:
        raise UsageError(str(error)) from error


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="tritonattn",
        description="Paged attention and KV-cache block operations as Triton kernels.",
        epilog=f"Exit status: {OK} fine, {FAILED} a check failed, {USAGE} wrong arguments, "
        f"{INCOMPLETE} something that is needed is not installed.",
    )
    parser.add_argument("--version", action="version", version=f"tritonattn {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module_name, line) in COMMANDS.items():
        module = importlib.import_module(module_name)
        command = commands.add_parser(
            name,
            help=line,
            description=module.__doc__,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments after the program's name; those of the process by default, which may then start
        over (see `choose_device`).
    """
    args = build_parser().parse_args(argv)
    try:
        _check_flags()
        if "device" in args:
            args.device = choose_device(args.device, from_shell=argv is None)
        return int(args.run(args))
    except (UsageError, UnsupportedError, MissingExtraError) as error:
        print(f"tritonattn {args.command}: {error}", file=sys.stderr)
        return INCOMPLETE if isinstance(error, MissingExtraError) else USAGE
    except RestartError as error:
        print(f"tritonattn {args.command}: {error}", file=sys.stderr)
        if argv is not None:
            return FAILED
        sys.stdout.flush()
        # What is to be kept must not be dropped by the one that goes on.
        again = [word for word in sys.argv[1:] if word != "--fresh"]
        os.execv(sys.executable, [sys.executable, "-m", "tritonattn", *again])
    except KeyboardInterrupt:
        return 130
