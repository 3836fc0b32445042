# One GPU for each replay job, so that N GPUs run N jobs.
if GPUS and "gpu" not in workflow.global_resources:
    workflow.register_resource("gpu", len(GPUS))


rule replay:
    input:
        manifest=f"{WORK}/batches/rank{{rank}}/{{number}}.json",
        settings=f"{WORK}/settings/measuring.json",
    output:
        f"{WORK}/replay/rank{{rank}}/{{number}}.parquet",
    log:
        f"{WORK}/logs/replay/rank{{rank}}/{{number}}.log",
    conda:
        "../config/environment.yaml"
    threads: SETTINGS.replay.threads
    resources:
        gpu=1 if GPUS else 0,
    params:
        work_dir=get_work_dir,
        gpus=GPUS,
    script:
        "../scripts/replay.py"
