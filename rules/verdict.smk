# What people came for is said last, also when nothing was left to do.
onsuccess:
    show(SETTINGS.work.root / "verdict.txt")


onerror:
    show(SETTINGS.work.root / "logs" / "verdict.log")


# The last job; it alone sets the exit status, after the tables are there.
rule verdict:
    input:
        settings=f"{WORK}/settings/verdict.json",
        tables=get_verdict_input,
    output:
        f"{WORK}/verdict.txt",
    log:
        f"{WORK}/logs/verdict.log",
    localrule: True
    conda:
        "../config/environment.yaml"
    params:
        work_dir=get_work_dir,
        results_dir=str(SETTINGS.results_dir),
        ranks=list(SETTINGS.rank_list),
        fail_on=SETTINGS.fail_on,
    script:
        "../scripts/verdict.py"
