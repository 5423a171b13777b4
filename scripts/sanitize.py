"""Test the C extensions with AddressSanitizer and UndefinedBehaviorSanitizer (`make sanitize`).

    python3 scripts/sanitize.py [--rounds N] [--seed N]

Compiles a copy of the C sources in build/sanitize with gcc or clang. Runs `tests/fuzz_compiled.py`, which requires only
Python, and the tests of the C extensions, which require the packages of `make install`. An invalid memory access or
undefined behavior ends the run with a stack trace. If the sanitizers are not available, the script prints a message and
exits with 0.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "sanitize"
NATIVE = BUILD / "src" / "chatmill" / "_native"
FLAGS = ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-Wall",
         "-Wextra", "-Werror", "-shared", "-fPIC"]  # fmt: skip
TESTS = {
    "test_compiled.py": [],
    "test_rows.py": ["numpy"],
    "load/test_stored_rows.py": ["numpy", "msgspec", "tokenizers"],
    "records/test_columns.py": ["numpy", "msgspec"],
    "tokenizer/test_byte_bpe.py": ["numpy", "msgspec", "tokenizers"],
    "tokenizer/test_token_positions.py": ["numpy", "msgspec", "tokenizers"],
}
"""Test files of the C extensions, with the modules that they require in addition to PYTEST."""
LEFT_OUT = [
    "megabytes",
    "every_character",
    "every_short",
    "any_text_of",
    "fast_engine",
    "other_kinds",
    "another_engine",
    "probe",
    "real_files",
]
"""Tests to skip, because they take minutes with sanitizers or test the tokenizer engines of other libraries."""
PYTEST = ["pytest", "hypothesis", "xdist", "pytest_timeout"]
PROBE = "int main(void) { return 0; }"


def runtime(compiler: str) -> list[str]:
    """Return the sanitizer libraries; they must be preloaded, because Python itself is not compiled with sanitizers."""
    names = ["libasan.so", "libubsan.so"]
    if "clang" in subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout:
        names = [f"libclang_rt.asan-{platform.machine()}.so"]
    shown = [subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True) for name in names]
    paths = [each.stdout.strip() for each in shown]
    return [path for path in paths if Path(path).is_absolute()]


def why_not(compiler: str | None, include: Path) -> str:
    """Return the reason why the sanitizers cannot run on this machine, or an empty string if they can."""
    if compiler is None:
        return "no C compiler found"
    if not (include / "Python.h").exists():
        return f"Python's headers are not in {include}"
    linked = subprocess.run(
        [compiler, *FLAGS, "-x", "c", "-", "-o", os.devnull], input=PROBE, capture_output=True, text=True, check=False
    )
    if linked.returncode or not runtime(compiler):
        return f"{compiler} has no sanitizers ({(linked.stderr.splitlines() or ['no library to load'])[-1][:200]})"
    return ""


def copy_tree() -> None:
    shutil.rmtree(BUILD, ignore_errors=True)
    left_out = shutil.ignore_patterns("*.so", "__pycache__", "*.pyc")
    for name in ("src", "tests", "data"):
        shutil.copytree(ROOT / name, BUILD / name, ignore=left_out)
    shutil.copy(ROOT / "pyproject.toml", BUILD)


def compile_parts(compiler: str, include: Path) -> None:
    for source in sorted(NATIVE.glob("_*.c")):
        subprocess.run(
            [compiler, *FLAGS, f"-I{include}", source.name, "-o", f"{source.stem}.abi3.so"], cwd=NATIVE, check=True
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="number of fuzzing rounds, with 90 calls each")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "gcc"), "cc", "clang"))), None)
    include = Path(sysconfig.get_path("include"))
    place = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    if compiler is None or (reason := why_not(compiler, include)):
        print(f"sanitize: skipped on {place}: {reason if compiler else 'no C compiler found'}")
        return 0
    print(f"sanitize: {place}, {compiler}", flush=True)
    copy_tree()
    compile_parts(compiler, include)
    environment = {
        **os.environ,
        "LD_PRELOAD": ":".join(runtime(compiler)),
        # Do not check for leaks, because Python does not free all memory at exit. Use `malloc`, because Python's own
        # allocator would hide reads beyond the end of an object.
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=1:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(BUILD / "src"), os.environ.get("PYTHONPATH")))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    runs = [["tests/fuzz_compiled.py", str(NATIVE), str(args.rounds), str(args.seed)]]
    installed = {name for needs in ([*PYTEST], *TESTS.values()) for name in needs if find_spec(name) is not None}
    tests = [f"tests/{name}" for name, needs in TESTS.items() if installed >= {*PYTEST, *needs}]
    if len(tests) < len(TESTS):
        print(
            f"sanitize: {len(TESTS) - len(tests)} of {len(TESTS)} test files skipped: missing dependencies",
            flush=True,
        )
    if tests:
        slow = f"not ({' or '.join(LEFT_OUT)})"
        runs.append(["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", slow, *tests])
    for run in runs:
        if code := subprocess.run([sys.executable, *run], cwd=BUILD, env=environment, check=False).returncode:
            print(f"sanitize: FAILED on {place} (exit code {code})")
            return 1
    print(f"sanitize: no invalid memory accesses and no undefined behavior on {place}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
