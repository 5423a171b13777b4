from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import unicodedata
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatmill.cli.commands import COMMANDS
from chatmill.cli.guard import guarded
from chatmill.cli.options import print_table
from chatmill.cli.streams import Output
from chatmill.errors import ChatmillError, DataError, RecordError, UsageError, one_line

HARMFUL = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
any_text = st.text(st.characters(), max_size=60)
NAME = "a\x1b[2J\x07\nb\u202e\x9b\udcff\u200d"
ESCAPED = r"a\x1b[2J\x07\nb\u202e\x9b\udcff\u200d"


def acts(text: str) -> list[str]:
    return [ch for ch in text if unicodedata.category(ch) in HARMFUL]


@given(any_text)
def test_a_line_from_any_text_is_printable_and_escaping_it_again_changes_nothing(text):
    line = one_line(text, None)
    assert line.isprintable() and acts(line) == []
    assert one_line(line, None) == line
    assert one_line(text, None) == text or not text.isprintable()


@given(any_text, st.integers(0, 70))
def test_a_long_line_is_truncated(text, limit):
    assert one_line(text, limit) == one_line(text[:limit], None) + ("…" if len(text) > limit else "")


@pytest.mark.parametrize("kind", [ChatmillError, UsageError, DataError])
def test_every_error_is_one_printable_line_for_any_names(kind):
    assert str(kind(f"{NAME}: is wrong")) == f"{ESCAPED}: is wrong"


def test_the_place_and_the_reason_of_a_record_are_printable():
    fault = RecordError(f'has key "{NAME}"', "expected another", kind="key").at(NAME, 3, NAME)
    assert str(fault) == f'{ESCAPED}:3 (id={ESCAPED}): has key "{ESCAPED}"; expected another'


@given(any_text)
def test_control_characters_are_escaped_on_stdout_and_json_is_unchanged(text):
    written = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="escaped", newline="")
    output = Output(written)
    assert output.write(text) == len(text)
    output.writelines(["\n", json.dumps([text], ensure_ascii=False), "\n"])
    output.flush()
    shown = written.buffer.getvalue().decode()
    assert {*acts(shown)} <= {"\n", "\t", "\u200c", "\u200d"}
    assert json.loads(shown.splitlines()[-1]) == [text]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_characters_outside_an_encoding_are_escaped(encoding):
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding, errors="escaped")
    output = Output(stream)
    output.write("ä…\udcff𝄞")
    output.flush()
    assert json.loads(f'"{written.getvalue().decode(encoding)}"') == "ä…\udcff𝄞"


def ended(command, *, stdout: int | None) -> tuple[int, str]:
    code = f"from chatmill.cli.guard import guarded\nimport os, sys\ndef command():\n    {command}\nguarded(command)"
    closing = {"preexec_fn": lambda: os.close(1)} if stdout is None else {"stdout": stdout}
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, check=False, env=buffered, **closing
    )
    return done.returncode, done.stderr


@contextlib.contextmanager
def closed_pipe():
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


PRINTING = ["print('x')", "print('x' * 10**6)", "sys.stdout.write('x'); sys.exit(0)", "print('x'); sys.stdout.flush()"]


@pytest.mark.parametrize("command", PRINTING)
def test_a_closed_pipe_ends_a_command_quietly(command):
    with closed_pipe() as pipe:
        assert ended(command, stdout=pipe) == (0, "")


@pytest.mark.parametrize("command", PRINTING)
def test_a_failed_write_is_reported_in_one_line(command):
    with Path("/dev/full").open("w") as full:
        assert ended(command, stdout=full.fileno()) == (1, "chatmill: standard output: No space left on device\n")


def test_a_failing_command_keeps_its_exit_code_if_the_pipe_is_closed():
    with closed_pipe() as pipe:
        assert ended("sys.stdout.write('x'); sys.exit(3)", stdout=pipe) == (3, "")


def test_a_closed_stdout_descriptor_is_not_reused_by_the_next_file(tmp_path):
    file = tmp_path / "file"
    assert ended(
        f"file = open({str(file)!r}, 'w'); print('x'); os.write(1, b'y'); assert file.fileno() > 2", stdout=None
    ) == (0, "")
    assert file.read_text() == ""


def test_an_error_with_a_closed_stderr_keeps_its_exit_code():
    code = "from chatmill.cli.guard import guarded\nguarded(lambda: open('none'))"
    with closed_pipe() as pipe, Path("/dev/full").open("w") as full:
        for stream in (pipe, full.fileno()):
            assert subprocess.run([sys.executable, "-c", code], stderr=stream, check=False).returncode == 1


@pytest.mark.parametrize("raised", [OSError(5, "bad", NAME), SystemExit(NAME), DataError(NAME), UserWarning(NAME)])
def test_no_control_character_of_a_name_is_printed(raised, capsys, monkeypatch):
    monkeypatch.setattr("warnings.showwarning", None)
    monkeypatch.setattr("warnings.filters", [])

    def command():
        if isinstance(raised, Warning):
            warnings.warn(raised, stacklevel=1)
        else:
            raise raised

    with pytest.raises(SystemExit):
        guarded(command)
    assert ESCAPED in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        (NAME,),
        ("verify", f"--{NAME}"),
        ("show", "x", NAME),
        ("show", "x", "0", NAME),
        ("formats", NAME),
        ("verify", NAME),
    ],
)
def test_errors_about_arguments_contain_no_control_characters(run, arguments):
    code, out, err = run(*arguments)
    assert code in (1, 2)
    assert {*acts(out + err)} <= {"\n"}


def test_help_of_each_command_to_a_closed_pipe_exits_with_0(monkeypatch):
    from chatmill.cli.main import main

    with closed_pipe() as pipe:
        for name in COMMANDS:
            stream = os.fdopen(os.dup(pipe), "w")
            monkeypatch.setattr(sys, "stdout", stream)
            monkeypatch.setattr(sys, "argv", ["chatmill", name, "--help"])
            with pytest.raises(SystemExit) as stopped:
                main()
            assert stopped.value.code == 0, name
            stream.close()


ENDS_IN_ABORT = """
import atexit, ctypes, sys, types
from chatmill.cli.guard import guarded
from chatmill.cli.options import print_table

sys.modules["chatmill.train.process_group"] = types.SimpleNamespace(has_joined={joined})
libc = ctypes.CDLL(None)
libc.__cxa_atexit(ctypes.cast(libc.abort, ctypes.c_void_p), None, None)
atexit.register(print, "closed")
guarded(lambda: print("trained"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the test uses a function of glibc")
def test_a_finished_rank_exits_with_0_even_if_a_library_destructor_aborts():
    ended = [
        subprocess.run(
            [sys.executable, "-c", ENDS_IN_ABORT.format(joined=joined)], capture_output=True, text=True, check=False
        )
        for joined in (True, False)
    ]
    assert [(done.returncode, done.stdout) for done in ended] == [(0, "trained\nclosed\n"), (-6, "trained\nclosed\n")]


def test_a_table_folds_long_texts_and_loses_no_character(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    place = "folder/" + "conversations_" * 5 + "train.jsonl:812"
    print_table(("loss", "from", ""), ("tokens",), [("7.1677", place, "A store owner buys clothes", 1000)])
    printed = capsys.readouterr().out
    assert "…" not in printed
    column = printed.splitlines()[0].index("from")
    cells = [line[column:].split(" ", 1)[0] for line in printed.splitlines()[1:]]
    assert "".join(cells) == place
