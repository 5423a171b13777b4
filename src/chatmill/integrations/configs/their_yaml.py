"""Load YAML files as other trainers do: `no`, `yes`, `on`, `off` and `True` are booleans, and `2e-4` is a number.

This module is imported only for YAML files, because PyYAML is optional.
"""

from __future__ import annotations

import re

from chatmill.prepare.yaml_loader import RecipeLoader


class TrainerYaml(RecipeLoader):
    """A YAML loader that parses booleans like other trainers, and rejects tags, merge keys and duplicate keys."""


for _tag, _words in (("bool", "yes no true false on off"), ("null", "null")):
    _spellings = [form for word in _words.split() for form in (word, word.capitalize(), word.upper())]
    TrainerYaml.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{'|'.join(_spellings)})$"), list("yYnNtTfFoO")
    )
