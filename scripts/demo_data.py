"""Conversations at the desk of a lost property office: what the demo trains a small model on.

People tell what they lost (`a red silk scarf`), whom it is for (`for Ada Keller`) and where they stay (`at Mill 24`),
in any order, some of them among talk about food and the weather. The clerk notes it, takes corrections, reads all of
it back, or calls a tool to search and tells what came of it. So an answer is found in the conversation alone, in the
newest word on each matter, and much of the text has to be ignored.

A fifth of the colours with each thing, of the first with each last name and of the streets with each number are kept
for the held-out conversations: every answer there says something that no training conversation says.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

T = TypeVar("T")

COLOURS = ["red", "blue", "green", "yellow", "black", "white", "grey", "pink"]
STUFFS = ["woollen", "leather", "paper", "silk", "cotton", "plastic"]
THINGS = ["umbrella", "scarf", "hat", "glove", "bag", "book", "wallet", "lantern", "camera", "jacket"]
FIRST_NAMES = ["Ada", "Ben", "Carla", "Elif", "Farid", "Greta", "Hugo", "Ines"]
LAST_NAMES = ["Adler", "Brandt", "Costa", "Dumont", "Fontana", "Haas", "Keller", "Novak"]
STREETS = ["Castle", "Harbour", "Garden", "Market", "Mill", "Opera", "River", "Tower"]
NUMBERS = range(10, 50)
FOODS = ["soup", "bread", "noodles", "salad", "coffee", "cake", "rice", "beans", "pancakes", "apples", "cheese"]
WEATHERS = ["rain", "snow", "fog", "wind", "hail", "sunshine", "thunder", "frost"]
PEOPLE = ["My sister", "My uncle", "My neighbour", "My teacher"]

DIGITS = range(50, 100)
"""Of tickets and the like, which say nothing about the matter; no house has such a number."""

SYSTEM = "You are the clerk of the lost property office. Notice board:"
NOTICES = [
    "Canteen: {food} and {food2}.",
    "Weather: {weather}, then {weather2}.",
    "No {food} today.",
    "Mind the {weather}.",
    "Lottery: {digits}.",
    "Lost tickets: {digits}.",
]
TALK = [
    "There was {weather}, then {weather2}.",
    "{person} had {food} and {food2}.",
    "We talked about {food}, {weather} and {food2}.",
    "{person} wanted {food}.",
    "{person} hates {weather}.",
    "I ate {food} in {weather}.",
    "First {food}, then {food2}.",
    "My ticket says {digits}.",
    "The sign said {digits}.",
    "I counted {digits}.",
]
TELLING = {
    "item": ["I lost {}.", "Somebody took {}.", "I left {} behind.", "I miss {}."],
    "whom": ["It is {}.", "Please keep it {}.", "Put it down {}."],
    "place": ["I live {}.", "You find me {}.", "I stay {}."],
}
READ_BACK = ["Read it all back, please.", "Please read it back.", "What did you write down?"]
SEARCH = ["Please search now.", "Can you search?", "Search, please."]


@dataclass(frozen=True)
class Facts:
    """What may be said of each matter: pairs that training and held-out conversations do not share."""

    items: Sequence[tuple[str, str]]
    whom: Sequence[tuple[str, str]]
    places: Sequence[tuple[str, int]]

    def draw(self, matter: str, rng: random.Random) -> str:
        """Something to say of a matter. The word it begins with says which matter that is."""
        if matter == "item":
            colour, thing = rng.choice(self.items)
            return f"a {colour} {rng.choice(STUFFS)} {thing}"
        if matter == "whom":
            return "for {} {}".format(*rng.choice(self.whom))
        return "at {} {}".format(*rng.choice(self.places))


def split_facts(seed: int) -> tuple[Facts, Facts]:
    """The facts of the training conversations, and those of the held-out ones: four fifths and one."""
    rng = random.Random(seed)
    pairs: tuple[list[Any], ...] = (
        list(product(COLOURS, THINGS)),
        list(product(FIRST_NAMES, LAST_NAMES)),
        list(product(STREETS, NUMBERS)),
    )
    for each in pairs:
        rng.shuffle(each)
    return Facts(*(each[len(each) // 5 :] for each in pairs)), Facts(*(each[: len(each) // 5] for each in pairs))


class Desk:
    """One conversation as it goes on."""

    def __init__(self, facts: Facts, rng: random.Random) -> None:
        self.rng, self._facts = rng, facts
        self._noisy = rng.random() < 0.3
        self.told: dict[str, str] = {}
        self.system = f"{SYSTEM} {self._lines(NOTICES, 1, 3)}" if self._noisy else None
        self.messages: list[dict[str, Any]] = []

    def _lines(self, among: Sequence[str], least: int, most: int) -> str:
        return " ".join(self._line(among) for _ in range(self.rng.randint(least, most)))

    def _line(self, among: Sequence[str]) -> str:
        foods, weathers = self.rng.sample(FOODS, 2), self.rng.sample(WEATHERS, 2)
        digits = " ".join(map(str, self.rng.choices(DIGITS, k=self.rng.randint(3, 6))))
        words = {"digits": digits, "food": foods[0], "food2": foods[1], "weather": weathers[0], "weather2": weathers[1]}
        return self.rng.choice(among).format(person=self.rng.choice(PEOPLE), **words)

    def say(self, *sentences: str) -> None:
        """The user says these sentences, and perhaps others among them."""
        said = [*sentences]
        if self._noisy:
            said += [self._line(TALK) for _ in range(self.rng.randint(0, 3))]
        self.rng.shuffle(said)
        self.messages.append({"role": "user", "content": " ".join(said)})

    def answer(self, content: str) -> None:
        self.messages.append({"role": "assistant", "content": content})

    def tell(self, matters: Sequence[str]) -> None:
        """The user tells of these matters, and the clerk notes it."""
        for matter in matters:
            self.told[matter] = self._facts.draw(matter, self.rng)
        self.say(*(self.rng.choice(TELLING[matter]).format(self.told[matter]) for matter in matters))
        self.answer(f"Noted: {self.facts(matters)}.")

    def correct(self) -> None:
        """The user takes one of the facts back for another."""
        matter = self.rng.choice(list(self.told))
        self.told[matter] = self._facts.draw(matter, self.rng)
        self.say(f"No, {self.told[matter]}.")
        self.answer(f"Noted: {self.told[matter]}.")

    def facts(self, matters: Sequence[str]) -> str:
        """What is known of these matters, in the clerk's own order."""
        return " ".join(self.told[matter] for matter in TELLING if matter in matters)

    def tool(self, found: str) -> str:
        """What a tool gives back."""
        return f"{self._line(NOTICES)} {found}" if self._noisy else found

    def shelf(self) -> str:
        return self._facts.draw("place", self.rng).removeprefix("at ")


def begin(facts: Facts, rng: random.Random, *, brief: float = 0) -> Desk:
    """A conversation in which all matters have been told, some of them perhaps twice; or only some, with a chance."""
    desk = Desk(facts, rng)
    matters = rng.sample(list(TELLING), len(TELLING))
    first = rng.choice([1, 1, 2, 3])
    desk.tell(matters[:first])
    if rng.random() < brief:
        return desk
    if matters[first:]:
        desk.tell(matters[first:])
    if rng.random() < 0.35:
        desk.correct()
    return desk


def chat(facts: Facts, rng: random.Random) -> dict[str, Any]:
    """A conversation in which all is read back in the end, or one that is soon over, in the shape `messages`."""
    desk = begin(facts, rng, brief=0.5)
    if len(desk.told) == len(TELLING):
        desk.say(rng.choice(READ_BACK))
        desk.answer(f"So: {desk.facts(list(TELLING))}.")
    system = [] if desk.system is None else [{"role": "system", "content": desk.system}]
    return {"messages": system + desk.messages}


def tools(facts: Facts, rng: random.Random) -> dict[str, Any]:
    """A conversation in which the clerk searches, in the shape `tool`."""
    desk = begin(facts, rng)
    desk.say(rng.choice(SEARCH))
    arguments = {"item": desk.told["item"], "keep": desk.told["whom"]}
    desk.messages.append({"role": "assistant_toolcall", "name": "search", "arguments": arguments})
    shelf = desk.shelf() if rng.random() < 0.7 else None
    found = desk.tool("Nothing." if shelf is None else f"Found on shelf {shelf}.")
    desk.messages.append({"role": "toolresult", "name": "search", "content": found})
    if shelf is None:
        desk.answer(f"Sorry, {desk.told['item']} is not here.")
    else:
        desk.answer(f"Good news: {desk.told['item']} is on shelf {shelf}.")
    return ({} if desk.system is None else {"system": desk.system}) | {"messages": desk.messages}


def conversations(
    make: Callable[[Facts, random.Random], dict[str, Any]], facts: Facts, *, seed: int
) -> Iterator[dict[str, Any]]:
    """Conversations without end, no two of them alike."""
    rng, made = random.Random(seed), set[str]()
    while True:
        conversation = make(facts, rng)
        written = json.dumps(conversation)
        if written not in made:
            made.add(written)
            yield conversation
