rule compare:
    input:
        segment=f"{WORK}/segments/rank{{rank}}/{{number}}.json",
        settings=f"{WORK}/settings/judging.json",
        measured=get_segment_input,
    output:
        f"{WORK}/three_way/rank{{rank}}/{{number}}.parquet",
    log:
        f"{WORK}/logs/compare/rank{{rank}}/{{number}}.log",
    priority: 10
    conda:
        "../config/environment.yaml"
    script:
        "../scripts/compare.py"
