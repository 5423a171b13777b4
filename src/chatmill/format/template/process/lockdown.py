"""Restrict the privileges of a template process before it reads a template. Root access is not required.

Each protection is applied if the system supports it; `lock_down` returns the names of the active protections. The
system call filter (seccomp) allows only a few system calls, mainly for memory, locks, clocks and the existing socket. A
restricted process cannot open files, create sockets, start programs or see other processes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import signal
import struct
import sys
from pathlib import Path

CPU_SECONDS = 3600
"""Maximum total CPU seconds of a process. The renderer enforces a separate CPU time limit for each request."""
STACK = 8 << 20

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
SECCOMP_MODE_FILTER = 2
LOAD, JUMP_IF_EQUAL, JUMP_IF_GREATER_OR_EQUAL, JUMP_IF_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
KILL_PROCESS, FAIL, ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
NUMBER, ARCHITECTURE, THIRD_ARGUMENT = 0, 4, 32
"""Offsets of the fields in `seccomp_data`, which is the input of a filter."""
PROT_EXEC = 4
X32 = 0x40000000
"""System call numbers greater than or equal to this value belong to the x32 ABI of x86-64."""

SYSTEM_CALLS: dict[str, tuple[int, dict[str, int]]] = {
    "x86_64": (
        0xC000003E,
        {
            "read": 0,
            "write": 1,
            "close": 3,
            "mmap": 9,
            "mprotect": 10,
            "munmap": 11,
            "brk": 12,
            "rt_sigaction": 13,
            "rt_sigprocmask": 14,
            "rt_sigreturn": 15,
            "sched_yield": 24,
            "mremap": 25,
            "madvise": 28,
            "getpid": 39,
            "exit": 60,
            "gettimeofday": 96,
            "sigaltstack": 131,
            "gettid": 186,
            "time": 201,
            "futex": 202,
            "restart_syscall": 219,
            "clock_gettime": 228,
            "clock_getres": 229,
            "exit_group": 231,
            "getrandom": 318,
            "rseq": 334,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "read": 63,
            "write": 64,
            "close": 57,
            "mmap": 222,
            "mprotect": 226,
            "munmap": 215,
            "brk": 214,
            "rt_sigaction": 134,
            "rt_sigprocmask": 135,
            "rt_sigreturn": 139,
            "sched_yield": 124,
            "mremap": 216,
            "madvise": 233,
            "getpid": 172,
            "exit": 93,
            "gettimeofday": 169,
            "sigaltstack": 132,
            "gettid": 178,
            "futex": 98,
            "restart_syscall": 128,
            "clock_gettime": 113,
            "clock_getres": 114,
            "exit_group": 94,
            "getrandom": 278,
            "rseq": 293,
        },
    ),
}
"""For each architecture, its audit number in seccomp filters and the numbers of the allowed system calls."""


def lock_down(memory: int, parent: int) -> list[str]:
    """Remove all privileges that a template does not need, and limit the process to `memory` additional bytes.

    The restricted process is killed when the process `parent` exits. Return the names of the active protections.
    """
    in_force = []
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if _prctl(libc, PR_SET_PDEATHSIG, signal.SIGKILL) and os.getppid() != parent:
            os._exit(1)
        if _prctl(libc, PR_SET_DUMPABLE, 0):
            in_force.append("not traceable")
    for name, limit in (
        ("RLIMIT_CORE", 0),
        ("RLIMIT_FSIZE", 0),
        ("RLIMIT_NPROC", 0),
        ("RLIMIT_NOFILE", 1),
        ("RLIMIT_STACK", STACK),
        ("RLIMIT_CPU", CPU_SECONDS),
        ("RLIMIT_AS", _mapped() + memory),
    ):
        if _set_limit(name, limit):
            in_force.append(name)
    if sys.platform == "linux" and _prctl(libc, PR_SET_NO_NEW_PRIVS, 1):
        in_force.append("no new privileges")
        if _filter_system_calls(libc):
            in_force.append("seccomp")
    return in_force


def _prctl(libc: ctypes.CDLL, option: int, value: int, pointer: object = None) -> bool:
    return bool(libc.prctl(option, ctypes.c_ulong(value), pointer, ctypes.c_ulong(0), ctypes.c_ulong(0)) == 0)


def _set_limit(name: str, limit: int) -> bool:
    which = getattr(resource, name, None)
    if which is None:
        return False
    _, hard = resource.getrlimit(which)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    try:
        resource.setrlimit(which, (limit, limit))
    except (OSError, ValueError):
        return False
    return True


def _mapped() -> int:
    """Return the size of the address space in use, in bytes."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return 1 << 30


class _FilterProgram(ctypes.Structure):
    """The kernel structure `sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _filter_system_calls(libc: ctypes.CDLL) -> bool:
    """Install the system call filter. Return False if the kernel or the architecture does not support the filter."""
    machine = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    if machine not in SYSTEM_CALLS or sys.maxsize < 2**32:
        return False
    code = filter_program(*SYSTEM_CALLS[machine])
    program = _FilterProgram(len(code) // 8, code)
    return _prctl(libc, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program))


def filter_program(architecture: int, allowed: dict[str, int]) -> bytes:
    """Return a BPF program that allows only the given system calls and no executable memory.

    Forbidden system calls fail with EPERM.
    """
    names = sorted(allowed, key=lambda name: allowed[name])
    executable = [allowed[name] for name in ("mmap", "mprotect")]
    others = [allowed[name] for name in names if allowed[name] not in executable]
    # The program first compares the call number with all allowed numbers. For mmap and mprotect, the program then
    # checks the memory protection.
    checks = len(others) + len(executable)
    instructions = [
        (LOAD, 0, 0, ARCHITECTURE),
        (JUMP_IF_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL_PROCESS),
        (LOAD, 0, 0, NUMBER),
        (JUMP_IF_GREATER_OR_EQUAL, 0, 1, X32),
        (RETURN, 0, 0, KILL_PROCESS),
    ]
    for at, number in enumerate([*others, *executable]):
        left = checks - at - 1
        # Jump past the remaining comparisons and the EPERM return, to the protection check or to ALLOW.
        instructions.append((JUMP_IF_EQUAL, left + (3 if number in others else 1), 0, number))
    instructions += [
        (RETURN, 0, 0, FAIL | errno.EPERM),
        (LOAD, 0, 0, THIRD_ARGUMENT),
        (JUMP_IF_ANY_BIT, 1, 0, PROT_EXEC),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, FAIL | errno.EPERM),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
