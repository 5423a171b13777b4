"""Read conversations from files: every shape becomes the one `Record`, every fault one line."""

from chatmill.records.columns import ChatColumns, keys_of
from chatmill.records.counted import DEFAULT_REJECTS, CountedRecords
from chatmill.records.files import SUFFIXES, expand
from chatmill.records.read import MAX_LINE_BYTES, FilePart, plan, read_blocks, read_part, read_records
from chatmill.records.record import ROLES, Message, Record, Role, ToolCall, record_key
from chatmill.records.rejects import Rejects
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
