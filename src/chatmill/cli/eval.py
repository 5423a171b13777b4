"""`chatmill eval`: evaluate a model on a dataset, per source."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chatmill.cli.chat import BaseChoice, BaseModel, Device, ModelPlace
from chatmill.cli.guard import print_error
from chatmill.cli.options import AsJson, DatasetOrCaches, TokenDtype, counting, echo_json, print_table, share
from chatmill.cli.show import ItsTokenizer
from chatmill.errors import one_line
from chatmill.show.dataset import open_view
from chatmill.train.checkpoint_files import model_folder
from chatmill.train.model_files import check_headers

if TYPE_CHECKING:
    from chatmill.train.score import EvalReport, EvalScore

REASONS = {
    "partly_trained": "in which only some tokens are trained",
    "unfinished": "without an end-of-turn token",
    "nothing_before": "without a prompt",
    "too_long": "that, with their prompt, exceed the model's maximum sequence length",
    "over_the_limit": "over --limit",
}


def eval_command(
    model: ModelPlace,
    dataset: DatasetOrCaches,
    split: Annotated[str, typer.Option(help="Split: train or val.")] = "val",
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum length of an answer in tokens.")] = 256,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", "-n", min=0, help="Maximum number of answers to generate, spread evenly over the split."
        ),
    ] = None,
    wrong: Annotated[int, typer.Option(min=0, help="Show up to this many answers that do not match exactly.")] = 0,
    tokenizer: ItsTokenizer = None,
    device: Device = "auto",
    base: BaseChoice = "trained",
    base_model: BaseModel = None,
    token_dtype: TokenDtype = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model on a dataset: loss, exact-match answers, and answers that reach the end-of-turn token.

    Prints a table with one row per source. For every trained answer in the split, the model receives the token ids
    before the answer and decodes greedily. `exact` counts outputs that equal the answer token for token; `stopped`
    counts outputs that reach the end-of-turn token.

    \b
    Examples:
      chatmill eval checkpoints/my_sft_model data/chat_sft
      chatmill eval checkpoints/my_sft_model data/chat_sft --wrong 5
      chatmill eval checkpoints/my_sft_model data/chat_sft --split train --limit 200 --json
    """
    # Check the model files before importing torch, which takes seconds.
    check_headers(model_folder(model))
    from chatmill.train.load_model import open_ready
    from chatmill.train.score import check_tokenizer, end_ids, open_all, score_model

    sources = open_all(dataset, token_dtype)
    check_tokenizer(model, sources[0])
    if not end_ids(sources):
        print_error(f"{dataset} does not record an end-of-turn token, so only the loss is computed")
    with counting("conversations and answers") as advance:
        report = score_model(
            open_ready(model, device, base=base, base_model=base_model),
            dataset,
            split=split,
            max_tokens=max_tokens,
            limit=limit,
            token_dtype=token_dtype,
            progress=advance,
        )
    if as_json:
        about = {"model": model, "dataset": str(dataset), "split": split, **_score_json(report.all)}
        scores = {name: _score_json(each) for name, each in report.sources.items()}
        left_out = {"left_out": dict(report.left_out), "cut_conversations": report.cut}
        left_out["empty_sources"] = report.empty_sources
        echo_json({**about, "sources": scores, **left_out})
        return
    _tell(report, split)
    missed = [answer for answer in report.answers if not answer.exact]
    if wrong and missed:
        text = open_view(sources[0].path, tokenizer, token_dtype=token_dtype).text
        for answer in missed[:wrong]:
            expected, answered = (text.text(ids, limit=300) for ids in (answer.prompt.answer, answer.ids))
            typer.echo(f"{one_line(answer.place, 200)}\n  expected {expected}\n  got      {answered}")


def _score_json(score: EvalScore) -> dict[str, Any]:
    loss = score.loss if math.isfinite(score.loss) else None
    return {
        "conversations": score.conversations,
        "loss": loss,
        "perplexity": math.exp(min(score.loss, 700)) if loss is not None else None,
        "questions": score.questions,
        "exact": score.exact,
        "stopped": score.stopped,
        "exact_rate": score.exact / score.questions if score.questions else None,
        "stop_rate": score.stopped / score.questions if score.questions else None,
    }


def _tell(report: EvalReport, split: str) -> None:
    scores = dict(report.sources)
    if len(scores) > 1:
        scores["all"] = report.all
    rows = [
        (
            one_line(name),
            each.conversations,
            f"{each.loss:.4f}" if each.weight else "-",
            each.questions,
            share(each.exact, each.questions, of_nothing="-"),
            share(each.stopped, each.questions, of_nothing="-"),
        )
        for name, each in scores.items()
    ]
    print_table(("source",), ("conversations", "loss", "questions", "exact", "stopped"), rows)
    if report.empty_sources:
        typer.echo(f"sources without episodes in {split}: {', '.join(map(one_line, report.empty_sources))}")
    for reason, count in report.left_out.items():
        typer.echo(f"skipped: {count:,} answers {REASONS[reason]}")
    if report.cut:
        typer.echo(
            f"{report.cut:,} conversations exceed the model's maximum sequence length; only their last tokens were used"
        )
