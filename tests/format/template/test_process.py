from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
from hostile_templates import CONTROL, GOOD, PROMPT
from hypothesis import given, settings
from hypothesis import strategies as st
from python_service import FORBIDDEN
from template_fixtures import answer, own_format, user

from chatmill.errors import DataError, RecordError
from chatmill.format.template import template
from chatmill.format.template.answers.by_origin import AnswerSpan
from chatmill.format.template.process import channel, client, messages
from chatmill.format.template.process.channel import Channel, EndedError, fork_server
from chatmill.format.template.process.engine import TemplateEngine
from chatmill.format.template.process.lockdown import SYSTEM_CALLS, filter_program
from chatmill.format.template.process.messages import BrokenResponseError, Derived, check_derived
from chatmill.format.template.tracing.trace import FieldPath, TracedPiece, TraceStep
from chatmill.records import Record

TALK = Record([user("Hi"), answer("Hello.")], file="chat.jsonl", line=7)
TEXT = "<|user|>Hi<|end|><|assistant|>Hello.<|end|>"


def good(tmp_path: Path, more: str = ""):
    return own_format(tmp_path, GOOD + PROMPT + more, control=CONTROL)


@pytest.fixture
def python(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr(channel, "GRACE", 0.1)

    def run(code: str, seconds: float = 2.0) -> str:
        process = Channel(fork_server("python_service"), 128 << 20)
        try:
            return process.exchange(code.encode(), seconds=seconds, limit=1 << 20).decode()
        except (EndedError, EOFError) as ended:
            return f"{type(ended).__name__} {process.end()}"
        finally:
            process.close()

    return run


@pytest.fixture
def filtered(python) -> None:
    process = Channel(fork_server("python_service"), 128 << 20)
    process.close()
    if "seccomp" not in process.protections:
        pytest.skip("this system cannot filter system calls")


@pytest.mark.parametrize("what", FORBIDDEN)
@pytest.mark.usefixtures("filtered")
def test_python_in_the_process_cannot(python, what):
    assert python(FORBIDDEN[what]).startswith("PermissionError"), what


@pytest.mark.usefixtures("filtered")
def test_system_calls_without_a_python_function_fail_too(python):
    calls = "import ctypes; libc = ctypes.CDLL(None, use_errno=True); out = (libc.%s, ctypes.get_errno())"
    for call in (
        "ptrace(0, 1, 0, 0)",
        "prctl(4, 1, 0, 0, 0)",
        "process_vm_readv(1, 0, 0, 0, 0, 0)",
        "syscall(425, 8, 0)",
    ):
        assert python(calls % call) == "(-1, 1)", call


def test_the_process_has_no_environment_variables(python, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert "hf_secret" not in python("import os; out = dict(os.environ)")
    assert python("import os; out = os.getpid() != 0") == "True"


def test_excessive_time_memory_or_stack_ends_the_process(python):
    assert python("while True: pass", 0.2) == "EndedError -9"
    assert python("x = bytearray(1 << 28)").startswith("MemoryError")
    assert python("x = []\nwhile True: x.append(bytes(1 << 20))").startswith("MemoryError")
    deep = "x = ()\nfor _ in range(10 ** 6): x = (x,)\n"
    assert python(f"import sys; sys.setrecursionlimit(1 << 30)\n{deep}out = hash(x)") == f"EOFError {-signal.SIGSEGV}"
    assert python("import os; os._exit(3)") == "EOFError 3"


def test_a_response_of_any_announced_size_is_not_waited_for(python):
    assert python("import os; os.write(0, b'\\xff' * 8)") == "EndedError -9"
    # The process announces more bytes than it writes, and never ends.
    assert python("import os; os.write(0, b'\\x09' + bytes(9))\nwhile True: pass", 0.2) == "EndedError -9"


def test_the_filter_of_each_architecture_allows_its_calls_and_no_others():
    for architecture, allowed in SYSTEM_CALLS.values():
        code = filter_program(architecture, allowed)
        for number in range(512):
            for protection in (0, 3, 4, 7):
                may = number in allowed.values() and not (
                    protection & 4 and number in (allowed["mmap"], allowed["mprotect"])
                )
                assert filtered_by(code, number, architecture, protection) == (0x7FFF0000 if may else 0x00050001)
        assert filtered_by(code, allowed["read"], architecture ^ 1, 0) == 0x80000000
        assert filtered_by(code, allowed["read"] | 0x40000000, architecture, 0) == 0x80000000


def filtered_by(code: bytes, number: int, architecture: int, protection: int) -> int:
    """Interpret a seccomp filter as the kernel would. Only the instructions in chatmill's filter are supported."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, 0, 0, protection, 0, 0, 0)
    instructions = list(struct.iter_unpack("=HBBI", code))
    at, value = 0, 0
    while True:
        operation, jump_true, jump_false, constant = instructions[at]
        at += 1
        if operation == 0x20:
            (value,) = struct.unpack_from("<I", data, constant)
        elif operation == 0x06:
            return constant
        else:
            holds = {0x15: value == constant, 0x35: value >= constant, 0x45: bool(value & constant)}[operation]
            at += jump_true if holds else jump_false


def test_no_template_ever_runs_in_this_process(tmp_path):
    good(tmp_path)
    code = f"""
import sys
from chatmill.format import open_renderer
from chatmill.records import Message, Record
renderer = open_renderer("template", {str(tmp_path / "own")!r})
record = Record([Message("user", "Hi"), Message("assistant", "Hello.")])
renderer.render([record, record])
print(renderer.text(record), [name for name in sys.modules if name.startswith("jinja2")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{TEXT} []\n"


def test_a_process_that_is_killed_is_replaced(tmp_path):
    format = good(tmp_path)
    os.kill(format.process._channel.pid, signal.SIGKILL)
    assert format.text(TALK) == TEXT
    channel.stop_servers()
    assert format.text(TALK) == TEXT


def test_each_renderer_has_its_own_process_which_ends_with_it(tmp_path):
    one, other = good(tmp_path / "one"), good(tmp_path / "other")
    pids = [format.process._channel.pid for format in (one, other)]
    assert len(set(pids)) == 2
    del one
    _wait_for_end(pids[0])
    assert other.text(TALK) == TEXT


def test_the_process_ends_when_its_user_is_killed(tmp_path):
    good(tmp_path)
    code = f"""
import time
from chatmill.format import open_renderer
renderer = open_renderer("template", {str(tmp_path / "own")!r})
print(renderer.process._channel.pid, flush=True)
time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        pid = int(child.stdout.readline())
        os.kill(pid, 0)
        child.kill()
    _wait_for_end(pid)


def _wait_for_end(pid: int) -> None:
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)


def test_threads_share_a_process(tmp_path):
    format = good(tmp_path)
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(format.text(TALK))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [TEXT] * 8


def test_a_template_that_is_stopped_repeatedly_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(client, "SECONDS", 0.2)
    monkeypatch.setattr(channel, "GRACE", 0.1)
    nested = "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}"
    format = good(tmp_path, "{% if messages[0].content == 'Hi' %}" + nested + "{% endif %}")
    other = Record([user("Ho"), answer("Hello.")])
    for _ in range(client.MAX_KILLS - 1):
        with pytest.raises(RecordError, match="the template was stopped: the time limit of") as stopped:
            format.lay_out(TALK)
        assert str(stopped.value).startswith("chat.jsonl:7: ") and stopped.value.kind == "template_limit"
        assert "Ho" in format.text(other)
    with pytest.raises(DataError, match="giving up after 3 attempts") as given_up:
        format.lay_out(TALK)
    assert not isinstance(given_up.value, RecordError) and "\n" not in str(given_up.value)


PIECES = (
    TracedPiece("<|user|>"),
    TracedPiece("Hi", 1, FieldPath(0, ("content",)), 0, owner=0),
    TracedPiece("<|end|><|assistant|>"),
    TracedPiece("Hello.", 1, FieldPath(1, ("content",)), 1, owner=1),
    TracedPiece("<|end|>"),
)
RIGHT = Derived(PIECES, (AnswerSpan(1, 30, 43, True),), (), (), (), ())


def test_a_valid_response_is_accepted():
    derived = check_derived(RIGHT, TALK, 2)
    assert derived.rendering.text == TEXT and derived.steps == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"answers": (AnswerSpan(1, 30, 44, True),)},
        {"answers": (AnswerSpan(1, -1, 5, True),)},
        {"answers": (AnswerSpan(1, 31, 30, True),)},
        {"answers": (AnswerSpan(2, 30, 43, True),)},
        {"answers": (AnswerSpan(0, 30, 43, True),)},
        {"pieces": (PIECES[0]._replace(text=""),)},
        {"pieces": (PIECES[0]._replace(owner=2),)},
        {"pieces": (PIECES[0]._replace(owner=-2),)},
        {"pieces": (PIECES[1]._replace(slot=2),)},
        {"pieces": (PIECES[1]._replace(slot=-1),)},
        {"pieces": (PIECES[1]._replace(source=FieldPath(2, ("content",))),)},
        {"pieces": (PIECES[1]._replace(source=FieldPath(0, ())),)},
        {"steps": (TraceStep("system", (0,), ()),)},
        {"steps": (TraceStep("__import__", (), ("os",)),)},
        {"steps": (TraceStep("strip", (2,), ()),)},
        {"steps": (TraceStep("strip", (-1,), ()),)},
        {"steps": (TraceStep("len", (0,), ()),)},
        {"steps": (TraceStep("split", (0,), (None, -1)), TraceStep("strip", (2,), ()))},
        {"steps": (TraceStep("eq", (0,), ({"x": 1},), True, True),)},
    ],
)
def test_an_impossible_response_is_rejected(changes):
    with pytest.raises(BrokenResponseError):
        check_derived(msgspec.structs.replace(RIGHT, **changes), TALK, 2)


def test_a_trace_that_grows_with_every_step_is_not_replayed():
    doubled = tuple(TraceStep("fill_pattern", (at, at), ((None, None),)) for at in range(1, 40))
    assert check_derived(msgspec.structs.replace(RIGHT, steps=doubled), TALK, 2).steps is None
    literal = (TraceStep("fill_pattern", (), (("x" * 1000,),)),)
    copies = tuple(TraceStep("fill_pattern", (at, at), ((None, None),)) for at in range(2, 40))
    assert check_derived(msgspec.structs.replace(RIGHT, steps=literal + copies), TALK, 2).steps is None
    often = (*PIECES, *[PIECES[1]] * 8)
    assert check_derived(msgspec.structs.replace(RIGHT, pieces=often), TALK, 2).steps is None
    assert check_derived(msgspec.structs.replace(RIGHT, pieces=often[:-1]), TALK, 2).steps == ()
    escaped = tuple(TraceStep("escape_json", (at,), (True,)) for at in range(1, 5))
    assert check_derived(msgspec.structs.replace(RIGHT, steps=escaped), TALK, 2).steps is None
    assert check_derived(msgspec.structs.replace(RIGHT, steps=escaped[:2]), TALK, 2).steps == escaped[:2]
    stripped = tuple(TraceStep("strip", (at,), ()) for at in range(1, 40))
    assert check_derived(msgspec.structs.replace(RIGHT, steps=stripped), TALK, 2).steps == stripped


@given(st.data())
@settings(max_examples=200)
def test_a_response_with_corrupted_bytes_is_rejected_or_valid(data):
    raw = bytearray(messages.encode(RIGHT))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        response = client._decoded(bytes(raw[: data.draw(st.integers(1, len(raw)))]))
        if isinstance(response, Derived):
            derived = check_derived(response, TALK, 2)
            assert all(0 <= span.start <= span.stop <= len(derived.rendering.text) for span in derived.answers)
    except (EndedError, BrokenResponseError):
        pass


def test_a_process_that_sends_an_invalid_response_is_killed(tmp_path, monkeypatch):
    format = good(tmp_path)

    def nonsense(self: Channel, frame: bytes, **limits: object) -> bytes:
        return b"\xc1"

    monkeypatch.setattr(Channel, "exchange", nonsense)
    with pytest.raises(RecordError, match="the process sent an invalid response"):
        format.text(TALK)


def test_a_fork_has_its_own_sockets(tmp_path):
    format = good(tmp_path)
    code = f"""
import os
from chatmill.format import open_renderer
from chatmill.records import Message, Record
renderer = open_renderer("template", {str(tmp_path / "own")!r})
record = Record([Message("user", "Hi"), Message("assistant", "Hello.")])
for _ in range(2):
    if not (pid := os.fork()):
        os._exit(renderer.text(record) != {TEXT!r})
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
print(renderer.text(record))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == TEXT + "\n"
    assert format.text(TALK) == TEXT


def test_a_template_that_cannot_be_traced_is_reported_as_an_error_in_the_template(tmp_path, monkeypatch):
    renderer = good(tmp_path)

    def refuse(*args, **options):
        raise DataError("chat_template.jinja: Jinja cannot compile the template (too deep); fix the template")

    monkeypatch.setattr(template, "TracedProgram", refuse)
    engine = TemplateEngine()
    engine(messages.encode(renderer.process._open))
    monkeypatch.setattr(client.Channel, "exchange", lambda self, frame, **limits: engine(frame))
    assert renderer.text(TALK) == TEXT
    with pytest.raises(DataError, match=r"^chat_template.jinja: Jinja cannot compile the template \(too deep\)"):
        renderer.derive(TALK)
