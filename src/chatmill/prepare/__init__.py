"""From conversations to a dataset: units in any order and any number of processes, then one pass in order.

job       what is asked for
unit      one piece of the input to rows, in a file of its own
staging   those files
engine    who runs the units: this process, several, or a Ray cluster
assemble  dedupe, split, blocks, packing, shards
pipeline  the way from a job to a published dataset
"""
