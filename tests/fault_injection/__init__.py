"""Fault injection: trials that try to break chatmill, a runner that counts, and planted faults that test the trials.

python tests/fault_injection/run.py            all of it, a quarter of an hour on two cores
python tests/fault_injection/run.py --short    the same trials, small
python tests/fault_injection/run.py --planted  every planted fault must be noticed
"""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PARTS = ("store", "prepare", "records", "tokenizer", "load", "train", "format/template")
# The trials import helper modules from the folders of other tests.
sys.path += [str(path) for path in (TESTS, *(TESTS / part for part in PARTS)) if str(path) not in sys.path]
