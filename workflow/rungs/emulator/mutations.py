"""Mistakes that an author of these kernels could make, as changes of the PTX that nvcc made of a correct one.

They hold the emulator honest, which must report every one of them, and Compute Sanitizer's tools beside it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

GROUPS = {
    "sync": ("abl_L0_R1_bl1_s1_sw1", "abl_L0_R1_bl1_s2_sw1", "abl_L0_R1_bl0_s2_sw1"),
    "cp.async": ("abl_L1_R1_bl1_s1_sw1", "abl_L1_R1_bl1_s2_sw1", "abl_L1_R0_bl0_s3_sw1", "abl_L1_R2_bl1_s4_sw0"),
    "TMA": ("abl_L2_R1_bl1_s1_sw1", "abl_L2_R1_bl1_s2_sw1", "abl_L2_R1_bl0_s3_sw1", "abl_L2_R2_bl1_s4_sw1"),
    "TMA, producer warp": ("tun_bk64_wt64_s4_pw1_db1_ps1_ep1_sk1", "tun_bk64_wt32_s3_pw1_db0_ps0_ep0_sk0"),
    "wgmma": ("hop_t128128_s4_pw1_ps1_cl21_c2_pp0_o2_k1_dl1_bl1", "hop_t128128_s4_pw1_ps1_cl21_c2_pp1_o2_k1_dl1_bl1"),
    "wgmma, K over CTAs": ("hop_t128128_s1_pw1_ps0_cl11_c0_pp0_o0_k2_dl1_bl1",),
    "wgmma, sums through L2": ("hop_t128128_s1_pw1_ps0_cl11_c0_pp0_o0_k2_x1_dl1_bl1",),
}
"""The kernels that are mutated, by how they load."""
SYNC, CP_ASYNC, TMA, TUNED, WGMMA, SPLIT, THROUGH_L2 = GROUPS.values()
ALL = (*SYNC, *CP_ASYNC, *TMA, *TUNED, *WGMMA, *SPLIT, *THROUGH_L2)
SHAPES = {"gemm": (128, 128, 160), "gemm_tuned": (128, 256, 576), "hopper_gemm": (256, 512, 384)}
"""(M, N, K) by experiment, for one CTA or cluster: five to nine tiles along K, so that every ring comes round."""
SMS = 1
KINDS = ("order", "copy order", "start", "deadlock", "layout", "alignment")
"""What a mistake breaks: the order of accesses, that of asynchronous copies, the start of an mbarrier, the end of the kernel, where
a value lies, or an address that the hardware takes."""


@dataclass(frozen=True)
class Mutation:
    """`mutate` gives the mutants of a kernel's PTX, one for each place that the change applies to.

    `reports` is what the emulator says of it, `kind` one of KINDS.
    """

    name: str
    what: str
    kind: str
    variants: tuple[str, ...]
    mutate: Callable[[str], list[str]]
    reports: str


def experiment_of(variant: str) -> str:
    return "gemm_tuned" if variant in TUNED else "hopper_gemm" if variant in WGMMA + SPLIT + THROUGH_L2 else "gemm"


def group_of(variant: str) -> str:
    return next(group for group, names in GROUPS.items() if variant in names)


def at_each(pattern: str, replacement: str | Callable[[re.Match[str]], str]) -> Callable[[str], list[str]]:
    """One mutant for each match."""

    def mutate(text: str) -> list[str]:
        return [
            text[: match.start()]
            + (match.expand(replacement) if isinstance(replacement, str) else replacement(match))
            + text[match.end() :]
            for match in re.finditer(pattern, text, re.M)
        ]

    return mutate


def everywhere(pattern: str, replacement: str) -> Callable[[str], list[str]]:
    """One mutant, changed at all matches."""
    return lambda text: [re.sub(pattern, replacement, text, flags=re.M)] if re.search(pattern, text, re.M) else []


def without_cluster_barriers(text: str) -> list[str]:
    """One mutant for each barrier of the cluster: its arrive and its wait are gone."""
    arrivals, waits = (
        list(re.finditer(rf"^\s*barrier\.cluster\.{kind}[^;]*;", text, re.M)) for kind in ("arrive", "wait")
    )
    return [
        text[: arrive.start()] + text[arrive.end() : wait.start()] + text[wait.end() :]
        for arrive, wait in zip(arrivals, waits, strict=True)
    ]


SUMS = r"^\s*st\.global\.v4\.f32[^;]*;"
BARRIER = r"^\s*bar\.sync\s+0;"
EXPECT = r"(mbarrier\.arrive\.expect_tx[^,]*, \[%r\d+\]), %r\d+;"
INIT = r"(mbarrier\.init[^,]*), (%r\d+);"
SHARED = r"(mov\.u32 \s*%r\d+, bytes);"
TRY_WAIT = r"^mbarrier\.try_wait\.parity\.shared::cta\.b64 p, \[(%r\d+)\], (%r\d+);"
LOOP = (
    TRY_WAIT
    + r"(\s*selp\.u32 [^;]*;\s*\}(?:\s*//[^\n]*|\s*\.loc[^\n]*)*\s*setp\.eq\.s32 \s*(%p\d+), [^;]*;(?:\s*\.loc[^\n]*)*)\s*@\4 bra [^;]*;"
)
MUTATIONS = {
    mutation.name: mutation
    for mutation in (
        Mutation(
            "a cp.async wait dropped",
            "every cp.async.wait_group is gone",
            "copy order",
            CP_ASYNC,
            everywhere(r"^\s*cp\.async\.wait_group \d+;", ""),
            "a race between the copy and the read",
        ),
        Mutation(
            "a cp.async wait weakened",
            "one cp.async.wait_group leaves one group more in flight",
            "copy order",
            CP_ASYNC,
            at_each(r"cp\.async\.wait_group (\d+);", lambda m: f"cp.async.wait_group {int(m[1]) + 1};"),
            "a race between the copy and the read",
        ),
        Mutation(
            "a barrier dropped",
            "one __syncthreads is gone",
            "order",
            SYNC + CP_ASYNC + TMA + TUNED,
            at_each(BARRIER, ""),
            "a race between warps",
        ),
        Mutation(
            "the barrier after mbarrier.init dropped",
            "the __syncthreads between mbarrier.init and the first wait is gone",
            "start",
            TMA + TUNED,
            lambda text: at_each(BARRIER, "")(text)[:1],
            "a race between the initialisation and the first wait",
        ),
        Mutation(
            "the swizzle of a store left out",
            "one XOR of an address is a copy",
            "layout",
            ("abl_L0_R1_bl1_s2_sw1", "abl_L1_R1_bl1_s2_sw1"),
            at_each(r"xor\.b32\s+(%r\d+), (%r\d+), (%r\d+);", r"mov.b32 \1, \2;"),
            "a wrong result, or a read of what nothing wrote",
        ),
        Mutation(
            "the parity of a wait inverted",
            "one mbarrier.try_wait waits for the other phase",
            "copy order",
            TMA + TUNED + WGMMA,
            at_each(TRY_WAIT, r".reg .b32 q;\nxor.b32 q, \2, 1;\nmbarrier.try_wait.parity.shared::cta.b64 p, [\1], q;"),
            "a race with the copy, or a deadlock",
        ),
        Mutation(
            "expect_tx too large",
            "every expect_tx expects bytes that no copy brings",
            "deadlock",
            TMA + TUNED + WGMMA + SPLIT,
            everywhere(EXPECT, r"\1, 99328;"),
            "a deadlock",
        ),
        Mutation(
            "expect_tx too small",
            "every expect_tx expects fewer bytes than the copies bring",
            "copy order",
            TMA + TUNED + WGMMA + SPLIT,
            everywhere(EXPECT, r"\1, 8192;"),
            "a copy that lands in the next phase, or a deadlock",
        ),
        Mutation(
            "an mbarrier of one arrival too many",
            "one mbarrier.init counts one arrival more than there is",
            "deadlock",
            TMA + TUNED + WGMMA + SPLIT,
            at_each(INIT, r"{ .reg .b32 q;\nadd.s32 q, \2, 1;\n\1, q;\n}"),
            "a deadlock",
        ),
        Mutation(
            "an mbarrier of one arrival too few",
            "one mbarrier.init counts one arrival less than there is",
            "copy order",
            TUNED + WGMMA,
            at_each(INIT, r"{ .reg .b32 q;\nsub.s32 q, \2, 1;\n\1, q;\n}"),
            "an arrival too many, or an mbarrier for no arrivals",
        ),
        Mutation(
            "a try_wait dropped",
            "one mbarrier.try_wait is always true",
            "copy order",
            TMA + TUNED + WGMMA,
            at_each(TRY_WAIT, "setp.eq.u32 p, 0, 0;"),
            "a race with the copy, or an arrival too many",
        ),
        Mutation(
            "the answer of a try_wait ignored",
            "one mbarrier.try_wait is asked once, and the kernel goes on",
            "copy order",
            TMA + TUNED + WGMMA,
            at_each(LOOP, lambda m: m[0][: m[0].rindex("@")]),
            "a race with the copy, or an arrival too many",
        ),
        Mutation(
            "an arrival on `empty` dropped",
            "nobody says that a stage is free again",
            "deadlock",
            TUNED,
            at_each(r"^\s*mbarrier\.arrive\.shared::cta\.b64[^;]*;", ""),
            "a deadlock",
        ),
        Mutation(
            "the fence after mbarrier.init dropped",
            "the asynchronous proxy may not see the initialised mbarrier",
            "start",
            TMA + TUNED + WGMMA + SPLIT,
            everywhere(r"^\s*fence\.mbarrier_init[^;]*;", ""),
            "a missing fence before the copy",
        ),
        Mutation(
            "shared memory moved by 128 B",
            "stages start off the pattern of their swizzle",
            "alignment",
            ("abl_L2_R1_bl1_s2_sw1", "abl_L2_R1_bl0_s3_sw1", *TUNED),
            everywhere(SHARED, r"\1+128;"),
            "a wrong result, or an access past the end of shared memory",
        ),
        Mutation(
            "shared memory moved by 8 B",
            "16-byte accesses lie off their alignment",
            "alignment",
            CP_ASYNC + TMA,
            everywhere(SHARED, r"\1+8;"),
            "a misaligned access",
        ),
        Mutation(
            "the commit after the wait",
            "cp.async.wait_group comes before the commit_group that it is for",
            "copy order",
            CP_ASYNC[:1],
            everywhere(
                r"cp\.async\.commit_group;(.*\n(?:.*\n){1,8}?\s*)cp\.async\.wait_group 0;",
                r"cp.async.wait_group 0;\1cp.async.commit_group;",
            ),
            "a race between the copy and the read",
        ),
        Mutation(
            "a head start that nobody gives",
            "the bar.arrive that a named barrier counts on is gone",
            "deadlock",
            TUNED[:1],
            everywhere(r"^\s*bar\.arrive[^;]*;", ""),
            "a deadlock",
        ),
        Mutation(
            "a wgmma wait dropped",
            "one wgmma.wait_group is gone",
            "copy order",
            WGMMA,
            at_each(r"^\s*wgmma\.wait_group[^;]*;", ""),
            "an access to registers of a product under way, or a race with the copy into what it reads",
        ),
        Mutation(
            "a wgmma wait weakened",
            "one wgmma.wait_group leaves one group more in flight",
            "copy order",
            WGMMA,
            at_each(
                r"(wgmma\.wait_group\.sync\.aligned) (\d+);",
                lambda m: f"{m[1]} {int(m[2]) + 1};",
            ),
            "an access to registers of a product under way, or a race with the copy into what it reads",
        ),
        Mutation(
            "a stage released before the wgmma wait",
            "the wgmma.wait_group comes after the arrival on `empty` that it is for",
            "copy order",
            WGMMA,
            at_each(
                r"(wgmma\.wait_group\.sync\.aligned \d+;)((?:(?!wgmma).*\n)+?.*mbarrier\.arrive(?:.*\n)+?\$L\w+:)",
                r"\2\n\1",
            ),
            "a race with the copy into what the product reads",
        ),
        Mutation(
            "the wgmma fence dropped",
            "every wgmma.fence is gone",
            "order",
            WGMMA,
            everywhere(r"^\s*wgmma\.fence[^;]*;", ""),
            "a missing fence before the first product",
        ),
        Mutation(
            "the wgmma commit dropped",
            "every wgmma.commit_group is gone, so that no wait waits for anything",
            "copy order",
            WGMMA,
            everywhere(r"^\s*wgmma\.commit_group[^;]*;", ""),
            "an access to registers of a product under way",
        ),
        Mutation(
            "another swizzle in a descriptor",
            "one descriptor of a tile with the 128 B swizzle says 64 B",
            "layout",
            WGMMA,
            at_each(r"\b[4-9]\d{18}\b", lambda m: str((int(m[0]) ^ 3 << 62) - (1 << 64))),
            "a wrong result",
        ),
        Mutation(
            "a wait for a bulk store dropped",
            "one cp.async.bulk.wait_group is gone",
            "copy order",
            WGMMA,
            at_each(r"^\s*cp\.async\.bulk\.wait_group[^;]*;", ""),
            "a race between the store and the next tile, or a store under way at the end",
        ),
        Mutation(
            "a named barrier dropped",
            "one bar.sync of a warpgroup is gone",
            "order",
            WGMMA,
            at_each(r"^\s*bar(?:rier)?\.sync[^,;]*,[^;]*;", ""),
            "a race between warps and the copy engine",
        ),
        Mutation(
            "the fence before a bulk store dropped",
            "the copy engine may not see what the warps have written to shared memory",
            "order",
            WGMMA,
            everywhere(r"^\s*fence\.proxy\.async[^;]*;", ""),
            "a missing fence before the copy",
        ),
        Mutation(
            "an arrival at another CTA dropped",
            "nobody says to the cluster that a stage is free again",
            "deadlock",
            WGMMA,
            everywhere(r"^\s*(?:@!?%p\d+\s+)?mbarrier\.arrive[^;]*shared::cluster[^;]*;", ""),
            "a deadlock",
        ),
        Mutation(
            "a multicast to one CTA only",
            "one copy goes to the first CTA of the cluster alone",
            "deadlock",
            WGMMA,
            at_each(
                r"^\s*(cp\.async\.bulk\.[^;]*multicast::cluster[^;]*\]), %\w+([^;\]]*;)",
                r"{ .reg .b16 q;\nmov.b16 q, 1;\n\1, q\2\n}",
            ),
            "a deadlock",
        ),
        Mutation(
            "a barrier of the cluster dropped",
            "one barrier.cluster is gone",
            "start",
            WGMMA + SPLIT,
            without_cluster_barriers,
            "a race with the initialisation of an mbarrier, or an arrival at a CTA that may have ended",
        ),
        Mutation(
            "the wait for sums of other CTAs dropped",
            "the mbarrier.try_wait for what st.async sends is always true",
            "copy order",
            SPLIT,
            at_each(r"^mbarrier\.try_wait\.parity\.acquire\.cluster[^;]*;", "setp.eq.u32 p, 0, 0;"),
            "a race with what another CTA sends",
        ),
        Mutation(
            "sums that are not sent",
            "every st.async is gone",
            "deadlock",
            SPLIT,
            everywhere(r"^\s*(?:@!?%p\d+\s+)?st\.async[^;]*;", ""),
            "a deadlock",
        ),
        Mutation(
            "sums sent to a CTA that does not expect them",
            "every mapa names the sender",
            "deadlock",
            SPLIT,
            everywhere(
                r"mapa\.shared::cluster\.u32 (%r\d+), (%r\d+), %?\w+;",
                r"{ .reg .b32 q;\nmov.u32 q, %cluster_ctarank;\nmapa.shared::cluster.u32 \1, \2, q;\n}",
            ),
            "a wrong result, or a read of what nothing wrote",
        ),
        Mutation(
            "sums that are not written",
            "one store of sums for another CTA is gone",
            "order",
            THROUGH_L2,
            lambda text: at_each(SUMS, "")(text)[:1],
            "a read of what nothing wrote",
        ),
        Mutation(
            "an arrival in L2 dropped",
            "the atomic by which a warp says that its sums are there is a load",
            "deadlock",
            THROUGH_L2,
            at_each(
                r"atom\.add\.release\.gpu\.global\.u32 (%r\d+), (\[%rd\d+\]), %r\d+;",
                r"ld.relaxed.gpu.global.u32 \1, \2;",
            ),
            "a deadlock",
        ),
        Mutation(
            "an arrival in L2 that releases nothing",
            "the atomic by which a warp says that its sums are there is relaxed",
            "order",
            THROUGH_L2,
            at_each(r"atom\.add\.release\.gpu", "atom.add.relaxed.gpu"),
            "a race between CTAs",
        ),
        Mutation(
            "a wait in L2 that acquires nothing",
            "the load by which a warp sees that the others' sums are there is relaxed",
            "order",
            THROUGH_L2,
            at_each(r"ld\.acquire\.gpu", "ld.relaxed.gpu"),
            "a race between CTAs",
        ),
        Mutation(
            "the answer of a wait in L2 ignored",
            "the counter of arrivals is read once, and the kernel goes on",
            "order",
            THROUGH_L2,
            at_each(
                r"(ld\.acquire\.gpu[^;]*;(?:(?!\bbra\b)[^;])*;(?:(?!\bbra\b)[^;])*;(?:\s*\.loc[^\n]*)*)\s*@%p\d+ bra [^;]*;",
                r"\1",
            ),
            "a read of what nothing wrote",
        ),
    )
}
