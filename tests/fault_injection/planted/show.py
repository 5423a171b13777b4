"""Bugs in the output of commands and in the viewer."""

from __future__ import annotations

import re
from contextlib import nullcontext

from chatmill import errors
from chatmill.cli import streams


def names_printed_as_they_are() -> None:
    errors._escaped = lambda run, keep: run


def closed_pipe_is_an_error() -> None:
    streams.Styled._failures = lambda self: nullcontext()


def full_output_swallowed() -> None:
    streams.Styled._failures = streams.ErrorOutput._failures


def half_open_connections_kept() -> None:
    from chatmill.show.connections import LimitedConnection

    LimitedConnection._wait_for_client = lambda self: None


def any_number_of_connections() -> None:
    from chatmill.show.connections import LimitedConnection

    LimitedConnection.is_open = False


def any_number_of_digits() -> None:
    from starlette.convertors import CONVERTOR_TYPES

    from chatmill.show import server

    CONVERTOR_TYPES["index"].regex = "[0-9]+"
    server.NUMBER = re.compile(".*", re.DOTALL)
