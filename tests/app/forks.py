"""The process that processes of the tests are forks of: it has imported what they need, which takes longer than most tests.

A process of the tests has one such, with what was to be imported when it was first needed.
"""

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
OURS = ["dropbayes.app.cli", "dropbayes.app.distributed", "dropbayes.app.models.model", "dropbayes.app.serving"]
# What would be imported for a first answer, and by the modules of tests.
LATER = ["pandas", "pydantic.type_adapter", "pytest", "scipy.special", "torch.fx.experimental.symbolic_shapes"]
FORKS.set_forkserver_preload([*OURS, *LATER])
