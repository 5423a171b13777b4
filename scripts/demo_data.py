"""Generate the demo's data: conversations at the desk of a lost property office.

Visitors ask where something is kept, when the office is open, or whether something was found. To check whether
something was found, the clerk calls a tool. The facts never change, and every question has several wordings.

In the training conversations, a careless reply (`Next, please!`) and a complaint precede two out of three answers.
Careless replies have weight 0, so the model does not learn them. A model that is trained on every token also learns
the careless replies. Held-out conversations have no careless replies. A fifth of all combinations of a wording and a
subject are held out, and never occur in training.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

SHELVES = {
    "umbrellas": 4, "scarves": 7, "hats": 2, "gloves": 9, "bags": 1,
    "books": 6, "wallets": 3, "lanterns": 8, "cameras": 5, "jackets": 10,
}  # fmt: skip
HOURS = {
    "Monday": "8 to 12", "Tuesday": "9 to 17", "Wednesday": "8 to 15", "Thursday": "13 to 18",
    "Friday": "8 to 13", "Saturday": "10 to 11", "Sunday": "14 to 16",
}  # fmt: skip
WHERE = ["Where do you keep {}?", "Which shelf has the {}?", "Where are the {}?", "I look for {}.", "Show me the {}."]
WHEN = ["When are you open on {}?", "What are the hours on {}?", "Can I come on {}?", "{}, please: which hours?"]
FOUND = ["Did anybody find my {}?", "Are my {} here?", "Please search for my {}.", "I lost my {}."]
CARELESS_REPLY = "Next, please!"
COMPLAINTS = ["Please answer.", "Be polite."]
CARELESS_SHARE = 2 / 3
SYSTEM = "You are the clerk of the lost property office."


class Questions(NamedTuple):
    """The questions of a set of conversations: pairs of a wording and a subject."""

    where: Sequence[tuple[str, str]]
    when: Sequence[tuple[str, str]]
    found: Sequence[tuple[str, str]]
    careless: bool
    """Whether some conversations contain a careless reply and a complaint before the correct answer."""


def split_questions(seed: int) -> tuple[Questions, Questions]:
    """Return four fifths of the questions for training, and one fifth for held-out conversations."""
    rng = random.Random(seed)
    kinds = [list(product(WHERE, SHELVES)), list(product(WHEN, HOURS)), list(product(FOUND, SHELVES))]
    for pairs in kinds:
        rng.shuffle(pairs)
    few = [len(pairs) // 5 for pairs in kinds]
    return (
        Questions(*(pairs[count:] for pairs, count in zip(kinds, few, strict=True)), careless=True),
        Questions(*(pairs[:count] for pairs, count in zip(kinds, few, strict=True)), careless=False),
    )


class Desk:
    def __init__(self, questions: Questions, rng: random.Random) -> None:
        self.questions, self.rng = questions, rng
        self.messages: list[dict[str, Any]] = []

    def visitor(self, content: str) -> None:
        self.messages.append({"role": "user", "content": content})

    def careless_reply(self) -> None:
        """Sometimes add a careless reply from the clerk, and a complaint from the visitor."""
        if self.questions.careless and self.rng.random() < CARELESS_SHARE:
            self.messages.append({"role": "assistant", "content": CARELESS_REPLY, "weight": 0})
            self.visitor(self.rng.choice(COMPLAINTS))

    def clerk(self, content: str) -> None:
        self.careless_reply()
        self.messages.append({"role": "assistant", "content": content})

    def question(self) -> None:
        """Add a question that the clerk answers from memory."""
        if self.rng.random() < 0.5:
            wording, things = self.rng.choice(self.questions.where)
            self.visitor(wording.format(things))
            self.clerk(f"The {things} are on shelf {SHELVES[things]}.")
        else:
            wording, day = self.rng.choice(self.questions.when)
            self.visitor(wording.format(day))
            self.clerk(f"On {day} we are open from {HOURS[day]}.")

    def search(self) -> None:
        """Add a question that the clerk answers with a tool."""
        wording, things = self.rng.choice(self.questions.found)
        self.visitor(wording.format(things))
        self.careless_reply()
        self.messages.append({"role": "assistant_toolcall", "name": "search", "arguments": {"things": things}})
        found = self.rng.random() < 0.5
        self.messages.append({"role": "toolresult", "name": "search", "content": "Found." if found else "Nothing."})
        self.clerk(f"Yes, your {things} are on shelf {SHELVES[things]}." if found else "Sorry, nobody found them.")


def chat(questions: Questions, rng: random.Random) -> dict[str, Any]:
    """Return a record of shape `messages` with one to three questions."""
    desk = Desk(questions, rng)
    for _ in range(rng.randint(1, 3)):
        desk.question()
    return {"messages": desk.messages}


def tools(questions: Questions, rng: random.Random) -> dict[str, Any]:
    """Return a record of shape `tool` with one or two searches, sometimes after another question."""
    desk = Desk(questions, rng)
    if rng.random() < 0.3:
        desk.question()
    for _ in range(rng.randint(1, 2)):
        desk.search()
    return {"system": SYSTEM, "messages": desk.messages}


def conversations(
    make: Callable[[Questions, random.Random], dict[str, Any]], questions: Questions, *, seed: int
) -> Iterator[dict[str, Any]]:
    """Yield an infinite sequence of distinct conversations."""
    rng, made = random.Random(seed), set[str]()
    while True:
        conversation = make(questions, rng)
        text = json.dumps(conversation)
        if text not in made:
            made.add(text)
            yield conversation
