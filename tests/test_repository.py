"""The repository itself: its layout, what an import pulls in, what a wheel holds, documents."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 400


def sources(*folders: str) -> list[Path]:
    """Return the Python files below top-level folders, each once (symlinks are not followed)."""
    found = []
    for folder in folders:
        for parent, children, names in os.walk(ROOT / folder):
            children[:] = [c for c in children if c != "__pycache__"]
            found += [Path(parent) / name for name in names if name.endswith(".py")]
    return sorted(found)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def run_python(code: str, cwd: Path, *path: Path) -> str:
    """Return what code prints in a fresh interpreter, with `path` as PYTHONPATH and no GPU."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, path)), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["kernels", "perf"])
def test_top_level_folder_is_a_symlinked_namespace(name: str):
    link = ROOT / "tritonattn" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert link.resolve(strict=True) == ROOT / name
    assert not (ROOT / name / "__init__.py").exists()


def test_nothing_puts_the_root_on_the_path_of_pytest():
    assert not (ROOT / "conftest.py").exists()
    assert not (ROOT / "tests" / "__init__.py").exists()


def test_import_needs_no_install_no_gpu_and_no_extra(tmp_path: Path):
    output = run_python(
        """
        import importlib.metadata
        import sys

        # As if it were not installed: no import hook of an editable install, no metadata.
        hooks = [f for f in sys.meta_path if "__editable__" in f"{f!r}{f.__module__}"]
        sys.meta_path[:] = [f for f in sys.meta_path if f not in hooks]
        real = importlib.metadata.Distribution.from_name.__func__

        def from_name(cls, name):
            if name == "tritonattn":
                raise importlib.metadata.PackageNotFoundError(name)
            return real(cls, name)

        importlib.metadata.Distribution.from_name = classmethod(from_name)

        class Refuse:
            def find_spec(self, name, path=None, target=None):
                if name in ("flashinfer", "transformers", "pandas", "pyarrow", "tqdm"):
                    raise ImportError(f"import tritonattn must not need {name}")

        sys.meta_path.insert(0, Refuse())
        import torch
        import tritonattn

        assert not torch.cuda.is_initialized()
        print(tritonattn.__file__)
        print(tritonattn.__version__)
        """,
        tmp_path,
        ROOT,
    )
    file, version = output.split()
    assert Path(file) == ROOT / "tritonattn" / "__init__.py"
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", version)


def test_a_package_named_kernels_is_not_shadowed(tmp_path: Path):
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("get_kernel = 'theirs'\n")
    look = "import kernels; print(kernels.get_kernel)"
    # The folder of the repository comes first on the path, and loses against a regular package.
    assert run_python(look, ROOT, ROOT, tmp_path).strip() == "theirs"
    alone = "import importlib.util as u; s = u.find_spec('kernels'); print(s and s.origin)"
    assert run_python(alone, ROOT, ROOT).strip() == "None"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build a wheel from a copy of the tree, with one more file in perf/ and in perf/results/."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("tritonattn", "kernels", "perf"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
    (folder / "perf" / "planted.py").write_text('"""Planted."""\n')
    (folder / "perf" / "results").mkdir(exist_ok=True)
    (folder / "perf" / "results" / "planted.py").write_text('"""Planted."""\n')
    (folder / "perf" / "results" / "planted.csv").write_text("ms\n1\n")
    build = """
        import sys
        sys.modules["torch"] = None  # building must not import it
        from setuptools import build_meta
        print(build_meta.build_wheel("out"))
    """
    setuptools = importlib.util.find_spec("setuptools")
    assert setuptools is not None
    assert setuptools.origin is not None
    output = run_python(build, folder, Path(setuptools.origin).parent.parent)
    return zipfile.ZipFile(folder / "out" / output.split()[-1])


def test_wheel_holds_the_kernels_and_not_the_results(wheel: zipfile.ZipFile):
    names = set(wheel.namelist())
    kernels = {f"tritonattn/{relative(path)}" for path in sources("kernels")}
    assert kernels
    assert kernels <= names
    assert {"tritonattn/perf/planted.py", "tritonattn/py.typed", "tritonattn/__init__.py"} <= names
    assert "tritonattn/policies/h200.json" in names
    assert not [name for name in names if "/results/" in name]
    assert {name.split("/")[0].split("-")[0] for name in names} == {"tritonattn"}


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
    return message_from_string(wheel.read(name).decode())


def requirements(metadata: Message, marker: str) -> dict[str, SpecifierSet]:
    parsed = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    return {r.name: r.specifier for r in parsed if str(r.marker or "") == marker}


def test_wheel_metadata(wheel: zipfile.ZipFile, metadata: Message):
    assert set(requirements(metadata, "")) == {"torch", "triton"}
    extras = set(metadata.get_all("Provides-Extra", []))
    assert {"flashinfer", "perf", "engines", "docs", "dev"} <= extras
    assert metadata["License-Expression"] == "Apache-2.0"
    (scripts,) = [n for n in wheel.namelist() if n.endswith("entry_points.txt")]
    assert "tritonattn = tritonattn.cli:main" in wheel.read(scripts).decode()
    assert "tritonattn = tritonattn.engines.vllm:register" in wheel.read(scripts).decode()


@pytest.mark.parametrize(
    ("package", "version", "supported"),
    [
        ("torch", "2.10.1", False),
        ("torch", "2.11.0", True),
        ("torch", "2.13.0+cpu", True),
        ("triton", "3.5.1", False),
        ("triton", "3.6.0", True),
        ("triton", "3.9.1", True),
        ("triton", "3.10.0", False),
    ],
)
def test_supported_versions(metadata: Message, package: str, version: str, supported: bool):
    """The wheel's requirements, the script behind `make`, and the pins of `dev` agree."""
    spec = importlib.util.spec_from_file_location("environment", ROOT / ".ci" / "environment.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert requirements(metadata, "")[package].contains(version) == supported
    assert script.is_supported(package, version) == supported
    (pin,) = requirements(metadata, 'extra == "dev"')[package]
    assert pin.operator == "=="
    assert script.is_supported(package, pin.version)


def reads_environment(tree: ast.AST) -> bool:
    names = {"environ", "environb", "getenv", "putenv"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            if names & {alias.name for alias in node.names}:
                return True
        elif isinstance(node, ast.Attribute) and node.attr in names:
            return True
    return False


def test_environment_variables_are_read_in_one_module():
    readers = [
        relative(path)
        for path in sources("tritonattn", "kernels", "perf")
        if reads_environment(ast.parse(path.read_text()))
    ]
    assert readers == ["tritonattn/env.py"]


def test_every_kernel_file_says_what_it_is():
    files = sources("kernels")
    assert files
    assert [relative(f) for f in files if not ast.get_docstring(ast.parse(f.read_text()))] == []


def test_files_are_short():
    files = sources("tritonattn", "kernels", "perf", "tests")
    lines = {relative(f): len(f.read_text().splitlines()) for f in files}
    assert {name: n for name, n in lines.items() if n > MAX_LINES} == {}


def test_documented_make_targets_exist():
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test", "lint", "install"} <= targets
    for name in ("README.md", "CONTRIBUTING.md"):
        code = re.findall(r"```.*?```|`[^`\n]*`", (ROOT / name).read_text(), re.DOTALL)
        named = {t for text in code for t in re.findall(r"\bmake ([a-z][a-z-]*)", text)}
        assert named, name
        assert named <= targets, name


def test_readme_examples_run(tmp_path: Path):
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(examples) >= 2
    example = "\n".join(examples)
    (promised,) = re.findall(r"print\(.*\)  # (.*)", example)
    assert run_python(example, tmp_path, ROOT).strip() == promised


def test_relative_links_of_the_documents_resolve():
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    broken = []
    for document in documents:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text()):
            if "://" not in target and not (document.parent / target).exists():
                broken.append(f"{relative(document)}: {target}")
    assert broken == []


def test_ci_script_can_be_run():
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
