"""rungs: what each GPU data-movement optimisation buys, measured one factor at a time."""

__version__ = "0.1.0"
