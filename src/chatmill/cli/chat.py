"""`chatmill chat`: talk to a trained model in the terminal."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from chatmill.cli.chat_model import ChatModel, open_speaker
from chatmill.cli.options import AsJson, echo_json
from chatmill.errors import ChatmillError, UsageError
from chatmill.records import Message
from chatmill.show.text import visible

if TYPE_CHECKING:
    from chatmill.train.generate import Sampling

HELP = """\
  /system TEXT   begin a new conversation with this system message
  /tool TEXT     answer a tool call of the model: what the tool gave back
  /new           begin a new conversation
  /quit          end; so does Ctrl-D. Ctrl-C cuts an answer short."""

ModelPath = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A run (checkpoints/NAME), one of its checkpoints, or a model folder.", show_default=False
    ),
]
ModelTokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer", help="The one it was trained with, if that lies neither with it, nor beside its data, nor here."
    ),
]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where; auto: on a GPU if there is one.")]


def chat(
    model: ModelPath,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Say this and print the answer. Several are said one after the other."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Cut an answer that is longer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0: always the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Draw from this many tokens; 0: from all.")] = 0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Draw from the likeliest that have this much.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="What is drawn depends on it.")] = 0,
    tokenizer: ModelTokenizer = None,
    format: Annotated[
        str | None, typer.Option("--format", help="The one it was trained with, if the model does not say.")
    ] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Talk to a model: what you type is written as it was in training, and answers end at the end token.

    Answers appear as they are made. No escape sequence or other control character of them reaches the terminal.

    \b
    Examples:
      chatmill chat checkpoints/my_sft_model
      chatmill chat checkpoints/my_sft_model --prompt "What is the capital of Peru?"
      chatmill chat checkpoints/my_sft_model --system "Answer in one word." --prompt Hello --prompt Thanks --json
    """
    if as_json and not prompt:
        raise UsageError("--json is for what --prompt says; give one")
    speaker = open_speaker(model, tokenizer=tokenizer, format=format, device=device)
    from chatmill.train.generate import Sampling

    talk = ChatSession(speaker, max_tokens, Sampling(temperature, top_k, top_p, seed))
    talk.begin(system)
    if prompt:
        _say(talk, prompt, as_json=as_json)
    else:
        _converse(talk)


@dataclass
class Reply:
    """An answer: its text, its tokens, and whether it came to its end by itself."""

    text: str
    tokens: int
    stopped: bool


class ChatSession:
    """A conversation with a model, as far as it has come."""

    def __init__(self, speaker: ChatModel, max_tokens: int, sampling: Sampling) -> None:
        self.speaker, self.max_tokens, self.sampling = speaker, max_tokens, sampling
        self.messages: list[Message] = []

    def begin(self, system: str | None = None) -> None:
        """Forget what was said; a new conversation has this system message, or none."""
        self.messages = [] if system is None else [Message("system", system)]

    def say(self, text: str, show: Callable[[str], None], *, role: Literal["user", "tool"] = "user") -> Reply:
        """Say something as the user, or as a tool, and hear the answer; `show` is given its text piece by piece.

        A `KeyboardInterrupt` while it is made cuts the answer short: it stays in the conversation as far as it came.
        """
        asked = [*self.messages, Message(role, text)]
        ids: list[int] = []

        def heard() -> Iterator[int]:
            for id in self.speaker.answer(asked, max_tokens=self.max_tokens, sampling=self.sampling):
                ids.append(id)
                if id != self.speaker.end:
                    yield id

        try:
            for piece in shown_pieces(self.speaker, heard()):
                show(piece)
        except KeyboardInterrupt:
            show(" …")
        stopped = bool(ids) and ids[-1] == self.speaker.end
        answer = self.speaker.tokenizer.decode(ids[:-1] if stopped else ids)
        self.messages = [*asked, Message("assistant", answer)]
        return Reply(answer, len(ids), stopped)


def shown_pieces(speaker: ChatModel, ids: Iterable[int]) -> Iterator[str]:
    """Tokens as text that is safe to print, as soon as whole characters are there."""
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    for id in ids:
        yield visible(decoder.decode(speaker.tokenizer.piece(id)), keep="\n\t")
    yield visible(decoder.decode(b"", final=True), keep="\n\t")


def _say(talk: ChatSession, prompts: list[str], *, as_json: bool) -> None:
    """Say what was given on the command line; the answers are all that is printed."""
    found: list[dict[str, Any]] = []
    for text in prompts:
        said = talk.say(text, _ignore if as_json else _write)
        found.append({"prompt": text, "answer": said.text, "tokens": said.tokens, "stopped": said.stopped})
        if not as_json:
            _write("\n")
            _tell_cut(said)
    if as_json:
        echo_json({"answers": found})


def _converse(talk: ChatSession) -> None:
    """Ask a person, answer, and so on."""
    interactive = sys.stdin.isatty()
    if interactive:
        typer.echo(f"Say something. {'/help':<6} lists what else you can type.", err=True)
    while True:
        try:
            line = input("> " if interactive else "")
        except (EOFError, KeyboardInterrupt):
            typer.echo("", err=True) if interactive else None
            return
        except UnicodeDecodeError:
            raise UsageError("what was typed is not UTF-8; expected text") from None
        command, _, rest = line.strip().partition(" ")
        if command == "/quit":
            return
        if command == "/help":
            typer.echo(HELP, err=True)
        elif command in ("/new", "/system"):
            talk.begin(rest if command == "/system" else None)
        elif command.startswith("/") and command != "/tool":
            typer.echo(f"no command {visible(command, limit=40)}; /help lists them", err=True)
        elif line.strip():
            try:
                said = talk.say(rest, _write, role="tool") if command == "/tool" else talk.say(line, _write)
            except ChatmillError as error:
                # What a person said is not in the conversation then, which can go on or begin anew.
                if not interactive:
                    raise
                typer.echo(str(error), err=True)
                continue
            _write("\n")
            _tell_cut(said)


def _tell_cut(said: Reply) -> None:
    if not said.stopped:
        typer.echo(f"(cut after {said.tokens:,} tokens: no end token came)", err=True)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _ignore(text: str) -> None:
    """Of an answer that is printed whole at the end."""
