# The watcher begins when Snakemake, in its main process and about to run jobs, first
# looks into this queue; commands that only look get what is written down already.
FEED = Feed(SETTINGS, workflow)
