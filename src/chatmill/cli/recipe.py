"""`chatmill recipe`: write a recipe, or preview one before building it."""

from __future__ import annotations

from chatmill.cli.options import command_group
from chatmill.cli.recipe_check import check_command
from chatmill.cli.snippet import snippet_command

app = command_group("Write a recipe, or preview one before building it.")
app.command("snippet")(snippet_command)
app.command("check")(check_command)
