"""Check the API calls of a training run: snakemake --cores N --config rank_list=[0]"""

import sys
from pathlib import Path

from snakemake.utils import min_version

min_version("9.27")

from spool.errors import SpoolError
from spool.files import restrict_umask
from spool.gpus import gpus_to_use
from spool.intake.feed import Feed
from spool.settings import load_schema, load_settings

BASE = Path(workflow.basedir)

# For the directories that Snakemake makes for outputs and logs, here and in jobs.
restrict_umask()


configfile: BASE / "config" / "config.yaml"


# Validates against config/schema.yaml; one line and no job if a value is not allowed.
try:
    SETTINGS = load_settings(config, load_schema(BASE / "config" / "schema.yaml"))
    GPUS = gpus_to_use(SETTINGS.replay.bench_device, SETTINGS.gpus)
except SpoolError as error:
    sys.exit(f"spool: {error}")


include: "rules/common.smk"
include: "rules/intake.smk"
include: "rules/replay.smk"
include: "rules/check.smk"
include: "rules/compare.smk"
include: "rules/retire.smk"
include: "rules/merge.smk"
include: "rules/verdict.smk"


# Targets arrive while training runs; the last one is verdict's.
rule all:
    default_target: True
    input:
        from_queue(FEED, finish_sentinel=Feed.END),
