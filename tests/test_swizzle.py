"""The shared-memory image: what swizzle.cuh computes, that it is TMA's pattern, and how many wavefronts each access takes."""

from __future__ import annotations

import csv
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from rungs.build import find_toolchain
from rungs.files import ROOT

PANEL_BYTES = 32 * 64 * 2  # of B as K x N: [32][64] bf16
Access = list[list[int]]  # per instruction, the byte address of each lane


def chunk_offset(row_bytes: int, swizzled: bool, row: int, chunk: int) -> int:
    """The mirror of chunk_offset in kernels/swizzle.cuh."""
    if swizzled:
        chunk ^= row >> 1 & 3 if row_bytes == 64 else row & 7
    return row * row_bytes + chunk * 16


def tma_offset(row_bytes: int, row: int, chunk: int) -> int:
    """TMA's pattern as the PTX ISA states it: address bits from 7 up, XORed onto the bits from 4 up (two or three of them)."""
    address = row * row_bytes + chunk * 16
    bits = 3 if row_bytes == 64 else 7
    return address ^ (address >> 7 & bits) << 4


def wavefronts(addresses: list[int], width: int) -> int:
    """Wavefronts of one instruction: per phase, the most distinct 4-byte words that one of the 32 banks must serve."""
    lanes = {16: 8, 8: 16}.get(width, 32)
    total = 0
    for first in range(0, 32, lanes):
        words = {(a + offset) // 4 for a in addresses[first : first + lanes] for offset in range(0, width, 4)}
        banks = [word % 32 for word in words]
        total += max(banks.count(bank) for bank in set(banks))
    return total


def b_k_by_n(swizzled: bool, row: int, chunk: int) -> int:
    """The mirror of offset_b for B as K x N: two panels of 64 columns."""
    return chunk // 8 * PANEL_BYTES + chunk_offset(128, swizzled, row, chunk % 8)


# What read.cuh's lanes address, by instruction; `swizzled` is the variant's level. Row 0, K 0 of the tile.
def ldmatrix_a(swizzled: bool) -> Access:
    return [[chunk_offset(64, swizzled, lane % 16, lane // 16) for lane in range(32)]]


def ldmatrix_b(swizzled: bool) -> Access:
    return [[chunk_offset(64, swizzled, lane % 8 + lane // 16 * 8, lane // 8 % 2) for lane in range(32)]]


def ldmatrix_b_transposed(swizzled: bool) -> Access:
    return [[b_k_by_n(swizzled, lane % 16, lane // 16) for lane in range(32)]]


def lds_a(swizzled: bool) -> Access:
    return [
        [chunk_offset(64, swizzled, lane // 4 + i % 2 * 8, i // 2) + lane % 4 * 4 for lane in range(32)]
        for i in range(4)
    ]


def lds_b(swizzled: bool) -> Access:
    return [[chunk_offset(64, swizzled, lane // 4, i) + lane % 4 * 4 for lane in range(32)] for i in range(2)]


def lds_b_halves(swizzled: bool) -> Access:
    return [
        [b_k_by_n(swizzled, lane % 4 * 2 + 8 * i + half, 0) + lane // 4 * 2 for lane in range(32)]
        for i in range(2)
        for half in range(2)
    ]


def lds_k_permuted(swizzled: bool) -> Access:
    return [[chunk_offset(64, swizzled, lane // 4 + 8 * low, lane % 4) for lane in range(32)] for low in range(2)]


def store_rows(swizzled: bool) -> Access:
    return [[chunk_offset(64, swizzled, lane // 4, lane % 4) for lane in range(32)]]


def store_panels(swizzled: bool) -> Access:
    return [[b_k_by_n(swizzled, lane // 16, lane % 16) for lane in range(32)]]


# Rows of the reference; plain panels meet the same banks as the reference's unsplit Bs[32][128]: both have every row's
# chunk c on the same four banks.
CASES: list[tuple[str, str, str, Callable[[bool], Access], int]] = [
    ("As[128][32] bf16", "64B", "ldmatrix.x4 16x16", ldmatrix_a, 16),
    ("As[128][32] bf16", "64B", "4 x LDS.32 16x16", lds_a, 4),
    ("As[128][32] bf16", "64B", "LDS.128 k-permuted 16x32", lds_k_permuted, 16),
    ("Bs[128][32] bf16", "64B", "ldmatrix.x4 16x16", ldmatrix_b, 16),
    ("Bs[128][32] bf16", "64B", "2 x LDS.32 16x8", lds_b, 4),
    ("Bs[2][32][64] bf16", "128B", "ldmatrix.x4.trans 16x16", ldmatrix_b_transposed, 16),
    ("Bs[2][32][64] bf16", "128B", "4 x LDS.U16 16x8", lds_b_halves, 2),
]


def reference() -> dict[tuple[str, str, str], tuple[int, int]]:
    lines = (Path(__file__).parent / "data" / "shared_wavefronts.csv").read_text().splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    return {(r["tile"], r["layout"], r["access"]): (int(r["wavefronts"]), int(r["ideal"])) for r in rows}


def compared() -> list[tuple[tuple[str, str, str], Access, int]]:
    found = []
    for tile, span, access, addresses, width in CASES:
        plain_tile = tile.replace("Bs[2][32][64]", "Bs[32][128]")
        found.append(((plain_tile, "plain", access), addresses(False), width))
        found.append(((tile, f"XOR {span}", access), addresses(True), width))
    for addresses in (store_rows, store_panels):
        found += [
            (("any", "16-byte rows", "STS.128 / LDGSTS.128"), addresses(swizzled), 16) for swizzled in (False, True)
        ]
    return found


@pytest.mark.parametrize(
    ("row", "access", "width"), compared(), ids=lambda value: str(value) if isinstance(value, tuple) else ""
)
def test_wavefronts_are_those_of_the_reference(row, access, width):
    assert sum(wavefronts(addresses, width) for addresses in access) == reference()[row][0]


def test_every_row_of_the_reference_is_an_access_of_this_kernel():
    assert {row for row, _, _ in compared()} == set(reference())


def test_the_swizzle_makes_every_ldmatrix_free_of_conflicts():
    for addresses in (ldmatrix_a, ldmatrix_b, ldmatrix_b_transposed):
        assert wavefronts(addresses(True)[0], 16) == 4
        assert wavefronts(addresses(False)[0], 16) >= 16


def test_later_tiles_of_a_fragment_take_no_more_wavefronts():
    # Fragments start at multiples of 8 rows and of 2 chunks: the XOR permutes within a period of 8 rows.
    for row0 in range(0, 128, 8):
        for ks in range(2):
            lanes = [chunk_offset(64, True, (row0 + lane % 16) % 128, 2 * ks + lane // 16) for lane in range(32)]
            assert wavefronts(lanes, 16) == 4
    for column in range(0, 128, 16):
        for ks in range(2):
            lanes = [b_k_by_n(True, 16 * ks + lane % 16, column // 8 + lane // 16) for lane in range(32)]
            assert wavefronts(lanes, 16) == 4


@pytest.mark.parametrize(("row_bytes", "rows"), [(64, 128), (128, 32)])
def test_the_swizzle_is_tmas_and_keeps_every_chunk(row_bytes, rows):
    places = [(row, chunk) for row in range(rows) for chunk in range(row_bytes // 16)]
    image = [chunk_offset(row_bytes, True, *place) for place in places]
    assert image == [tma_offset(row_bytes, *place) for place in places]
    assert sorted(image) == list(range(0, rows * row_bytes, 16))
    assert image != [chunk_offset(row_bytes, False, *place) for place in places]


def test_the_mirror_is_what_the_header_computes(tmp_path):
    source = '#include <cstdio>\n#include "swizzle.cuh"\nint main() {\n'
    for row_bytes in (64, 128):
        for swizzled in ("false", "true"):
            source += (
                f"  for (unsigned r = 0; r < 32; ++r) for (unsigned c = 0; c < {row_bytes // 16}; ++c)"
                f' std::printf("%u\\n", chunk_offset<{row_bytes}, {swizzled}>(r, c));\n'
            )
    (tmp_path / "print.cpp").write_text(source + "}\n")
    compiler = [
        find_toolchain("pip").host,
        "-std=c++17",
        "-D__device__=",
        "-D__forceinline__=inline",
        f"-I{ROOT / 'kernels'}",
    ]
    subprocess.run([*compiler, str(tmp_path / "print.cpp"), "-o", str(tmp_path / "print")], check=True)
    printed = [
        int(line)
        for line in subprocess.run([tmp_path / "print"], capture_output=True, text=True, check=True).stdout.split()
    ]
    assert printed == [
        chunk_offset(row_bytes, swizzled, row, chunk)
        for row_bytes in (64, 128)
        for swizzled in (False, True)
        for row in range(32)
        for chunk in range(row_bytes // 16)
    ]


@pytest.mark.parametrize(
    ("addresses", "width", "wanted"),
    [
        ([4 * lane for lane in range(32)], 4, 1),  # a row of words
        ([0] * 32, 4, 1),  # one word is broadcast
        ([128 * lane for lane in range(32)], 4, 32),  # one bank
        ([8 * lane for lane in range(32)], 4, 2),
        ([16 * lane for lane in range(32)], 16, 4),  # 512 bytes cannot take fewer
        ([8 * lane for lane in range(32)], 8, 2),
        ([2 * lane for lane in range(32)], 2, 1),
    ],
)
def test_the_bank_rule_by_hand(addresses, width, wanted):
    assert wavefronts(addresses, width) == wanted
