"""Sample answers: a few questions of val, the same ones at every evaluation, and how their answers are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, pairwise

from chatmill.load.source import DataSource
from chatmill.train.eval_prompts import EvalPrompt, questions
from chatmill.train.model import CausalModel
from chatmill.train.score import ScoredAnswer, answers, end_ids

LONGEST = 256
"""Tokens of the longest answer that is asked for."""
MORE = 32
"""Tokens that an answer may have more than the longest of those asked for, before it is cut."""
SHOWN = 100
"""Characters that are shown of a question's end, and of an answer."""

Read = Callable[[Sequence[int]], str]
"""Tokens as text that is safe to print."""


class Samples:
    """So many questions of each source, spread evenly over a split."""

    def __init__(self, sources: Sequence[DataSource], count: int, model: CausalModel, *, split: str = "val") -> None:
        self.ends = end_ids(sources)
        self._asked = [
            question for source in sources for question in _spread(source, split, count, self.ends, model.max_positions)
        ]

    def ask(self, model: CausalModel) -> list[ScoredAnswer]:
        """What the model says to each of them, greedily."""
        most = MORE + max((len(question.answer) for question in self._asked), default=0)
        said = answers(model, self._asked, self.ends, most)
        return [ScoredAnswer(question, ids, "") for question, ids in zip(self._asked, said, strict=True)]

    def rates(self, found: Sequence[ScoredAnswer]) -> Mapping[str, float]:
        """What part of the answers is exact, and what part came to its end by itself; nothing if none was asked for."""
        if not found:
            return {}
        exact, stopped = (sum(each) / len(found) for each in zip(*map(self._of, found), strict=True))
        return {"val_exact_rate": exact, "val_stop_rate": stopped}

    def told(self, found: Sequence[ScoredAnswer], read: Read) -> list[str]:
        """A few lines for each answer: how its question ends, what was said, and what was meant if that is other."""
        lines = []
        for answer in found:
            exact, stopped = self._of(answer)
            # The end of a long prompt: a character has four tokens at most.
            asked = read(answer.question.prompt[-4 * SHOWN :])
            lines.append(f"  asked  {asked if len(asked) <= SHOWN else '…' + asked[-SHOWN:]}")
            ended = "" if stopped else f"  (no end after {len(answer.said):,} tokens)"
            lines.append(f"  said   {_beginning(read(answer.said))}{ended}")
            if not exact:
                lines.append(f"  meant  {_beginning(read(answer.question.answer))}")
        return lines

    def _of(self, answer: ScoredAnswer) -> tuple[bool, bool]:
        return answer.exact, answer.said[-1] in self.ends


def _spread(source: DataSource, split: str, count: int, ends: Sequence[int], positions: int) -> Iterator[EvalPrompt]:
    """The first question that is short enough of each of so many equal parts of a split."""
    episodes = source.episodes(split)
    for start, stop in pairwise(len(episodes) * part // count for part in range(count + 1)):
        found = (question for number in range(start, stop) for question in questions(episodes.rows([number]), ends))
        short = (q for q in found if len(q.answer) <= LONGEST and len(q.prompt) + len(q.answer) <= positions)
        yield from islice(short, 1)


def _beginning(text: str) -> str:
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"
