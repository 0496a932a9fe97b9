rule plot_heatmap:
    """Draw each step's gain over K x M=N: one shape alone misleads."""
    input:
        data_of,
        codes_behind,
    output:
        report(
            "results/{results_set}/figures/{experiment}/heatmap_{ladder}.svg",
            caption="../report/heatmap.rst",
            category="{experiment}",
            subcategory="gain of each step",
            labels={"set": "{results_set}", "ladder": "{ladder}"},
        ),
        "results/{results_set}/figures/{experiment}/heatmap_{ladder}.png",
    log:
        "logs/{results_set}/plot_heatmap/{experiment}/{ladder}.log",
    conda:
        "../../envs/environment.yaml"
    params:
        python=PYTHON,
        stale=stale_in,
        code=module_hash("plots"),
    shell:
        "{params.python:q} -m rungs plot heatmap --results results/{wildcards.results_set:q}"
        " --experiment {wildcards.experiment:q} --of {wildcards.ladder:q} &> {log:q}"


rule plot_ladder:
    """Draw each rung's share of the control along its ladder, the path step by step beside what others published, and the roofline."""
    input:
        data_of,
        codes_behind,
        published_figures,
        ceilings_of,
    output:
        report(
            "results/{results_set}/figures/{experiment}/ladder_{ladder}.svg",
            caption="../report/ladder.rst",
            category="{experiment}",
            subcategory="share of the control",
            labels={"set": "{results_set}", "ladder": "{ladder}"},
        ),
        "results/{results_set}/figures/{experiment}/ladder_{ladder}.png",
        report(
            "results/{results_set}/figures/{experiment}/waterfall_{ladder}.svg",
            caption="../report/waterfall.rst",
            category="{experiment}",
            subcategory="waterfall",
            labels={"set": "{results_set}", "ladder": "{ladder}"},
        ),
        "results/{results_set}/figures/{experiment}/waterfall_{ladder}.png",
        report(
            "results/{results_set}/figures/{experiment}/roofline_{ladder}.svg",
            caption="../report/roofline.rst",
            category="{experiment}",
            subcategory="roofline",
            labels={"set": "{results_set}", "ladder": "{ladder}"},
        ),
        "results/{results_set}/figures/{experiment}/roofline_{ladder}.png",
    log:
        "logs/{results_set}/plot_ladder/{experiment}/{ladder}.log",
    conda:
        "../../envs/environment.yaml"
    params:
        python=PYTHON,
        stale=stale_in,
        code=module_hash("plots", "waterfall", "published", "roofline"),
    shell:
        "{params.python:q} -m rungs plot ladder waterfall roofline --results results/{wildcards.results_set:q}"
        " --experiment {wildcards.experiment:q} --of {wildcards.ladder:q} &> {log:q}"


rule plot_clock:
    """Draw clock, power and temperature over the first floor job: what the paired rounds had to put up with."""
    input:
        clock_job_of,
        codes_behind,
    output:
        report(
            "results/{results_set}/figures/{experiment}/clock_power.svg",
            caption="../report/clock.rst",
            category="{experiment}",
            subcategory="clock and power",
            labels={"set": "{results_set}"},
        ),
        "results/{results_set}/figures/{experiment}/clock_power.png",
    log:
        "logs/{results_set}/plot_clock/{experiment}.log",
    conda:
        "../../envs/environment.yaml"
    params:
        python=PYTHON,
        stale=stale_in,
        code=module_hash("plots", "conditions"),
    shell:
        "{params.python:q} -m rungs plot clock --results results/{wildcards.results_set:q}"
        " --experiment {wildcards.experiment:q} &> {log:q}"


# One job draws every factor of an experiment, since starting costs more than drawing; which factors there are is the experiment's.
for factorial_experiment in FACTORIALS:

    rule:
        name:
            f"plot_effects_{factorial_experiment}"
        input:
            data_of_factorial,
            codes_behind,
        output:
            [
                report(
                    f"results/{{results_set}}/figures/{{experiment}}/effect_{factor}.svg",
                    caption="../report/effect.rst",
                    category="{experiment}",
                    subcategory="factorial",
                    labels={"set": "{results_set}", "factor": factor},
                )
                for factor in FACTORIALS[factorial_experiment]
            ],
            [
                report(
                    f"results/{{results_set}}/figures/{{experiment}}/shapley_{picture}.svg",
                    caption="../report/shapley.rst",
                    category="{experiment}",
                    subcategory="factorial",
                    labels={"set": "{results_set}", "picture": f"Shapley {picture}"},
                )
                for picture in SHAPLEY
            ],
            expand(
                "results/{{results_set}}/figures/{{experiment}}/effect_{factor}.png",
                factor=FACTORIALS[factorial_experiment],
            ),
            expand(
                "results/{{results_set}}/figures/{{experiment}}/shapley_{picture}.png",
                picture=SHAPLEY,
            ),
        log:
            "logs/{results_set}/plot_effects/{experiment}.log",
        wildcard_constraints:
            experiment=re.escape(factorial_experiment),
        conda:
            "../../envs/environment.yaml"
        params:
            python=PYTHON,
            factors=FACTORIALS[factorial_experiment],
            pictures=SHAPLEY,
            stale=stale_in,
            code=module_hash("plots", "effects", "shapley", "shapleyplots"),
        shell:
            "{params.python:q} -m rungs plot effect --results results/{wildcards.results_set:q}"
            " --experiment {wildcards.experiment:q} --of {params.factors:q} &> {log:q}"
            " && {params.python:q} -m rungs plot shapley --results results/{wildcards.results_set:q}"
            " --experiment {wildcards.experiment:q} --of {params.pictures:q} &>> {log:q}"


# As above: which figures an experiment of points has is its workload's, and it may have none.
for pointed_experiment in filter(FIGURES.get, FIGURES):

    rule:
        name:
            f"plot_points_{pointed_experiment}"
        input:
            data_of,
            codes_behind,
            published_figures,
        output:
            [
                report(
                    f"results/{{results_set}}/figures/{{experiment}}/{figure}.svg",
                    caption="../report/points.rst",
                    category="{experiment}",
                    subcategory="curves",
                    labels={"set": "{results_set}", "figure": figure},
                )
                for figure in FIGURES[pointed_experiment]
            ],
            expand(
                "results/{{results_set}}/figures/{{experiment}}/{figure}.png",
                figure=FIGURES[pointed_experiment],
            ),
        log:
            "logs/{results_set}/plot_points/{experiment}.log",
        wildcard_constraints:
            experiment=re.escape(pointed_experiment),
        conda:
            "../../envs/environment.yaml"
        params:
            python=PYTHON,
            figures=FIGURES[pointed_experiment],
            stale=stale_in,
            code=module_hash("plots", "curves", *WORKLOADS),
        shell:
            "{params.python:q} -m rungs plot points --results results/{wildcards.results_set:q}"
            " --experiment {wildcards.experiment:q} --of {params.figures:q} &> {log:q}"


rule make_tables:
    """Write an experiment's tables, each with its conclusion and its provenance."""
    input:
        data_of,
        codes_behind,
    output:
        report(
            "results/{results_set}/md/{experiment}.md",
            caption="../report/tables.rst",
            category="{experiment}",
            subcategory="tables",
            labels={"set": "{results_set}", "page": "ladders"},
        ),
    log:
        "logs/{results_set}/make_tables/{experiment}.log",
    conda:
        "../../envs/environment.yaml"
    params:
        python=PYTHON,
        stale=stale_in,
        code=module_hash("tables", "budget", "choose", "wgmma", "pages", *WORKLOADS),
    shell:
        "{params.python:q} -m rungs tables --results results/{wildcards.results_set:q}"
        " --experiment {wildcards.experiment:q} &> {log:q}"


rule make_factorial:
    """Write a factorial's tables: every effect, and the variants that do best and worst."""
    input:
        data_of_factorial,
        codes_behind,
    output:
        report(
            "results/{results_set}/md/{experiment}_factorial.md",
            caption="../report/tables.rst",
            category="{experiment}",
            subcategory="tables",
            labels={"set": "{results_set}", "page": "factorial"},
        ),
    log:
        "logs/{results_set}/make_factorial/{experiment}.log",
    conda:
        "../../envs/environment.yaml"
    params:
        python=PYTHON,
        stale=stale_in,
        code=module_hash("factorial", "decomposition", "shapley", "tables"),
    shell:
        "{params.python:q} -m rungs factorial --results results/{wildcards.results_set:q}"
        " --experiment {wildcards.experiment:q} &> {log:q}"


rule make_index:
    """Write the page that leads to a set's tables and figures."""
    input:
        data_of_set,
        codes_behind,
    output:
        report(
            "results/{results_set}/README.md",
            caption="../report/index.rst",
            category="overview",
            subcategory="pages",
            labels={"set": "{results_set}", "page": "index"},
        ),
    log:
        "logs/{results_set}/make_index.log",
    conda:
        "../../envs/environment.yaml"
    params:
        python=PYTHON,
        experiments=experiments_in,
        factorials=factorials_in,
        stale=stale_in,
        code=module_hash("tables", "factorial", "decomposition", "pages", *WORKLOADS),
    shell:
        "{params.python:q} -m rungs tables --results results/{wildcards.results_set:q}"
        " --factorial {params.factorials:q} --index {params.experiments:q} &> {log:q}"
