"""Read rollouts and ground truth from files, and replay the rollouts of a run.

    truth     {"id": "7", "messages": [{"role": "user", "content": "…"}], "objects": [{"desc": …, "bbox_2d": …}]}
    rollouts  {"id": "7", "response_token_ids": [123, 34, …], "prompt_token_ids": [256, …], "step": 0, "row": 3}

A rollout refers to its record by `id`; `prompt_token_ids`, `step` and `row` are optional.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from chatmill.errors import DataError, RecordError, UsageError
from chatmill.records import MAX_LINE_BYTES, Record
from chatmill.records.files import expand, label, shown, source_name
from chatmill.records.shapes import messages, parsed_record
from chatmill.records.shapes.decode import decode_object, named
from chatmill.records.shapes.fields import KeyReader, record_id
from chatmill.records.standard_input import is_standard_input
from chatmill.records.units import lines
from chatmill.remote.urls import Place, place


@dataclass(frozen=True)
class GroundTruth:
    """A conversation, and the objects that the answer should contain."""

    record: Record
    objects: tuple[Mapping[str, Any], ...]


class Rollout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A generated answer, as stored in a rollout file."""

    id: str
    response_token_ids: list[int]
    prompt_token_ids: list[int] | None = None
    step: int | None = None
    row: int | None = None


def read_truth(path: str | Path) -> Iterator[GroundTruth]:
    """Yield the ground-truth records of a .jsonl file; raise `RecordError` for an invalid record or a repeated id."""
    seen: dict[str, int] = {}
    file = _one(path)
    name, source = _name(file), source_name(file)
    for line, data in lines(file, limit=MAX_LINE_BYTES):
        id = None
        try:
            record = decode_object(data)
            id = record_id(KeyReader("the record", "", record, {}))
            objects = record.get("objects")
            parsed = messages.parse({key: value for key, value in record.items() if key != "objects"})
            if id is None:
                raise RecordError(
                    "the record has no id", 'expected an "id", which rollouts use to refer to the record', kind="id"
                )
            if id in seen:
                raise RecordError(
                    f"the id is already used in line {seen[id]}", "expected a unique id for every record", kind="id"
                )
            if not isinstance(objects, list):
                what = f"objects is {named(objects)}" if "objects" in record else "the record has no objects"
                raise RecordError(what, "expected a list of objects, which may be empty", kind="objects")
            for number, thing in enumerate(objects):
                if not isinstance(thing, dict):
                    raise RecordError(f"objects[{number}] is {named(thing)}", "expected an object", kind="objects")
            if parsed.messages[-1].role == "assistant":
                right = 'expected a question as the last message, with the ground truth in "objects"'
                raise RecordError("the last message is an assistant message", right, kind="answered")
        except RecursionError:
            fault = RecordError("the record is nested too deeply", "expected fewer levels", kind="nesting")
            raise fault.at(name, line) from None
        except RecordError as fault:
            raise fault.at(name, line, id) from None
        seen[id] = line
        yield GroundTruth(parsed_record(parsed, source, name, line), tuple(objects))


def _one(path: str | Path) -> Place:
    file, *others = expand([path])
    if others:
        raise UsageError(f"{shown(place(path))}: matches {1 + len(others)} files; expected one file")
    return file


_ROLLOUT = msgspec.json.Decoder(Rollout)


def read_rollouts(path: str | Path) -> Iterator[tuple[int, Rollout]]:
    """Yield the line number and the rollout of each line of a .jsonl file."""
    file = _one(path)
    for line, data in lines(file, limit=MAX_LINE_BYTES):
        try:
            yield line, _ROLLOUT.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            right = 'expected {"id": "…", "response_token_ids": [1, 2, …]}'
            raise RecordError(f"is not a rollout ({error})", right, kind="rollout").at(_name(file), line) from None


def log_rollouts(file: BinaryIO, rollouts: Iterable[Rollout]) -> None:
    """Append rollouts to the log of a run, one per line."""
    file.writelines(msgspec.json.encode(rollout) + b"\n" for rollout in rollouts)
    file.flush()


class RolloutReplay:
    """A `Generator` that returns the answers from the log of an earlier run."""

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._logged: dict[tuple[int, int], Rollout] = {}
        for line, rollout in read_rollouts(path):
            if rollout.step is None or rollout.row is None:
                raise DataError(f"{path}:{line}: the rollout has no step or row; expected the rollouts.jsonl of a run")
            self._logged[rollout.step, rollout.row] = rollout

    def __call__(
        self, prompts: Sequence[Sequence[int]], *, step: int, first_row: int = 0, records: Sequence[Record] = ()
    ) -> list[list[int]]:
        answers = []
        for row, prompt in enumerate(prompts, start=first_row):
            rollout = self._logged.get((step, row))
            if rollout is None:
                raise DataError(
                    f"{self._path}: has no rollout for step {step}, row {row}; use the settings of the logged run"
                )
            if rollout.prompt_token_ids is not None and rollout.prompt_token_ids != list(prompt):
                raise DataError(
                    f"{self._path}: the prompt of step {step}, row {row} is different; use the data of the logged run"
                )
            answers.append(rollout.response_token_ids)
        return answers


def _name(path: Place) -> str:
    """Return a relative path unchanged; for an absolute path or a URL, return only the file name."""
    is_relative = isinstance(path, Path) and not path.is_absolute()
    return label(path) if is_relative or is_standard_input(path) else path.name
