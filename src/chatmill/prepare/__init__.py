"""From conversations to a dataset: units in any order and any number of processes, then one pass in order.

job        what is asked for
recipe     a job as a file
unit       one piece of the input to rows, in files of their own
staging    those files
workplace  the folders of a build, and its lock
engine     who runs the units: this process, several, or a Ray cluster
assemble   dedupe, split, blocks, packing, shards
pipeline   the way from a job to a published dataset
"""
