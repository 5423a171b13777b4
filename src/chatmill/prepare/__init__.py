"""Build datasets from conversations: render units of the input in parallel, then combine their rows in input order.

    Job, InputSource   what to build: files, tokenizer, format, fit, split
    load_recipe        a job from a YAML or TOML file
    prepare_dataset    build the dataset of a job and publish it in one rename
    Rejects            a file of the records that could not be read, with reasons
    LocalEngine        processes on this machine; RayEngine: a Ray cluster

In a build, `pipeline` splits the input into units, and an `engine` runs the units. Each `unit` reads, renders and fits
its part of the input, and writes the rows to `staging` files in the `build_dir`. `assemble` reads the staged files to
deduplicate, split and pack the rows, and writes the shards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING as _TYPE_CHECKING

from chatmill._exports import lazy_exports as _lazy_exports

if _TYPE_CHECKING:
    from chatmill.prepare.engine import Engine as Engine
    from chatmill.prepare.engine import LocalEngine as LocalEngine
    from chatmill.prepare.job import InputSource as InputSource
    from chatmill.prepare.job import Job as Job
    from chatmill.prepare.pipeline import prepare_dataset as prepare_dataset
    from chatmill.prepare.progress import BuildProgress as BuildProgress
    from chatmill.prepare.ray_engine import RayEngine as RayEngine
    from chatmill.prepare.recipe import load_recipe as load_recipe
    from chatmill.prepare.rejects import CountedRecords as CountedRecords
    from chatmill.prepare.rejects import Rejects as Rejects

__all__, __getattr__, __dir__ = _lazy_exports(__name__)
