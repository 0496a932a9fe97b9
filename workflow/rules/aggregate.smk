rule aggregate:
    """Turn raw rounds into medians, steps with intervals, and a list of what is missing."""
    input:
        measured,
        experiment=own("config/experiments/{experiment}.yaml"),
    output:
        expand(
            "results/{{results_set}}/data/{{experiment}}/{kind}.csv",
            kind=DATA,
        ),
    log:
        "logs/{results_set}/aggregate/{experiment}.log",
    wildcard_constraints:
        experiment=SHAPED,
    conda:
        "../../envs/environment.yaml"
    params:
        python=PYTHON,
        arch=arch_of,
        limits=limits(),
        variants=variants_in,
        code=module_hash("aggregate", "stats", "bootstrap"),
    shell:
        "{params.python:q} -m rungs aggregate --results results/{wildcards.results_set:q}"
        " --experiment {wildcards.experiment:q} --arch {params.arch:q} --variants {params.variants:q} &> {log:q}"


use rule aggregate as aggregate_points with:
    output:
        expand(
            "results/{{results_set}}/data/{{experiment}}/{kind}.csv",
            kind=POINT_DATA,
        ),
    wildcard_constraints:
        experiment=POINTED,


rule effects:
    """Average what each level buys over every combination of the other factors; a ladder shows one of them."""
    input:
        measured_factorial,
        experiment=own("config/experiments/{experiment}.yaml"),
    output:
        expand(
            "results/{{results_set}}/data/{{experiment}}/{kind}.csv",
            kind=FACTORIAL_DATA,
        ),
    log:
        "logs/{results_set}/effects/{experiment}.log",
    conda:
        "../../envs/environment.yaml"
    params:
        python=PYTHON,
        arch=arch_of,
        limits=limits(),
        code=module_hash("effects", "shapley", "aggregate", "stats", "bootstrap"),
    shell:
        "{params.python:q} -m rungs effects --results results/{wildcards.results_set:q}"
        " --experiment {wildcards.experiment:q} --arch {params.arch:q} &> {log:q}"


rule verdict:
    """The last rule: fail the run when any variant failed, after everything else is done."""
    input:
        evidence=evidence(WHOLE),
        coverage=coverages(),
        rendered=[*figures(), *factorial_figures(), *tables(), *factorial_tables(), *claims()],
    output:
        "results/{live}/data/verdict.json",
    log:
        "logs/{live}/verdict.log",
    conda:
        "../../envs/environment.yaml"
    params:
        python=PYTHON,
        code=module_hash("verdict"),
    shell:
        "{params.python:q} -m rungs verdict {input.evidence:q} {input.coverage:q} --output {output:q} &> {log:q}"
