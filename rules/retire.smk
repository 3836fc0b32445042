# Before other work: the space that it frees may be what the trainer waits for.
rule retire:
    input:
        segment=f"{WORK}/segments/rank{{rank}}/{{number}}.json",
        settings=f"{WORK}/settings/retiring.json",
        two_way=f"{WORK}/two_way/rank{{rank}}/{{number}}.parquet",
        three_way=f"{WORK}/three_way/rank{{rank}}/{{number}}.parquet",
    output:
        f"{WORK}/retired/rank{{rank}}/{{number}}.json",
    log:
        f"{WORK}/logs/retire/rank{{rank}}/{{number}}.log",
    priority: 20
    conda:
        "../config/environment.yaml"
    params:
        ranks=len(SETTINGS.rank_list),
    script:
        "../scripts/retire.py"
