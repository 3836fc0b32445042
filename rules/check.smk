rule check:
    input:
        segment=f"{WORK}/segments/rank{{rank}}/{{number}}.json",
        settings=f"{WORK}/settings/judging.json",
        measured=get_segment_input,
    output:
        f"{WORK}/two_way/rank{{rank}}/{{number}}.parquet",
    log:
        f"{WORK}/logs/check/rank{{rank}}/{{number}}.log",
    priority: 10
    conda:
        "../config/environment.yaml"
    script:
        "../scripts/check.py"
