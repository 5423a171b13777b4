"""Rows on disk: shards of episodes that exist whole or not at all.

write     SplitWriter: rows to shards
metadata  what a dataset is, with size and hash of every file; written last
publish   from the place it was built to its name, in one rename
read      open_dataset: rows of a dataset, memory-mapped
verify    everything that can be wrong with a dataset, one line each
"""
