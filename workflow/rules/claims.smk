rule judge_claims:
    """Hold the seeds' sentences against a set's data: each has a verdict, with figure and interval."""
    input:
        claims_data,
        claims=own("config/claims.yaml"),
    output:
        "results/{results_set}/data/verdicts/claims.csv",
    log:
        "logs/{results_set}/judge_claims.log",
    wildcard_constraints:
        results_set=either([run.results, *RECORDED]),
    conda:
        "../../envs/environment.yaml"
    params:
        python=PYTHON,
        arch=arch_of,
        experiments=claims_experiments,
        code=module_hash("claims", "stats", "bootstrap"),
    shell:
        "{params.python:q} -m rungs claims --results results/{wildcards.results_set:q} --arch {params.arch:q}"
        " --judge {params.experiments:q} &> {log:q}"


rule show_claims:
    """Write the page of the claims and draw them: it is what a set comes to."""
    input:
        "results/{results_set}/data/verdicts/claims.csv",
        codes_behind,
    output:
        report(
            "results/{results_set}/figures/claims.svg",
            caption="../report/claims.rst",
            category="claims",
            labels={"set": "{results_set}"},
        ),
        "results/{results_set}/figures/claims.png",
        report(
            "results/{results_set}/md/claims.md",
            caption="../report/claims.rst",
            category="claims",
            labels={"set": "{results_set}"},
        ),
    log:
        "logs/{results_set}/show_claims.log",
    wildcard_constraints:
        results_set=either([run.results, *RECORDED]),
    conda:
        "../../envs/environment.yaml"
    params:
        python=PYTHON,
        stale=stale_in,
        code=module_hash("claimpages", "claimplots", "plots", "tables"),
    shell:
        "{params.python:q} -m rungs claims --results results/{wildcards.results_set:q} --show &> {log:q}"
