# rungs: what each GPU data-movement optimisation buys, one factor at a time. `snakemake` alone makes `all`.
from snakemake.utils import min_version

min_version("9.27")


include: "workflow/rules/where.smk"


configfile: "config/config.yaml" if os.path.exists("config/config.yaml") and not AS_MODULE else OWN_CONFIG


include: "workflow/rules/common.smk"


# Targets: no output of their own; each lists every CSV as well as what is drawn from them, so that a CSV that was deleted
# is measured again.


rule all:
    default_target: True
    input:
        evidence(WHOLE),
        sweeps(WHOLE),
        profiles(WHOLE),
        figures(),
        factorial_figures(),
        tables(),
        factorial_tables(),
        claims(),
        verdict(),


rule ladders:
    input:
        evidence(),
        sweeps(),


rule factorial:
    input:
        evidence(factorial=True),
        sweeps(factorial=True),
        profiles(factorial=True),
        effects(live=True),
        factorial_figures(live=True),
        factorial_tables(live=True),


rule sweeps:
    input:
        sweeps(),


rule profiles:
    input:
        profiles(),


rule sanitized:
    input:
        sanitized_here,


rule heatmap:
    input:
        sweeps(),
        figures("heatmap"),


rule claims:
    input:
        sweeps(WHOLE),
        profiles(WHOLE),
        claims(),


rule tables:
    input:
        sweeps(WHOLE),
        profiles(WHOLE),
        tables(),
        factorial_tables(),
        claims(),


rule report:
    input:
        sweeps(WHOLE),
        profiles(WHOLE),
        figures(),
        factorial_figures(),
        tables(),
        factorial_tables(),
        claims(),


include: "workflow/rules/build.smk"
include: "workflow/rules/measure.smk"
include: "workflow/rules/profile.smk"
include: "workflow/rules/sanitize.smk"
include: "workflow/rules/emulate.smk"
include: "workflow/rules/aggregate.smk"
include: "workflow/rules/claims.smk"
include: "workflow/rules/report.smk"


onstart:
    check_executor()
    unlimit_rate()
    measure_forced()


onsuccess:
    print(closing_line(), file=sys.stderr)


onerror:
    print("".join(f"{line}\n" for line in split_ladders()), end="", file=sys.stderr)
    print(release_clocks(), end="", file=sys.stderr)
