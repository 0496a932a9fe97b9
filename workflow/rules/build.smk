# `--cache build` takes its output from $SNAKEMAKE_OUTPUT_CACHE: what decides it is therefore among params and inputs, and nothing
# of the checkout is; a file there has the name's ending alone, so that manifest and cubin lie beside each other behind the links too.
rule build:
    """Compile one variant, and describe what it was made from, so that a number leads back to its source."""
    input:
        headers_of,
    output:
        multiext(
            "results/{live}/build/{arch}/{variant}/{variant}",
            cubin=".cubin",
            ptx=".ptx",
            manifest=".json",
        ),
    log:
        "logs/{live}/build/{arch}/{variant}.log",
    conda:
        "../../envs/environment.yaml"
    params:
        toolchain=run.toolchain,
        compiler=compiler(),
        unit=unit_of,
        code=module_hash("build", "machine_code", "plan", "wgmma"),
    shell:
        '"$RUNGS_PYTHON" -m rungs build --variant {wildcards.variant:q} --arch {wildcards.arch:q}'
        " --toolchain {params.toolchain:q} --output {output.manifest:q} --failure-is-data &> {log:q}"


rule inspect:
    """Disassemble one binary: a step counts only where nothing but its factor moved."""
    input:
        binary=BINARY,
        rules=own("config/evidence.yaml"),
    output:
        csv=ensure("results/{live}/csv/inspect/{arch}/{variant}.csv", non_empty=True),
    log:
        "logs/{live}/inspect/{arch}/{variant}.log",
    conda:
        "../../envs/environment.yaml"
    params:
        python=PYTHON,
        toolchain=run.toolchain,
        code=module_hash("inspect"),
    shell:
        "{params.python:q} -m rungs inspect --manifest {input.binary[0]:q} --toolchain {params.toolchain:q}"
        " --output {output.csv:q} &> {log:q}"
