"""Executes the PTX of a kernel in numpy: results, counts and races without a GPU. `launch.run` is the way in."""
