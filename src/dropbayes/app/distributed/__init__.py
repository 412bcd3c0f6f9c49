"""Predictions over many processes and machines: Parquet folders on an installed engine, and networks under torchrun.

A row has the same bits whichever worker predicts it: a run on any engine, cut anywhere, interrupted and resumed, gives
the numbers of one process.
"""

from dropbayes.app.distributed.parts import ENGINES, predict_parquet
from dropbayes.app.distributed.ranks import predict_across_ranks

__all__ = ["ENGINES", "predict_across_ranks", "predict_parquet"]
