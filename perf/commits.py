"""Sweeps of another commit and of this checkout in turns, the commit's in a throwaway worktree."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tritonattn import env

CHECKOUT = Path(__file__).resolve().parent.parent


class SweepError(RuntimeError):
    """A sweep could not be made; the message says why."""


def sweep_in_turns(
    commit: str, arguments: Sequence[str], out: Path, repeats: int, checkout: Path | None = None
) -> tuple[Path, Path]:
    """Sweep a commit and the checkout as it stands, one after the other, and again.

    Parameters
    ----------
    commit : str
        Anything that git resolves to a commit.
    arguments : sequence of str
        What the sweeps are told beside `--out`.
    out : Path
        Gets `base/1`, `new/1`, `base/2` and so on. A sweep that finds rows there resumes.
    repeats : int
        Sweeps of each side.
    checkout : Path, optional
        The root of the present checkout; by default the one that this module is in.

    Returns
    -------
    tuple of Path
        The folders of the commit's sweeps and of the checkout's.
    """
    checkout = checkout or CHECKOUT
    with worktree(commit, checkout) as other:
        if _run_in(other, ["sweep", "--help"], quiet=True).returncode:
            raise SweepError(f"{commit} has no command `tritonattn sweep`, or it does not start")
        for number in range(1, repeats + 1):
            for name, tree in (("base", other), ("new", checkout)):
                folder = (out / name / str(number)).resolve()
                done = _run_in(tree, ["sweep", *arguments, "--out", str(folder)])
                if not (folder / "results.csv").is_file():
                    raise SweepError(
                        f"the sweep of {commit if name == 'base' else 'the checkout'} left no "
                        f"results in {folder} (exit status {done.returncode})"
                    )
    return out / "base", out / "new"


@contextmanager
def _terminated() -> Iterator[None]:
    """Let a SIGTERM unwind the stack, so that what is temporary goes."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def worktree(commit: str, checkout: Path) -> Iterator[Path]:
    """Check a commit out into a temporary worktree, which is gone afterwards whatever happens."""
    # An installed copy may lie inside some other repository.
    if not (checkout / ".git").exists():
        raise SweepError(f"{checkout} is no git checkout, so there are no commits to compare with")
    found = _git(checkout, "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}")
    if found.returncode:
        said = found.stderr.strip()
        raise SweepError(f"{commit!r} is no commit of {checkout}" + (f": {said}" if said else ""))
    with _terminated(), tempfile.TemporaryDirectory(prefix="tritonattn-base-") as parent:
        tree = Path(parent) / "checkout"
        try:
            added = _git(checkout, "worktree", "add", "--detach", str(tree), found.stdout.strip())
            if added.returncode:
                raise SweepError(f"git worktree add failed: {added.stderr.strip()}")
            yield tree
        finally:
            _git(checkout, "worktree", "remove", "--force", str(tree))


def _git(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(checkout), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise SweepError("git is not installed") from error


def _run_in(
    tree: Path, arguments: Sequence[str], quiet: bool = False
) -> subprocess.CompletedProcess[bytes]:
    sink = subprocess.DEVNULL if quiet else None
    return subprocess.run(
        [sys.executable, "-m", "tritonattn", *arguments],
        cwd=tree,
        env=env.with_checkout(tree),
        stdout=sink,
        stderr=sink,
        check=False,
    )
