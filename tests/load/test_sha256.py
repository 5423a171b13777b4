"""`_sha256.h` gives the same hashes as hashlib on every supported instruction set.

The tests need a C compiler and, on machines other than x86-64, `gcc-x86-64-linux-gnu` and `qemu-user`.
"""

from __future__ import annotations

import hashlib
import platform
import random
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

import chatmill._native

NATIVE = Path(str(chatmill._native.__file__)).parent
SANITIZED = ["-O2", "-Wall", "-Wextra", "-Werror", "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"]
X86 = ["cc"] if platform.machine() == "x86_64" else ["x86_64-linux-gnu-gcc", "-static"]
EMULATOR = [] if platform.machine() == "x86_64" else ["qemu-x86_64"]
PROGRAMS = {
    "here": (["cc"], [], []),
    "without instructions": (["cc"], [], ["plain"]),
    "x86-64": ([*X86, "-DEMULATED", "-mssse3", "-msse4.1"], EMULATOR, []),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_hashes_are_those_of_hashlib(name, tmp_path):
    compiler, emulator, options = PROGRAMS[name]
    if missing := [tool for tool in (compiler[0], *emulator) if shutil.which(tool) is None]:
        pytest.skip(f"{missing[0]} is not installed")
    program = tmp_path / "sha256"
    source = Path(__file__).with_name("sha256.c")
    subprocess.run([*compiler, *SANITIZED, f"-I{NATIVE}", source, "-o", program], check=True, timeout=300)
    rng = random.Random(1)
    # Padding needs another block at some of these sizes.
    sizes = [0, 1, 54, 55, 56, 57, 63, 64, 65, 118, 119, 120, 128, 1000, 20_000]
    pairs = [(rng.randbytes(one), rng.randbytes(two)) for one in sizes for two in sizes]
    pairs += [(rng.randbytes(rng.randrange(600)), rng.randbytes(rng.randrange(600))) for _ in range(200)]
    given = b"".join(struct.pack("<2q", len(one), len(two)) + one + two for one, two in pairs)
    made = subprocess.run([*emulator, program, *options], input=given, capture_output=True, check=True, timeout=300)
    expected = [hashlib.sha256(message).digest() for one, two in pairs for message in (one, two, two)]
    assert made.stdout == b"".join(expected)
