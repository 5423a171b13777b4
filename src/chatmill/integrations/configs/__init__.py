"""Convert configs of other trainers to recipes and train configs, for `chatmill import`.

    axolotl        an Axolotl config
    llamafactory   LLaMA-Factory's dataset_info.json, and the config of a run
    trl            a config of `trl sft`, or a recipe of the alignment handbook

Each import function returns an `ImportedConfig`; `write_import` writes it to a folder.
"""

from chatmill.integrations.configs.axolotl import import_axolotl
from chatmill.integrations.configs.llamafactory import import_llamafactory
from chatmill.integrations.configs.trl import import_trl
from chatmill.integrations.configs.write_config import ImportedConfig, write_import

__all__ = ["ImportedConfig", "import_axolotl", "import_llamafactory", "import_trl", "write_import"]
