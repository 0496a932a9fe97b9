# The outputs of what measures, counts or emulates are `update`: the job finds what was there, and keeps it where a kernel's text has
# changed and its machine code has not. A file that was deleted is made again.
rule clock:
    """Decide clock mode and MHz for one job; the job itself locks, restores and copies this record."""
    output:
        temp("results/{live}/clock/{measuring}/{experiment}/{variant}.json"),
    log:
        "logs/{live}/clock/{measuring}/{experiment}/{variant}.log",
    wildcard_constraints:
        measuring="sweep|profile|floor_[123]",
    conda:
        "../../envs/environment.yaml"
    resources:
        gpu=1,
    params:
        python=PYTHON,
        gpu=run.gpu_uuid,
        mode=run.clock_mode,
        mhz=run.clock_mhz,
    shell:
        "{params.python:q} -m rungs clock decide --gpu {params.gpu:q} --mode {params.mode:q} --mhz {params.mhz:q}"
        " --output {output:q} &> {log:q}"


rule sweep:
    """Time one rung over every shape, interleaved with its predecessors and the control."""
    input:
        manifests=arms_of,
        cubins=lambda wildcards: cubins(arms_of(wildcards)),
        stamp=binary(build.STAMP),
        clock="results/{live}/clock/sweep/{experiment}/{variant}.json",
    output:
        csv=update(ensure("results/{live}/csv/sweep/{experiment}/{variant}.csv", non_empty=True)),
        manifest=update("results/{live}/csv/sweep/{experiment}/{variant}.json"),
    log:
        "logs/{live}/sweep/{experiment}/{variant}.log",
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
        shapes=lambda wildcards: run.shapes_as_json(wildcards.experiment, variant_of(wildcards)),
        settings=lambda wildcards: run.settings_as_json(wildcards.experiment, variant_of(wildcards)),
        time_limit=run.time_limit_s,
        protocol=protocol_hash(),
        twin="--twin" if run.twins else "",
    shell:
        "{params.python:q} -m rungs sweep {params.twin} --experiment {wildcards.experiment:q} --variant {wildcards.variant:q}"
        " --arch {params.arch:q} --gpu {params.gpu:q} --manifests {input.manifests:q} --stamp {input.stamp[0]:q}"
        " --clock {input.clock:q} --shapes {params.shapes:q} --settings {params.settings:q}"
        " --time-limit {params.time_limit:q} --output {output.csv:q} &> {log:q}"


rule floor:
    """Time one binary against itself in a job of its own: three of these give the floor that no claim goes under."""
    input:
        manifests=floor_arms,
        cubins=lambda wildcards: cubins(floor_arms(wildcards)),
        stamp=binary(build.STAMP),
        clock=lambda wildcards: (
            f"{LIVE}/clock/floor_{wildcards.job}/{wildcards.experiment}/"
            f"{run.experiments[wildcards.experiment].floor_variant.name}.json"
        ),
    output:
        csv=update(ensure("results/{live}/csv/floor/{experiment}/{job}.csv", non_empty=True)),
        manifest=update("results/{live}/csv/floor/{experiment}/{job}.json"),
    log:
        "logs/{live}/floor/{experiment}/{job}.log",
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
        variant=lambda wildcards: run.experiments[wildcards.experiment].floor_variant.name,
        shapes=lambda wildcards: run.shapes_as_json(
            wildcards.experiment, run.experiments[wildcards.experiment].floor_variant
        ),
        settings=lambda wildcards: run.settings_as_json(
            wildcards.experiment, run.experiments[wildcards.experiment].floor_variant
        ),
        time_limit=run.time_limit_s,
        protocol=protocol_hash(),
    shell:
        "{params.python:q} -m rungs sweep --twin --experiment {wildcards.experiment:q} --variant {params.variant:q}"
        " --arch {params.arch:q} --gpu {params.gpu:q} --manifests {input.manifests:q} --stamp {input.stamp[0]:q}"
        " --clock {input.clock:q} --shapes {params.shapes:q} --settings {params.settings:q}"
        " --time-limit {params.time_limit:q} --output {output.csv:q} &> {log:q}"
