from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from input_fixtures import CHATS, COMPRESS, content, said

from chatmill.errors import RecordError, UsageError
from chatmill.records import read_records, standard_input
from chatmill.records.files import KINDS, expand


@pytest.mark.parametrize(("kind", "ending"), [*zip(KINDS, COMPRESS, strict=True), (".jsonl", ".zst"), (".txt", "")])
def test_stdin_can_be_any_kind_of_file(pipe, kind, ending):
    pipe(COMPRESS[ending](content(kind)))
    records = list(read_records(["-"]))
    assert said(records) == CHATS
    assert {(record.file, record.source) for record in records} == {("-", "stdin")}


@pytest.mark.parametrize(
    ("data", "suffix"),
    [
        (b'{"messages": []}\n{"messages": []}\n', ".jsonl"),
        (b'\n\n  {"a": 1}\n', ".jsonl"),
        (b'{"a": 1}', ".jsonl"),
        (b'[{"a": 1}]', ".jsonl"),
        (b'{"a":\n {"b": 1}}\n', ".json"),
        (b'{"a": \n{"b": 1}\n', ".jsonl"),
        (b"<|USER|>hi<|END|>\n", ".txt"),
        (b"", ".jsonl"),
        (b"\x1f\x8bbroken", ".jsonl.gz"),
    ],
)
def test_the_kind_of_stdin_is_detected_from_its_first_bytes(pipe, data, suffix):
    pipe(data)
    assert standard_input.standard_input().name == f"stdin{suffix}"


def test_a_fault_in_stdin_has_its_line_and_the_temporary_file_is_removed(pipe):
    pipe(content(".jsonl", CHATS[:2]) + b"{\n")
    with pytest.raises(RecordError, match=r"^-:3: ") as caught:
        list(read_records(["-"]))
    assert caught.value.file == "-"
    folder = standard_input.standard_input().parent
    assert folder.is_dir()
    standard_input.remove_standard_input()
    assert not folder.exists()


def test_stdin_can_be_given_once_and_a_terminal_gets_a_hint(pipe, capsys):
    pipe(content(".jsonl"), is_terminal=True)
    with pytest.raises(UsageError, match=r"^-: is given twice, but standard input can be read only once; remove one$"):
        read_records(["-", "-"])
    assert capsys.readouterr().err == ""
    assert len(expand(["-"])) == 1
    assert capsys.readouterr().err == "chatmill: reading records from the terminal; press Ctrl-D to finish\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_the_process_removes_the_temporary_file_of_stdin(tmp_path, number):
    code = "from chatmill.records.standard_input import standard_input; standard_input()"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, env=environment) as process:
        process.stdin.write(b"{}\n")
        process.stdin.flush()
        try:
            while not any(tmp_path.glob("*/stdin")):
                assert process.poll() is None
                time.sleep(0.01)
            process.send_signal(number)
            assert process.wait(60) == -number
        finally:
            process.kill()
    assert list(tmp_path.iterdir()) == []
