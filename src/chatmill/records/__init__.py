"""Read conversations of any supported shape from files into `Record` objects.

`Record`, `Message` and `ToolCall` represent a conversation; they can also be built from OpenAI and Hugging Face dicts.
`read_records` reads all records of files, globs, folders and URLs, in order.
`SHAPES` lists the supported record shapes, and `ShapeOptions` contains their options.
`plan` returns one `FilePart` per file, and `read_part` and `read_blocks` read the records of a part.
`ChatColumns` stores plain conversations in columns.
`unroll_record` returns an `Unrolled` object, which has one row per answer.
`InputFiles`, `ReadLog` and `BytesRead` detect files that change while they are read.

Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING as _TYPE_CHECKING

from chatmill._exports import lazy_exports as _lazy_exports

if _TYPE_CHECKING:
    from chatmill.records.columns import ChatColumns as ChatColumns
    from chatmill.records.columns import keys_of as keys_of
    from chatmill.records.files import SUFFIXES as SUFFIXES
    from chatmill.records.files import expand as expand
    from chatmill.records.input_files import InputFiles as InputFiles
    from chatmill.records.read import MAX_LINE_BYTES as MAX_LINE_BYTES
    from chatmill.records.read import FilePart as FilePart
    from chatmill.records.read import plan as plan
    from chatmill.records.read import read_blocks as read_blocks
    from chatmill.records.read import read_part as read_part
    from chatmill.records.read import read_records as read_records
    from chatmill.records.read_log import BytesRead as BytesRead
    from chatmill.records.read_log import ReadLog as ReadLog
    from chatmill.records.record import NO_ROLE as NO_ROLE
    from chatmill.records.record import ROLES as ROLES
    from chatmill.records.record import Message as Message
    from chatmill.records.record import Record as Record
    from chatmill.records.record import Role as Role
    from chatmill.records.record import ToolCall as ToolCall
    from chatmill.records.record import record_key as record_key
    from chatmill.records.shapes import SHAPES as SHAPES
    from chatmill.records.shapes import ShapeOptions as ShapeOptions
    from chatmill.records.split import Split as Split
    from chatmill.records.split import shuffle_split as shuffle_split
    from chatmill.records.unroll import Unrolled as Unrolled
    from chatmill.records.unroll import unroll_record as unroll_record

__all__, __getattr__, __dir__ = _lazy_exports(__name__)
