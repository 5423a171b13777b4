"""Read conversations from files of any shape into `Record`.

Record, Message, ToolCall    a conversation; they also take the dicts of OpenAI and Hugging Face
read_records                 all records of files and globs, in order
SHAPES                       the shapes of records that are read, detected from the first records of a file
Rejects                      a file of the records that could not be read, with reasons
plan, FilePart, read_part, read_blocks, ChatColumns    the same in parts and blocks, for workers
"""

from chatmill.records.columns import ChatColumns, keys_of
from chatmill.records.files import SUFFIXES, expand
from chatmill.records.read import MAX_LINE_BYTES, FilePart, plan, read_blocks, read_part, read_records
from chatmill.records.record import ROLES, Message, Record, Role, ToolCall, record_key
from chatmill.records.rejects import DEFAULT_REJECTS, CountedRecords, Rejects
from chatmill.records.shapes import SHAPES
from chatmill.records.split import Split, shuffle_split

__all__ = [
    "DEFAULT_REJECTS",
    "MAX_LINE_BYTES",
    "ROLES",
    "SHAPES",
    "SUFFIXES",
    "Message",
    "FilePart",
    "ChatColumns",
    "CountedRecords",
    "Record",
    "Rejects",
    "Role",
    "Split",
    "ToolCall",
    "expand",
    "keys_of",
    "plan",
    "read_records",
    "read_blocks",
    "read_part",
    "record_key",
    "shuffle_split",
]
