rule build:
    """Compile one variant, and describe what it was made from, so that a number leads back to its source."""
    input:
        headers_of,
    output:
        cubin="results/{live}/build/{arch}/{variant}/{variant}.cubin",
        ptx="results/{live}/build/{arch}/{variant}/{variant}.ptx",
        manifest=ensure("results/{live}/build/{arch}/{variant}/{variant}.json", non_empty=True),
    log:
        "logs/{live}/build/{arch}/{variant}.log",
    conda:
        "../../envs/environment.yaml"
    params:
        python=PYTHON,
        toolchain=run.toolchain,
        compiler=compiler(),
        macros=macros,
        code=module_hash("build", "plan", "wgmma"),
    shell:
        "{params.python:q} -m rungs build --variant {wildcards.variant:q} --arch {wildcards.arch:q}"
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
