"""TrainerYaml: YAML as PyYAML reads it for other trainers, but for `2e-4`, which is a number here.

Axolotl, LLaMA-Factory and TRL read their configs with PyYAML, where `no`, `yes`, `on`, `off` and `True` are switches,
and convert texts such as `2e-4` to numbers afterwards. Imported only where a file is YAML: PyYAML is an extra.
"""

from __future__ import annotations

import re

from chatmill.prepare.yaml_loader import RecipeLoader


class TrainerYaml(RecipeLoader):
    """Loads plain values only: no tag, no merge key, and no key twice."""


for _tag, _words in (("bool", "yes no true false on off"), ("null", "null")):
    _spellings = [form for word in _words.split() for form in (word, word.capitalize(), word.upper())]
    TrainerYaml.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{'|'.join(_spellings)})$"), list("yYnNtTfFoO")
    )
