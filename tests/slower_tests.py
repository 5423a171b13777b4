"""The tests that are left out of `make test` and run by `make clusters` and `make examples`."""

from __future__ import annotations

import re

CLUSTER = re.compile(
    r"tests/(remote/.*|train/test_(fsdp.*|cluster_scripts|lost_ranks|trackers|remote_train)|load/test_(remote|resume)"
    r"|train/test_(rollout_models|step|loop_hf|mixed_eval|optimizers|resumed_runs|estimate)"
    r"|prepare/test_(ray.*|cluster_build|remote_input|byte_identity|memory|resumed_builds|oracle)"
    r"|store/test_(remote_publish|reweigh)|cli/test_(stores|remote_datasets)"
    r"|integrations/test_(compare_trl|import_trains)|rollout/test_(text_servers|template_scenarios)"
    r"|tokenizer/test_(split_pattern|compiled_cache|byte_bpe|engines_agree|every_tokenizer)"
    r"|format/template/test_(laid_out_columns|trl_templates)|records/test_record_mutations"
    r"|show/test_(browser.*|screenshots))\.py"
)
"""Slow test files, with the marker `cluster`: most start ranks, nodes, trackers, servers, browsers or TRL."""

EXAMPLES = ("test_docs.py::test_the_examples_of_a_page", "test_demo.py::", "test_notebooks.py::test_a_notebook_runs")
"""Tests with the marker `examples`: every command and code block in the docs, the notebooks, and the demo."""
