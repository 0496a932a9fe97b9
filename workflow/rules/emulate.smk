rule emulate:
    """Run one variant's PTX without a GPU: hold it against numpy, look for races, and count it at every shape."""
    input:
        manifest=manifest_of("{variant}"),
        ptx=manifest_of("{variant}").removesuffix(".json") + ".ptx",
    output:
        csv=update(ensure("results/{emulated}/csv/emulate/{experiment}/{variant}.csv", non_empty=True)),
        manifest=update("results/{emulated}/csv/emulate/{experiment}/{variant}.json"),
    log:
        "logs/{emulated}/emulate/{experiment}/{variant}.log",
    conda:
        "../../envs/environment.yaml"
    params:
        python=PYTHON,
        arch=run.arch,
        limits=limits(),
        shapes=lambda wildcards: run.shapes_as_json(wildcards.experiment, variant_of(wildcards)),
        code=lambda wildcards: module_hash("plan", "wgmma", *EMULATOR, *workload_of(wildcards.experiment)),
    shell:
        "OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 {params.python:q} -m rungs emulate-rung"
        " --experiment {wildcards.experiment:q} --variant {wildcards.variant:q} --arch {params.arch:q}"
        " --manifest {input.manifest:q} --shapes {params.shapes:q} --output {output.csv:q} &> {log:q}"


rule count:
    """Sum the counts of a ladder's rungs by kind of instruction, per launch and per tile."""
    input:
        lambda wildcards: emulated_files(wildcards.experiment),
    output:
        expand("results/{{emulated}}/data/{{experiment}}/{kind}.csv", kind=COUNTED["ladders"]),
    log:
        "logs/{emulated}/count/{experiment}.log",
    conda:
        "../../envs/environment.yaml"
    params:
        python=PYTHON,
        variants=lambda wildcards: [v.name for v in run.variants(wildcards.experiment)],
        code=module_hash("counts", "emulator/device"),
    shell:
        "{params.python:q} -m rungs counts --results results/{wildcards.emulated:q}"
        " --experiment {wildcards.experiment:q} --variants {params.variants:q} &> {log:q}"


rule count_factorial:
    """The same for every combination of the factors."""
    input:
        lambda wildcards: emulated_files(wildcards.experiment, factorial=True),
    output:
        expand("results/{{emulated}}/data/{{experiment}}/{kind}.csv", kind=COUNTED["factorial"]),
    log:
        "logs/{emulated}/count_factorial/{experiment}.log",
    conda:
        "../../envs/environment.yaml"
    params:
        python=PYTHON,
        variants=lambda wildcards: [v.name for v in run.variants(wildcards.experiment, factorial=True)],
        code=module_hash("counts", "emulator/device"),
    shell:
        "{params.python:q} -m rungs counts --results results/{wildcards.emulated:q} --part factorial"
        " --experiment {wildcards.experiment:q} --variants {params.variants:q} &> {log:q}"


rule plot_counts:
    """Draw what each rung of a ladder costs per tile, over K x M=N."""
    input:
        "results/{emulated}/data/{experiment}/counts.csv",
    output:
        report(
            "results/{emulated}/figures/{experiment}/counts_{ladder}.svg",
            caption="../report/counts.rst",
            category="{experiment}",
            subcategory="counts",
            labels={"set": "{emulated}", "ladder": "{ladder}"},
        ),
        "results/{emulated}/figures/{experiment}/counts_{ladder}.png",
    log:
        "logs/{emulated}/plot_counts/{experiment}/{ladder}.log",
    conda:
        "../../envs/environment.yaml"
    params:
        python=PYTHON,
        code=module_hash("plots", "countplots", "countpages", "counts"),
    shell:
        "{params.python:q} -m rungs plot counts --results results/{wildcards.emulated:q}"
        " --experiment {wildcards.experiment:q} --of {wildcards.ladder:q} &> {log:q}"


rule make_count_tables:
    """Write the tables of counts of an experiment's ladders, each with its conclusion."""
    input:
        lambda wildcards: count_data(wildcards.emulated, wildcards.experiment, "ladders"),
    output:
        report(
            "results/{emulated}/md/{experiment}.md",
            caption="../report/counttables.rst",
            category="{experiment}",
            subcategory="tables",
            labels={"set": "{emulated}", "page": "counts of the ladders"},
        ),
    log:
        "logs/{emulated}/make_count_tables/{experiment}.log",
    conda:
        "../../envs/environment.yaml"
    params:
        python=PYTHON,
        ladders=lambda wildcards: run.ladders(wildcards.experiment),
        code=module_hash("countpages", "counts", "tables"),
    shell:
        "{params.python:q} -m rungs count-tables --results results/{wildcards.emulated:q}"
        " --experiment {wildcards.experiment:q} --ladders {params.ladders:q} &> {log:q}"


rule make_factorial_counts:
    """Write the counts of every combination of the factors."""
    input:
        lambda wildcards: count_data(wildcards.emulated, wildcards.experiment, "factorial"),
    output:
        report(
            "results/{emulated}/md/{experiment}_factorial.md",
            caption="../report/counttables.rst",
            category="{experiment}",
            subcategory="tables",
            labels={"set": "{emulated}", "page": "counts of the factorial"},
        ),
    log:
        "logs/{emulated}/make_factorial_counts/{experiment}.log",
    conda:
        "../../envs/environment.yaml"
    params:
        python=PYTHON,
        code=module_hash("countpages", "counts", "tables"),
    shell:
        "{params.python:q} -m rungs count-tables --results results/{wildcards.emulated:q} --part factorial"
        " --experiment {wildcards.experiment:q} &> {log:q}"


rule make_count_index:
    """Write the page that leads to the emulator's tables and figures, and to the recorded times."""
    input:
        lambda wildcards: count_data_of_set(),
    output:
        report(
            "results/{emulated}/README.md",
            caption="../report/index.rst",
            category="overview",
            subcategory="pages",
            labels={"set": "{emulated}", "page": "index"},
        ),
    log:
        "logs/{emulated}/make_count_index.log",
    conda:
        "../../envs/environment.yaml"
    params:
        python=PYTHON,
        ladders=json.dumps({e: run.ladders(e) for e in run.experiments}),
        factorials=run.factorials if WHOLE else [],
        recorded=run.recorded,
        code=module_hash("countpages", "counts", "tables"),
    shell:
        "{params.python:q} -m rungs count-tables --results results/{wildcards.emulated:q} --index {params.ladders:q}"
        " --factorials {params.factorials:q} --recorded {params.recorded:q} &> {log:q}"


rule make_counter_tables:
    """Write what Nsight Compute counted on a recorded GPU beside what the emulator counts of the same binaries."""
    input:
        "results/{results_set}/data/{experiment}/emulated.csv",
        profiled,
    output:
        report(
            "results/{results_set}/md/{experiment}_counters.md",
            caption="../report/counters.rst",
            category="{experiment}",
            subcategory="tables",
            labels={"set": "{results_set}", "page": "counters"},
        ),
    log:
        "logs/{results_set}/make_counter_tables/{experiment}.log",
    conda:
        "../../envs/environment.yaml"
    params:
        python=PYTHON,
        code=module_hash("equality", "tables"),
    shell:
        "{params.python:q} -m rungs counter-tables --results results/{wildcards.results_set:q}"
        " --experiment {wildcards.experiment:q} &> {log:q}"
