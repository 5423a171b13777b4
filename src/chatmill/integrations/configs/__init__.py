"""Configs of other trainers as recipes and train configs of ours: `chatmill import`.

    axolotl        import_axolotl(path)
    llamafactory   import_llamafactory(path, train)
    trl            import_trl(path)

Each gives an `ImportedConfig`, with what became of every key; `write_import` writes it into a folder.
"""
