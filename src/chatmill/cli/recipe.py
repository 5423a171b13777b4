"""`chatmill recipe`: recipes before they are built."""

from __future__ import annotations

from chatmill.cli.options import command_group
from chatmill.cli.recipe_check import check_command
from chatmill.cli.snippet import snippet_command

app = command_group("Write recipes, and look at them before they are built.")
app.command("snippet")(snippet_command)
app.command("check")(check_command)
