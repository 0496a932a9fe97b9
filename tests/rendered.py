"""What several test files read out of pages and figures."""

from __future__ import annotations

import re

import matplotlib.pyplot as plt
from matplotlib.figure import Figure


def grids(text: str) -> list[list[list[str]]]:
    """Every table of a Markdown text: rows of cells, header first."""
    found = []
    for block in re.findall(r"(?:^\|.*\|\n?)+", text, re.MULTILINE):
        lines = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in block.strip().splitlines()]
        found.append([lines[0], *lines[2:]])
    return found


def check_that_no_text_leaves(figure: Figure) -> None:
    figure.canvas.draw()
    width, height = figure.bbox.size
    for text in figure.findobj(plt.Text):
        if text.get_text() and text.get_visible():
            box = text.get_window_extent()
            assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, text.get_text()
