"""Fault-injection trials, their runner, and planted faults that test the trials; see run.py."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PARTS = ("store", "prepare", "records", "tokenizer", "load", "train", "format/template")
sys.path += [str(path) for path in (TESTS, *(TESTS / part for part in PARTS)) if str(path) not in sys.path]
