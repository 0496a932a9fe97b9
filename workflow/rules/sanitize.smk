rule sanitize:
    """Run one rung under memcheck, racecheck, initcheck and synccheck: a hazard may give the right result for years."""
    input:
        binary=BINARY,
    output:
        csv=update(ensure("results/{live}/csv/sanitize/{experiment}/{variant}.csv", non_empty=True)),
        manifest=update("results/{live}/csv/sanitize/{experiment}/{variant}.json"),
    log:
        "logs/{live}/sanitize/{experiment}/{variant}.log",
    conda:
        "../../envs/environment.yaml"
    threads: all_cores
    resources:
        gpu=1,
    params:
        python=PYTHON,
        arch=run.arch,
        limits=limits(),
        gpu=run.gpu_uuid,
        tool=run.sanitizer,
        there=lambda wildcards: run.sanitizer_there,
        time_limit=run.time_limit_s,
        code=module_hash("sanitize", "launcher"),
    shell:
        "{params.python:q} -m rungs sanitize --experiment {wildcards.experiment:q} --variant {wildcards.variant:q}"
        " --arch {params.arch:q} --gpu {params.gpu:q} --manifest {input.binary[0]:q} --tool {params.tool:q}"
        " --time-limit {params.time_limit:q} --output {output.csv:q} &> {log:q}"


rule make_sanitizer_tables:
    """Write what Compute Sanitizer found in each rung, and what it can not see."""
    input:
        sanitized_of,
        codes_behind,
    output:
        report(
            "results/{results_set}/md/{experiment}_sanitizer.md",
            caption="../report/sanitizer.rst",
            category="{experiment}",
            subcategory="tables",
            labels={"set": "{results_set}", "page": "Compute Sanitizer"},
        ),
    log:
        "logs/{results_set}/make_sanitizer_tables/{experiment}.log",
    conda:
        "../../envs/environment.yaml"
    params:
        python=PYTHON,
        stale=stale_in,
        code=module_hash("sanitizepages", "tables"),
    shell:
        "{params.python:q} -m rungs sanitizer-tables --results results/{wildcards.results_set:q}"
        " --experiment {wildcards.experiment:q} &> {log:q}"


rule make_mutation_table:
    """Write which mutated kernels the emulator reports and which Compute Sanitizer does."""
    input:
        "results/{results_set}/data/mutations/mutations.csv",
        "results/{results_set}/data/mutations/mutations.json",
        codes_behind,
    output:
        report(
            "results/{results_set}/md/mutations.md",
            caption="../report/mutations.rst",
            category="overview",
            subcategory="pages",
            labels={"set": "{results_set}", "page": "mutated kernels"},
        ),
    log:
        "logs/{results_set}/make_mutation_table.log",
    conda:
        "../../envs/environment.yaml"
    params:
        python=PYTHON,
        code=module_hash("sanitizepages", "mutants", "emulator/mutations", "tables"),
    shell:
        "{params.python:q} -m rungs sanitizer-tables --results results/{wildcards.results_set:q} --mutations &> {log:q}"


rule verdict_sanitize:
    """Fail the run when a tool found something or could not look, after every rung was looked at."""
    input:
        csvs=lambda wildcards: [path for e in run.experiments for path in sanitized(e)],
        pages=lambda wildcards: [f"{LIVE}/md/{e}_sanitizer.md" for e in run.experiments],
    output:
        "results/{live}/data/verdict_sanitize.json",
    log:
        "logs/{live}/verdict_sanitize.log",
    conda:
        "../../envs/environment.yaml"
    params:
        python=PYTHON,
        code=module_hash("verdict"),
    shell:
        "{params.python:q} -m rungs verdict {input.csvs:q} --output {output:q} &> {log:q}"
