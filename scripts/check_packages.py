"""Build the sdist and the wheel in dist/, install them as a user would, and test them (`make packages`).

    python scripts/check_packages.py

- The wheel is tagged `cp311-abi3`, has the version in `chatmill.__version__`, and passes abi3audit.
- The wheel runs in empty environments of Python 3.11, 3.12 and 3.13 (`scripts/try_installed.py`), and the sdist runs
  without a working compiler. All installations prepare the same dataset, byte for byte.
- `uvx --from WHEEL chatmill` runs.
- cibuildwheel accepts its settings and would build wheels for the platforms in `PLATFORMS`.

The script requires the packages in requirements/packages.txt, and skips Python versions that are not installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from release_notes import version_of

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
SOURCES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
VERSION = version_of(ROOT)
BIN = Path(sys.executable).parent
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORMS = {"linux": ("x86_64", "aarch64"), "macos": ("arm64",)}
IDENTIFIER = {"linux": "manylinux", "macos": "macosx"}
ENV = os.environ | {"UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1"}
ENV.pop("PYTHONPATH", None)


def run(*command: str | Path, **env: str) -> str:
    """Run a command and return its output; if the command fails, print its output and exit."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=ROOT, env=ENV | env, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def build() -> tuple[Path, Path]:
    """Build the sdist, then the wheel from the sdist; return their paths."""
    shutil.rmtree(DIST, ignore_errors=True)
    # Build from a copy of the repository, because setuptools would also use files from earlier builds.
    with tempfile.TemporaryDirectory() as folder:
        for name in SOURCES:
            shutil.copy(ROOT / name, folder)
        left_out = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
        shutil.copytree(ROOT / "src", Path(folder, "src"), ignore=left_out)
        run(BIN / "uv", "build", "--quiet", "--out-dir", DIST, folder)
    [sdist], [wheel] = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    start = f"chatmill-{VERSION}"
    if sdist.name != f"{start}.tar.gz" or not wheel.name.startswith(f"{start}-cp311-abi3-"):
        sys.exit(f"dist: contains {sdist.name} and {wheel.name}; expected {start}.tar.gz and {start}-cp311-abi3-…whl")
    print(f"dist/{sdist.name}\ndist/{wheel.name}")
    return sdist, wheel


def interpreter(python: str) -> Path | None:
    """Find an interpreter for a Python version in PATH or pyenv; return its path, or None if it is not installed."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for path in (shutil.which(f"python{python}"), *sorted(pyenv.glob(f"{python}.*/bin/python{python}"))):
        # The command may be a pyenv shim, which fails if the Python version is not selected.
        if path and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return Path(path)
    return None


def try_package(package: Path, python: Path, *flags: str, **env: str) -> str:
    """Install a package in an empty virtual environment, prepare a dataset with it, and return the dataset's hash."""
    with tempfile.TemporaryDirectory() as folder:
        installed = Path(folder, "bin", "python")
        run(BIN / "uv", "venv", "--quiet", "--python", python, folder)
        run(BIN / "uv", "pip", "install", "--quiet", "--compile-bytecode", "--python", installed, package, **env)
        line = run(installed, ROOT / "scripts" / "try_installed.py", *flags)
    print(f"{package.name}: {line}")
    return line.rpartition(" ")[2]


def check_cibuildwheel() -> None:
    for system, machines in PLATFORMS.items():
        wanted = [f"cp{python.replace('.', '')}" for python in PYTHONS]
        for machine in machines:
            flags = ("--platform", system, "--archs", machine, "--print-build-identifiers")
            built = run(BIN / "cibuildwheel", *flags, ".").split()
            if built != [f"{python}-{IDENTIFIER[system]}_{machine}" for python in wanted]:
                sys.exit(f"cibuildwheel {' '.join(flags)}: builds {' '.join(built)}; expected {' '.join(wanted)}")
            print(f"cibuildwheel: {' '.join(built)}")


def main() -> None:
    check_cibuildwheel()
    sdist, wheel = build()
    run(BIN / "abi3audit", "--strict", wheel)
    print(f"{wheel.name}: abi3audit finds only symbols of Python 3.11's stable ABI")
    datasets = set()
    for python in PYTHONS:
        path = interpreter(python)
        if path is None:
            print(f"{wheel.name}: Python {python} is not installed; skipped")
        else:
            datasets.add(try_package(wheel, path, "--compiled"))
    # Simulate a missing compiler with a command that always fails.
    datasets.add(try_package(sdist, Path(sys.executable), "--not-compiled", CC="false"))
    if len(datasets) != 1:
        sys.exit(f"the datasets differ: {' '.join(sorted(datasets))}")
    if (shown := run(BIN / "uvx", "--from", wheel, "chatmill", "--version")) != f"chatmill {VERSION}":
        sys.exit(f"uvx --from {wheel.name} chatmill --version: {shown}")
    run(BIN / "uvx", "--from", wheel, "chatmill", "--help")
    print(f"uvx --from {wheel.name} chatmill --version: {shown}")


if __name__ == "__main__":
    main()
