"""What the tests collect: a module written in Triton can be imported only where Triton is."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("triton") else ["src/dropbayes/population/fused.py"]
