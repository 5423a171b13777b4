from __future__ import annotations

import json
import os
import random
import re
import sys
from pathlib import Path
from typing import Any

import python_service
from hostile_templates import CONTROL, ENDLESS, EXHAUSTING, FAILING, GOOD, PROMPT, PRYING, prying
from record_mutations import broken_bytes

from chatmill.errors import ChatmillError
from chatmill.format import open_renderer
from chatmill.format.template.process import channel
from chatmill.format.template.process.channel import Channel, EndedError, fork_server
from chatmill.format.template.process.client import start_server
from chatmill.records import Message, Record
from chatmill.tokenizer import train_bpe
from fault_injection.processes import apart, limited
from fault_injection.trial import Tally, Trial

TALK = Record([Message("user", "Hi"), Message("assistant", "Hello.")], file="chat.jsonl", line=7)
TEXT = "<|user|>Hi<|end|><|assistant|>Hello.<|end|>"
CPU_SECONDS, MEMORY = 60.0, 1 << 30
TOKEN = "hf_not_for_templates"
SECRET = re.compile(
    rf"{TOKEN}|<class|<function|<bound method|<built-in|<module|<slot wrapper|<frame|uid=\d|0x[0-9a-f]{{6}}"
)
"""Text that a template cannot produce from a conversation alone."""
LISTED = [*PRYING, *FAILING, *ENDLESS, *EXHAUSTING]


def source(number: int, rng: random.Random) -> tuple[str, bool]:
    if number < len(LISTED):
        # The sandbox may raise an error or return an undefined value for an access to internals, so the templates in
        # PRYING need not be rejected.
        return f"{GOOD}{PROMPT}\n{LISTED[number]}", number >= len(PRYING)
    kind = number % 4
    if kind == 0:
        return broken_bytes((GOOD + PROMPT).encode(), rng).decode(errors="replace"), False
    if kind == 1:
        one, other = rng.choice(PRYING), rng.choice(FAILING)
        return f"{GOOD}{PROMPT}\n{{% if messages | length > {rng.randrange(2)} %}}{one}{other}{{% endif %}}", True
    return f"{GOOD}{PROMPT}\n{prying(rng.randrange(10**6))}", False


def work(size: int, seed: int, folder: Path, tally: Tally) -> None:
    rng = random.Random(seed)
    folder = folder / "own"
    folder.mkdir()
    texts = ["The quick brown fox. " * 9]
    # Train the tokenizer in a child process, because training starts threads and this process forks later.
    made = apart(lambda: (folder / "tokenizer.json").write_bytes(train_bpe(texts, vocab_size=300, control=CONTROL)))
    assert made.value, made
    (folder / "tokenizer_config.json").write_text(json.dumps({}))
    os.environ["HF_TOKEN"] = TOKEN
    # All forked processes share one template server.
    start_server()
    # A small run tries only some of the fast attacks.
    quick = [*range(len([*PRYING, *FAILING])), *range(len(LISTED), len(LISTED) + 60)]
    chosen = list(range(size)) if size > len(LISTED) else quick[:: max(1, len(quick) // size)][:size]
    for number in chosen:
        written, is_bad = source(number, rng)
        (folder / "chat_template.jinja").write_text(written)

        def use() -> Any:
            format = open_renderer("template", str(folder))
            rows = format.render([TALK])
            rows.check()
            if (text := format.tokenizer.decode(rows.ids.tolist())) != format.text(TALK):
                raise AssertionError(f"the ids decode to {text!r}, but the template renders {format.text(TALK)!r}")
            return text

        ended, what = (
            apart(limited(use, MEMORY), cpu_seconds=CPU_SECONDS),
            repr(written.removeprefix(GOOD + PROMPT))[:200],
        )
        said = ended.value or ended.refused
        if SECRET.search(said or ""):
            tally.is_wrong(f"{what}: the secret leaked: {said[:200]}")
        elif is_bad and ended.value is not None:
            tally.is_wrong(f"{what}: not refused: {ended.value[:200]}")
        elif ended.value is not None and "Hello." not in ended.value:
            tally.is_wrong(f"{what}: the trained text does not contain the answer: {ended.value[:200]}")
        else:
            lost = f"{what}: {ended.broke or 'killed'}"
            tally.judge(survived=ended.value is not None, found=bool(ended.refused), lost=lost)
    (folder / "chat_template.jinja").write_text(GOOD + PROMPT)
    if (text := open_renderer("template", str(folder)).text(TALK)) != TEXT:
        raise ChatmillError(f"the valid template writes {text!r}")


def escaped(size: int, seed: int, folder: Path, tally: Tally) -> None:
    """Run Python code in a template process, as a template that escaped from Jinja's sandbox could."""
    os.environ["HF_TOKEN"] = TOKEN
    sys.path.insert(0, str(Path(python_service.__file__).parent))
    is_planted = "lock_down" in channel._START
    secret = "import os; out = dict(os.environ)"
    codes = [secret, *python_service.FORBIDDEN.values(), "out = bytearray(1 << 29)", "while True: pass"]
    for number in range(size):
        code = codes[number % len(codes)]
        process = Channel(fork_server("python_service"), 256 << 20)
        if "seccomp" not in process.protections and not is_planted:
            process.close()
            tally.skipped = "this system cannot filter system calls"
            return
        try:
            done = process.exchange(code.encode(), seconds=0.2, limit=1 << 16).decode()
        except (EndedError, EOFError) as error:
            done = f"{type(error).__name__}: {process.end()}"
        process.close()
        if TOKEN in done:
            tally.is_wrong(f"{code}: the secret leaked: {done[:200]}")
        elif done.startswith("{" if code == secret else ("PermissionError", "MemoryError", "EndedError")):
            tally.finds()
        else:
            tally.is_wrong(f"{code}: not refused: {done[:200]}")


ESCAPED = Trial(
    "Python code in a template process",
    "Runs Python code in a template process, as a template that has escaped from Jinja could. System calls that open "
    "files or sockets or start processes must be refused. Memory and time must be limited, and the environment must "
    "be empty",
    escaped,
    full=400,
    short=17,
    in_memory=True,
)

TRIAL = Trial(
    "hostile chat templates",
    "Renders templates that loop, exhaust memory, access Python's internals or fail, with a secret in the "
    "environment. Each template must be harmless or be refused with a one-line error. The secret must never leak",
    work,
    full=1500,
    short=16,
    in_memory=True,
)
