rule profile:
    """Read one rung's counters with Nsight Compute; its times never enter a timing column."""
    input:
        binary=BINARY,
        metrics=own("config/ncu_metrics.csv"),
        clock="results/{live}/clock/profile/{experiment}/{variant}.json",
    output:
        csv=update(ensure("results/{live}/csv/profile/{experiment}/{variant}.csv", non_empty=True)),
        manifest=update("results/{live}/csv/profile/{experiment}/{variant}.json"),
    log:
        "logs/{live}/profile/{experiment}/{variant}.log",
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
        ncu=run.ncu,
        l2=run.measure["l2"],
        shapes=lambda wildcards: run.profile_shapes_as_json(wildcards.experiment, variant_of(wildcards)),
        time_limit=run.time_limit_s,
        permission=run.profiling_permission if run.profiling else "",
        code=module_hash("profile", "launcher"),
    shell:
        "{params.python:q} -m rungs profile --experiment {wildcards.experiment:q} --variant {wildcards.variant:q}"
        " --arch {params.arch:q} --gpu {params.gpu:q} --manifest {input.binary[0]:q} --ncu {params.ncu:q} --l2 {params.l2:q}"
        " --clock {input.clock:q} --shapes {params.shapes:q} --time-limit {params.time_limit:q}"
        " --output {output.csv:q} &> {log:q}"
