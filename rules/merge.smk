rule merge:
    input:
        end=f"{WORK}/ends/rank{{rank}}.json",
        settings=f"{WORK}/settings/tables.json",
        two_way=get_merge_input("two_way"),
        three_way=get_merge_input("three_way"),
        retired=get_merge_input("retired"),
    output:
        RankTables(Path(RESULTS), "{timestamp}", "{rank}").all,
    log:
        f"{WORK}/logs/merge/{{timestamp}}_rank{{rank}}.log",
    priority: 30
    conda:
        "../config/environment.yaml"
    params:
        work_dir=get_work_dir,
        precision=SETTINGS.precision,
    script:
        "../scripts/merge.py"
