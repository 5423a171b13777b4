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
EMULATOR = [] if platform.machine() == "x86_64" else ["qemu-x86_64", "-cpu", "max"]
PROGRAMS = {
    "plain": (["cc"], [], 1),
    "SHA-256 instructions": (["cc"], [], 2),
    "emulated SHA-256 instructions": ([*X86, "-DEMULATED", "-mssse3", "-msse4.1"], EMULATOR, 2),
    "AVX2": (X86, EMULATOR, 8),
    "AVX-512": (X86, EMULATOR, 16),
    "AVX-512 and SHA-256 instructions": (X86, EMULATOR, 16 | 2),
    "AVX-512 and emulated SHA-256 instructions": ([*X86, "-DEMULATED", "-mssse3", "-msse4.1"], EMULATOR, 16 | 2),
}
"""For each way to compute hashes: the compiler, the emulator, and a value that `sha256_way` can return."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_hashes_are_those_of_hashlib(name, tmp_path):
    compiler, emulator, way = PROGRAMS[name]
    if missing := [tool for tool in (compiler[0], *emulator[:1]) if shutil.which(tool) is None]:
        pytest.skip(f"{missing[0]} is not installed")
    lanes = way & 16 or way
    program = tmp_path / "sha256"
    source = Path(__file__).with_name("sha256.c")
    subprocess.run([*compiler, *SANITIZED, f"-I{NATIVE}", source, "-o", program], check=True, timeout=300)
    rng = random.Random(1)
    # Padding needs another block at some of these sizes.
    sizes = [0, 1, 54, 55, 56, 57, 63, 64, 65, 118, 119, 120, 128, 1000, 20_000]
    groups = [[rng.randbytes(one)] for one in sizes]
    groups += [[rng.randbytes(rng.choice(sizes)) for _ in range(rng.randint(1, lanes))] for _ in range(120)]
    groups += [[rng.randbytes(rng.randrange(600)) for _ in range(lanes)] for _ in range(80)]
    given = b"".join(
        struct.pack(f"<{1 + len(group)}q", len(group), *map(len, group)) + b"".join(group) for group in groups
    )
    made = subprocess.run([*emulator, program, str(way)], input=given, capture_output=True, timeout=300)
    if made.returncode == 3:
        pytest.skip(f"the processor does not support {name}")
    assert made.returncode == 0, made.stderr
    assert made.stdout == b"".join(hashlib.sha256(message).digest() for group in groups for message in group)


def test_the_fastest_supported_way_gives_the_hashes_of_hashlib(tmp_path):
    if shutil.which("cc") is None:
        pytest.skip("cc is not installed")
    program = tmp_path / "sha256"
    subprocess.run(["cc", f"-I{NATIVE}", Path(__file__).with_name("sha256.c"), "-o", program], check=True, timeout=300)
    given = struct.pack("<2q", 1, 3) + b"abc"
    made = subprocess.run([program], input=given, capture_output=True, check=True, timeout=300)
    assert made.stdout == hashlib.sha256(b"abc").digest()
