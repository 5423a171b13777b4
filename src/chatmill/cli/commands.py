"""The commands of `chatmill` and its help, without importing any of them."""

from __future__ import annotations

ABOUT = "Conversations in, exact training batches out."
COMMANDS = {
    "check": ("check.check", "Read conversations and print what they contain."),
    "render": ("render.render_command", "Show conversations as token rows, and what is trained."),
    "formats": ("formats.formats", "List the chat formats, or print one as TOML."),
    "certify": ("certify.certify_command", "Check a chat template against what training relies on."),
    "compare": ("compare.compare", "Show which tokens chatmill and TRL train differently."),
    "recipe": ("recipe.app", "Write recipes, and look at them before they are built."),
    "import": ("import_config.app", "Convert the config of another trainer."),
    "prepare": ("prepare.prepare_command", "Turn conversations into a dataset."),
    "verify": ("verify.verify", "Check the files, tokens and spans of a dataset."),
    "reweigh": ("reweigh.reweigh", "Write a dataset with the same tokens and another mask."),
    "removed": ("removed.removed", "List the records that were removed from a dataset."),
    "clean": ("clean.clean", "Remove what interrupted and replaced builds left."),
    "diff": ("diff.diff", "Show which conversations of two datasets differ."),
    "order": ("order.order", "Recompute the order of an epoch."),
    "show": ("show.show", "Show an episode turn by turn, and what is trained."),
    "explain": ("show.explain", "Say what a token is, and why it is trained or not."),
    "stats": ("stats.stats", "Count rows, tokens, lengths, packing and losses."),
    "report": ("stats.report", "Write one self-contained page about a dataset."),
    "view": ("view.view", "Browse a dataset: search and filter its episodes."),
    "doctor": ("doctor.doctor", "Check the nodes of a run before it starts."),
    "train": ("train.train", "Train a model on a dataset or on caches."),
    "chat": ("chat.chat", "Talk to a model."),
    "eval": ("eval.eval_command", "Measure a model: its loss and its answers."),
    "merge": ("merge.merge", "Merge the LoRA adapters of a run into their base model."),
    "rows": ("rows.rows_command", "Name the conversations of a training step."),
    "build-sft-primer": ("build.build_sft_primer", "Build the cache of primer.jsonl."),
    "build-sft-oasst1": ("build.build_sft_oasst1", "Build the cache of OpenAssistant trees."),
    "build-sft-dolly15k": ("build.build_sft_dolly15k", "Build the cache of Dolly's instructions."),
    "audit": ("audit.app", "Check the audit log of a run, or see a step of it again."),
    "tokenizer": ("tokenizer.app", "Train a tokenizer on your conversations, or look at one."),
    "export": ("export.app", "Write conversations or datasets for other tools."),
    "rollout": ("rollout.app", "Train on the model's own answers."),
}
"""The file of each command in this folder and its name there, and what `chatmill --help` says of it."""


def help_text() -> str:
    """What `chatmill --help` prints: every command with one line."""
    options = {"--version": "Print the version and stop.", "-h, --help": "Show this message and exit."}
    commands = {name: summary for name, (_, summary) in COMMANDS.items()}
    lines = ["Usage: chatmill [OPTIONS] COMMAND [ARGS]...", "", f"  {ABOUT}"]
    for title, table in (("Options", options), ("Commands", commands)):
        width = max(map(len, table))
        lines += ["", f"{title}:", *(f"  {name:<{width}}  {summary}" for name, summary in table.items())]
    return "\n".join(lines) + "\n"
