"""Write the small conversations in data/ that the README, the demo and the tests use.

    python scripts/make_data.py            write the files
    python scripts/make_data.py --check    exit with 1 if a file differs from what this script writes

    conversations.jsonl      `messages` shape: short questions with answers, and small talk
    tool_conversations.jsonl `tool` shape: the assistant calls tools and reads their results
    primer.jsonl             `primer` shape: role and content only
    desk_chat.jsonl, desk_tools.jsonl
                             training data of the demo: the desk of a lost property office (scripts/demo_data.py)
    desk_chat_heldout.jsonl, desk_tools_heldout.jsonl
                             held-out questions of the demo, which do not occur in its training data

Each file depends only on its seed, so its bytes are the same on every machine.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import demo_data

DATA = Path(__file__).resolve().parents[1] / "data"

CAPITALS = {
    "Austria": "Vienna",
    "Brazil": "Brasília",
    "Canada": "Ottawa",
    "Chile": "Santiago",
    "Colombia": "Bogotá",
    "Egypt": "Cairo",
    "Finland": "Helsinki",
    "France": "Paris",
    "Ghana": "Accra",
    "Greece": "Athens",
    "Hungary": "Budapest",
    "Iceland": "Reykjavík",
    "India": "New Delhi",
    "Ireland": "Dublin",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Moldova": "Chișinău",
    "Norway": "Oslo",
    "Paraguay": "Asunción",
    "Peru": "Lima",
    "Poland": "Warsaw",
    "Portugal": "Lisbon",
    "Thailand": "Bangkok",
    "Vietnam": "Hanoi",
}
FACTS = {
    "How many legs does a spider have?": "A spider has eight legs.",
    "How many legs does an insect have?": "An insect has six legs.",
    "What is the chemical symbol for gold?": "The symbol for gold is Au.",
    "What is the chemical symbol for iron?": "The symbol for iron is Fe.",
    "What is water made of?": "Water is made of hydrogen and oxygen: H₂O.",
    "Which planet is closest to the sun?": "Mercury is closest to the sun.",
    "Which planet is the largest?": "Jupiter is the largest planet.",
    "How many sides does a hexagon have?": "A hexagon has six sides.",
    "How many minutes are in a day?": "A day has 1440 minutes.",
    "What do bees make?": "Bees make honey.",
    "What is the opposite of north?": "The opposite of north is south.",
    "At what temperature does water freeze?": "Water freezes at 0 °C, which is 32 °F.",
    "What is the square root of 81?": "The square root of 81 is 9.",
    "What colour do you get from blue and yellow?": "Blue and yellow make green.",
    "How many strings does a violin have?": "A violin has four strings.",
    "What is π to two places?": "π is about 3.14.",
}
TRANSLATIONS = {
    ("good morning", "German"): "Guten Morgen",
    ("good morning", "Japanese"): "おはようございます",
    ("good night", "Spanish"): "Buenas noches",
    ("thank you", "Chinese"): "谢谢",
    ("thank you", "Greek"): "ευχαριστώ",
    ("thank you", "Arabic"): "شكرا",
    ("thank you", "Korean"): "감사합니다",
    ("hello", "Hindi"): "नमस्ते",
    ("hello", "Russian"): "привет",
    ("hello", "French"): "salut",
    ("please", "Polish"): "proszę",
    ("friend", "Turkish"): "arkadaş",
    ("water", "Icelandic"): "vatn",
    ("water", "Hebrew"): "מים",
}
SMALL_TALK = {
    "Hello!": "Hello! What can I do for you?",
    "Hi there.": "Hi! How can I help?",
    "Good morning.": "Good morning! What is on your mind?",
    "How are you today?": "I am well, thank you. How are you?",
    "What can you do?": "I answer small questions: sums, capitals, words, units and days.",
    "Tell me something nice.": "Somewhere, right now, somebody is reading a good book. 📚",
    "I am bored.": "Then let us play: give me a word and I will reverse it.",
    "I have an exam tomorrow.": "Good luck! Sleep well and have a calm breakfast. 🍀",
    "My plant looks sad.": "Check the soil first: if it is dry, water it; if it is wet, wait.",
    "Do you like music?": "I cannot hear it, but I like reading about it. 🎵",
    "It is raining again.": "A good day for tea and a window seat. ☔",
    "I burned my toast.": "It happens. Scrape it, butter it, and call it rustic.",
}
THANKS = {
    "Thanks!": "You are welcome!",
    "Thank you, that helps.": "Glad to hear it.",
    "Great, thanks.": "Any time.",
    "Merci !": "De rien !",
    "Perfect 👍": "Good! Ask again whenever you like.",
}
SYSTEMS = [
    "You are a helpful assistant.",
    "You answer briefly and correctly.",
    "You are a patient teacher. Show the steps when there are any.",
    "Answer in one sentence.",
    "You are a friendly assistant in a small library.",
]
# fmt: off
WORDS = [
    "apple", "banana", "bottle", "bridge", "candle", "coffee", "dragon", "engine", "forest", "garden", "hammer",
    "island", "jungle", "kettle", "ladder", "lemon", "marble", "mirror", "needle", "orange", "pepper", "planet",
    "rabbit", "river", "saddle", "silver", "street", "summer", "tomato", "tunnel", "velvet", "window", "winter",
    "café", "naïve", "jalapeño", "smörgås", "façade",
]
# fmt: on
UNITS = [
    ("kilometres", "metres", 1000),
    ("metres", "centimetres", 100),
    ("hours", "minutes", 60),
    ("minutes", "seconds", 60),
    ("days", "hours", 24),
    ("weeks", "days", 7),
    ("kilograms", "grams", 1000),
    ("feet", "inches", 12),
    ("litres", "millilitres", 1000),
]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]

Turn = dict[str, str]
Kind = Callable[[random.Random], list[tuple[str, str]]]


def capital(rng: random.Random) -> list[tuple[str, str]]:
    country, city = rng.choice(list(CAPITALS.items()))
    ask = rng.choice([f"What is the capital of {country}?", f"Which city is the capital of {country}?"])
    pairs = [(ask, f"The capital of {country} is {city}.")]
    if rng.random() < 0.4:
        other, its = rng.choice([pair for pair in CAPITALS.items() if pair[0] != country])
        pairs.append((f"And of {other}?", f"The capital of {other} is {its}."))
    return pairs


def sum_of_two(rng: random.Random) -> list[tuple[str, str]]:
    a, b = rng.randrange(2, 50), rng.randrange(2, 50)
    a, b = max(a, b), min(a, b)
    sign, result = rng.choice([("+", a + b), ("-", a - b), ("×", a * b)])
    ask = rng.choice([f"What is {a} {sign} {b}?", f"Compute {a} {sign} {b}.", f"{a} {sign} {b} = ?"])
    pairs = [(ask, f"{a} {sign} {b} = {result}.")]
    if rng.random() < 0.4:
        pairs.append(("Now add 10 to that.", f"{result} + 10 = {result + 10}."))
        if rng.random() < 0.5:
            pairs.append(("And take away 3.", f"{result + 10} - 3 = {result + 7}."))
    return pairs


def fact(rng: random.Random) -> list[tuple[str, str]]:
    return rng.sample(list(FACTS.items()), rng.choice([1, 1, 2]))


def reversal(rng: random.Random) -> list[tuple[str, str]]:
    first, second = rng.sample(WORDS, 2)
    pairs = [(f'Reverse the word "{first}".', f'"{first}" reversed is "{first[::-1]}".')]
    if rng.random() < 0.4:
        pairs.append((f'Now "{second}".', f'"{second}" reversed is "{second[::-1]}".'))
    return pairs


def letters(rng: random.Random) -> list[tuple[str, str]]:
    word = rng.choice(WORDS)
    letter = rng.choice(sorted(set(word)))
    count = word.count(letter)
    times = "once" if count == 1 else f"{count} times"
    spelled = ", ".join(word)
    return [
        (f'How often does "{letter}" appear in "{word}"?', f'Spelled out: {spelled}. "{letter}" appears {times}.'),
    ]


def conversion(rng: random.Random) -> list[tuple[str, str]]:
    large, small, factor = rng.choice(UNITS)
    amount = rng.randrange(2, 13)
    pairs = [(f"How many {small} are {amount} {large}?", f"{amount} {large} are {amount * factor} {small}.")]
    if rng.random() < 0.3:
        pairs.append((f"And {amount + 5} {large}?", f"{amount + 5} {large} are {(amount + 5) * factor} {small}."))
    return pairs


def weekday(rng: random.Random) -> list[tuple[str, str]]:
    start, ahead = rng.randrange(7), rng.randrange(1, 15)
    unit = "day" if ahead == 1 else "days"
    later = DAYS[(start + ahead) % 7]
    return [(f"Today is {DAYS[start]}. What day is it in {ahead} {unit}?", f"In {ahead} {unit} it will be {later}.")]


def translation(rng: random.Random) -> list[tuple[str, str]]:
    (phrase, language), result = rng.choice(list(TRANSLATIONS.items()))
    return [(f'How do you say "{phrase}" in {language}?', f'In {language}, "{phrase}" is "{result}".')]


def small_talk(rng: random.Random) -> list[tuple[str, str]]:
    return rng.sample(list(SMALL_TALK.items()), rng.choice([1, 2, 2]))


KINDS: list[Kind] = [capital, sum_of_two, fact, reversal, letters, conversion, weekday, translation, small_talk]


def conversation(rng: random.Random) -> list[Turn]:
    """Return one conversation: an optional system message, one or two topics, and an optional thank-you."""
    pairs = rng.choice(KINDS)(rng)
    if rng.random() < 0.15:
        pairs += rng.choice(KINDS)(rng)
    if rng.random() < 0.2:
        pairs.append(rng.choice(list(THANKS.items())))
    turns = [turn("system", rng.choice(SYSTEMS))] if rng.random() < 0.35 else []
    for ask, answer in pairs:
        turns += [turn("user", ask), turn("assistant", answer)]
    return turns


def turn(role: str, content: str) -> Turn:
    return {"role": role, "content": content}


TOOL_SYSTEM = (
    "You are an assistant with tools: calculator(expression), weather(city, unit), days_between(start, end), "
    "find_book(title). Call a tool when you need one, then answer."
)
BOOKS = {
    "Walden": ("Henry David Thoreau", 1854, 2),
    "Emma": ("Jane Austen", 1815, 0),
    "Middlemarch": ("George Eliot", 1871, 1),
    "Les Misérables": ("Victor Hugo", 1862, 3),
    "Ivanhoe": ("Walter Scott", 1820, 0),
    "Dracula": ("Bram Stoker", 1897, 4),
    "Niels Lyhne": ("J. P. Jacobsen", 1880, 1),
}
SKIES = ["clear", "cloudy", "light rain", "snow", "windy"]


def call(name: str, result: Any, **arguments: Any) -> list[dict[str, Any]]:
    """Return a tool call and its result; a result that is not a string is encoded as JSON."""
    content = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    return [
        {"role": "assistant_toolcall", "name": name, "arguments": arguments},
        {"role": "toolresult", "name": name, "content": content},
    ]


def tool_sum(rng: random.Random) -> list[dict[str, Any]]:
    price, count = rng.randrange(3, 60), rng.randrange(2, 13)
    total = price * count
    messages = [
        turn("user", f"I buy {count} tickets at {price} euros each. What do I pay?"),
        *call("calculator", str(total), expression=f"{count} * {price}"),
        turn("assistant", f"You pay {total} euros."),
    ]
    if rng.random() < 0.3:
        messages += [
            turn("user", "And with 5 euros for the booking?"),
            *call("calculator", str(total + 5), expression=f"{total} + 5"),
            turn("assistant", f"With the booking you pay {total + 5} euros."),
        ]
    return messages


def tool_weather(rng: random.Random) -> list[dict[str, Any]]:
    first, second = rng.sample(sorted(CAPITALS.values()), 2)
    seen = {city: (rng.randrange(-5, 33), rng.choice(SKIES)) for city in (first, second)}

    def look(city: str) -> list[dict[str, Any]]:
        return call("weather", {"temperature": seen[city][0], "sky": seen[city][1]}, city=city, unit="C")

    if rng.random() < 0.5:
        degrees, sky = seen[first]
        answer = f"In {first} it is {degrees} °C, {sky}."
        return [turn("user", f"What is the weather in {first}?"), *look(first), turn("assistant", answer)]
    warmer = f"It is as warm in {first} as in {second}"
    if seen[first][0] != seen[second][0]:
        warmer = f"It is warmer in {max((first, second), key=lambda city: seen[city][0])}"
    return [
        turn("user", f"Is it warmer in {first} or in {second}?"),
        *look(first),
        *look(second),
        turn("assistant", f"{warmer}: {first} has {seen[first][0]} °C, {second} {seen[second][0]} °C."),
    ]


def tool_days(rng: random.Random) -> list[dict[str, Any]]:
    start = date(2024, 1, 1) + timedelta(days=rng.randrange(600))
    stop = start + timedelta(days=rng.randrange(2, 300))
    days = (stop - start).days
    return [
        turn("user", f"How many days are there from {start} to {stop}?"),
        *call("days_between", {"days": days}, start=str(start), end=str(stop)),
        turn("assistant", f"From {start} to {stop} there are {days} days."),
    ]


def tool_book(rng: random.Random) -> list[dict[str, Any]]:
    title, (author, year, copies) = rng.choice(list(BOOKS.items()))
    result = {"title": title, "author": author, "year": year, "copies": copies}
    shelf = {0: "all copies are out", 1: "one copy is here"}.get(copies, f"{copies} copies are here")
    answer = turn("assistant", f"{title} by {author} ({year}): {shelf}.")
    if rng.random() < 0.3:
        return [
            turn("user", f"Do you have {title.lower()}? I think that is how it is spelled."),
            *call("find_book", "error: no such title", title=title.lower()),
            *call("find_book", result, title=title),
            answer,
        ]
    messages = [turn("user", f"Do you have {title}?"), *call("find_book", result, title=title), answer]
    if rng.random() < 0.5:
        messages += [turn("user", "Who wrote it?"), turn("assistant", f"{author} wrote {title}.")]
    return messages


def tool_conversation(rng: random.Random) -> list[dict[str, Any]]:
    if rng.random() < 0.08:
        ask, answer = rng.choice(list((FACTS | SMALL_TALK).items()))
        return [turn("user", ask), turn("assistant", answer)]
    messages = rng.choice([tool_sum, tool_weather, tool_days, tool_book])(rng)
    if rng.random() < 0.15:
        ask, answer = rng.choice(list(THANKS.items()))
        messages += [turn("user", ask), turn("assistant", answer)]
    return messages


def distinct(make: Callable[[random.Random], list[dict[str, Any]]], *, seed: int) -> Iterator[list[dict[str, Any]]]:
    rng = random.Random(seed)
    seen = set()
    while True:
        messages = make(rng)
        key = json.dumps(messages)
        if key not in seen:
            seen.add(key)
            yield messages


def files() -> dict[str, str]:
    chats = islice(distinct(conversation, seed=1), 400)
    tools = islice(distinct(tool_conversation, seed=2), 150)
    primer = islice(distinct(conversation, seed=3), 120)
    return {
        **desk_files(),
        "conversations.jsonl": lines({"id": f"chat-{n:03}", "messages": messages} for n, messages in enumerate(chats)),
        "tool_conversations.jsonl": lines({"system": TOOL_SYSTEM, "messages": messages} for messages in tools),
        "primer.jsonl": lines({"messages": messages} for messages in primer),
    }


def desk_files() -> dict[str, str]:
    texts = {}
    kinds = (("desk_chat", demo_data.chat, 500, 80), ("desk_tools", demo_data.tools, 600, 50))
    for questions, kept in zip(demo_data.split_questions(4), ("", "_heldout"), strict=True):
        for seed, (name, make, count, held_out) in enumerate(kinds, 7 if kept else 5):
            made = demo_data.conversations(make, questions, seed=seed)
            texts[f"{name}{kept}.jsonl"] = lines(islice(made, held_out if kept else count))
    return texts


def lines(records: Iterator[dict[str, Any]]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the small conversations in data/.")
    parser.add_argument(
        "--check", action="store_true", help="compare the output with the files in data/ instead of writing them"
    )
    check = parser.parse_args().check
    stale = []
    for name, text in files().items():
        path = DATA / name
        if not check:
            path.write_bytes(text.encode())
        elif not path.is_file() or path.read_bytes() != text.encode():
            stale.append(name)
            print(f"data/{name}: differs from the output of scripts/make_data.py; run the script and commit the result")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
