"""`chatmill chat`: talk to a trained model in the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from chatmill.cli.options import AsJson, argument, echo_json
from chatmill.errors import ChatmillError, UsageError, one_line
from chatmill.show.text import visible
from chatmill.train.checkpoint_files import model_folder
from chatmill.train.model_files import check_headers

if TYPE_CHECKING:
    from chatmill.train.chat_model import ChatSession, Reply

HELP = """\
  /system TEXT   start a new conversation with this system message
  /tool TEXT     send the result of a tool call
  /new           start a new conversation
  /quit          quit (or press Ctrl-D); Ctrl-C stops the current answer"""

ModelPlace = Annotated[
    str, argument("MODEL", "Run folder (checkpoints/NAME), one of its checkpoints, or a model folder.")
]
ModelTokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        help="Tokenizer that the model was trained with, if it is not found next to the model or its data.",
    ),
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"], typer.Option(help="Device to use. auto selects a GPU if one is available.")
]

BaseChoice = Annotated[
    Literal["trained", "original"],
    typer.Option(
        "--base",
        help="How to load the base model of adapters: as in training (4-bit if quantized) or as stored on disk.",
    ),
]
BaseModel = Annotated[
    str | None,
    typer.Option("--base-model", metavar="FOLDER", help="Base model folder for adapters, if it has moved."),
]


def chat(
    model: ModelPlace,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Send this message and print the answer; may be repeated for several turns."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum length of an answer in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 is greedy decoding.")] = 0.0,
    top_k: Annotated[
        int, typer.Option(min=0, help="Sample from this many of the most likely tokens; 0 disables top-k sampling.")
    ] = 0,
    top_p: Annotated[
        float, typer.Option(min=0, max=1, help="Sample from the most likely tokens up to this cumulative probability.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed for sampling.")] = 0,
    tokenizer: ModelTokenizer = None,
    format: Annotated[
        str | None,
        typer.Option(
            "--format", help="Chat format that the model was trained with, if the model folder does not record it."
        ),
    ] = None,
    device: Device = "auto",
    base: BaseChoice = "trained",
    base_model: BaseModel = None,
    as_json: AsJson = False,
) -> None:
    """Chat with a trained model, using the chat format that it was trained with.

    Streams each answer until the end-of-turn token. Keeps the conversation until /new; /help lists the other commands.
    Control characters and escape sequences in answers are not sent to the terminal.

    \b
    Examples:
      chatmill chat checkpoints/my_sft_model
      chatmill chat checkpoints/my_sft_model --prompt "What is the capital of Peru?"
      chatmill chat checkpoints/my_sft_model --system "Answer in one word." --prompt Hello --prompt Thanks --json
    """
    if as_json and not prompt:
        raise UsageError("--json requires --prompt")
    # Check the model files before importing torch, which takes seconds.
    check_headers(model_folder(model))
    from chatmill.train.chat_model import ChatSession, open_chat_model
    from chatmill.train.generation import Sampling

    chat_model = open_chat_model(
        model, tokenizer=tokenizer, format=format, device=device, base=base, base_model=base_model
    )
    session = ChatSession(chat_model, max_tokens, Sampling(temperature, top_k, top_p, seed))
    session.reset(system)
    if prompt:
        _send_all(session, prompt, as_json=as_json)
    else:
        _converse(session)


def _send_all(session: ChatSession, prompts: list[str], *, as_json: bool) -> None:
    answers = []
    for text in prompts:
        # With --json, all answers are printed together at the end.
        reply = session.send(text, (lambda text: None) if as_json else _write)
        answers.append({"prompt": text, "answer": reply.text, "tokens": reply.tokens, "stopped": reply.stopped})
        if not as_json:
            _end_reply(reply)
    if as_json:
        echo_json({"answers": answers})


def _converse(session: ChatSession) -> None:
    """Answer each line of standard input, typed or piped."""
    interactive = sys.stdin.isatty()
    if interactive:
        typer.echo(f"format: {one_line(str(session.model.renderer.to_json()['name']))}", err=True)
        typer.echo(f"Type a message. {'/help':<6} lists commands.", err=True)
    while True:
        try:
            line = input("> " if interactive else "")
        except (EOFError, KeyboardInterrupt):
            typer.echo("", err=True) if interactive else None
            return
        except UnicodeDecodeError:
            raise UsageError("the input is not valid UTF-8; expected UTF-8 text") from None
        command, _, argument = line.strip().partition(" ")
        if command == "/quit":
            return
        if command == "/help":
            typer.echo(HELP, err=True)
        elif command in ("/new", "/system"):
            session.reset(argument if command == "/system" else None)
        elif command.startswith("/") and command != "/tool":
            typer.echo(f"unknown command {visible(command, limit=40)}; /help lists the commands", err=True)
        elif line.strip():
            try:
                is_tool = command == "/tool"
                reply = session.send(argument, _write, role="tool") if is_tool else session.send(line, _write)
            except ChatmillError as error:
                # The message that failed is not added to the conversation, so the user can continue.
                if not interactive:
                    raise
                typer.echo(str(error), err=True)
                continue
            _end_reply(reply)


def _end_reply(reply: Reply) -> None:
    _write("\n")
    if not reply.stopped:
        typer.echo(f"(cut off after {reply.tokens:,} tokens without an end-of-turn token)", err=True)


def _write(text: str) -> None:
    sys.stdout.write(visible(text, keep="\n\t"))
    sys.stdout.flush()
