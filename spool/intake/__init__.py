"""From a growing spool to a queue of Snakemake targets.

`watch` hears of new shards, `ledger` groups them into batches and segments,
`follow` drives both in a thread, `feed` is the queue that Snakemake reads,
`lock` keeps two of them out of one work directory.
"""
