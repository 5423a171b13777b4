"""The list of commands and the output of `chatmill --help`."""

from __future__ import annotations

ABOUT = "Conversations in, exact training batches out."
COMMANDS = {
    "check": ("check.check", "Read conversations and print a summary."),
    "render": ("render.render_command", "Show conversations as tokens, with the loss mask."),
    "formats": ("formats.formats", "List the chat formats, or print one as TOML."),
    "certify": ("certify.certify_command", "Check that a chat template is safe to train with."),
    "compare": ("compare.compare", "Show where the loss masks of chatmill and TRL differ."),
    "recipe": ("recipe.app", "Write a recipe, or preview one before building it."),
    "import": ("import_config.app", "Convert the config of another trainer."),
    "prepare": ("prepare.prepare_command", "Turn conversations into a dataset."),
    "verify": ("verify.verify", "Check the files, tokens and spans of a dataset."),
    "reweigh": ("reweigh.reweigh", "Copy a dataset with a different loss mask."),
    "removed": ("removed.removed", "List the records that were removed from a dataset."),
    "clean": ("clean.clean", "Remove files left by interrupted or replaced builds."),
    "diff": ("diff.diff", "Show which conversations of two datasets differ."),
    "order": ("order.order", "Print the order of episodes in an epoch."),
    "show": ("show.show", "Show an episode turn by turn, with the loss mask."),
    "explain": ("show.explain", "Explain why a token is trained or not."),
    "stats": ("stats.stats", "Print row, token, length and packing statistics."),
    "report": ("stats.report", "Write an HTML report about a dataset."),
    "view": ("view.view", "Browse, search and filter a dataset in the browser."),
    "doctor": ("doctor.doctor", "Check the nodes of a cluster before a training run."),
    "train": ("train.train", "Train a model on a dataset or on SFT caches."),
    "chat": ("chat.chat", "Chat with a trained model."),
    "eval": ("eval.eval_command", "Evaluate a model: loss and exact-match answers."),
    "merge": ("merge.merge", "Merge LoRA adapters into their base model."),
    "rows": ("rows.rows_command", "List the conversations in a training step."),
    "build-sft-primer": ("build.build_sft_primer", "Build the SFT cache for primer.jsonl."),
    "build-sft-oasst1": ("build.build_sft_oasst1", "Build the SFT cache for OpenAssistant trees."),
    "build-sft-dolly15k": ("build.build_sft_dolly15k", "Build the SFT cache for Dolly instructions."),
    "audit": ("audit.app", "Verify the audit log of a run, or replay a step."),
    "tokenizer": ("tokenizer.app", "Train a tokenizer, or inspect one."),
    "export": ("export.app", "Export conversations or datasets for other tools."),
    "rollout": ("rollout.app", "Train on the model's own answers."),
}
"""Location (`file.name` in this folder) of each command, and its summary in `chatmill --help`."""


def help_text() -> str:
    options = {"--version": "Print the version and exit.", "-h, --help": "Show this message and exit."}
    commands = {name: summary for name, (_, summary) in COMMANDS.items()}
    lines = ["Usage: chatmill [OPTIONS] COMMAND [ARGS]...", "", f"  {ABOUT}"]
    for title, table in (("Options", options), ("Commands", commands)):
        width = max(map(len, table))
        lines += ["", f"{title}:", *(f"  {name:<{width}}  {summary}" for name, summary in table.items())]
    return "\n".join(lines) + "\n"
