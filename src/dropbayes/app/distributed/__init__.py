"""Predictions over many processes and machines: Parquet folders, frames of engines, and networks under torchrun.

A row has the same bits whichever worker predicts it: a run on any engine, cut anywhere, interrupted and resumed, gives
the numbers of one process.
"""

from dropbayes.app.distributed.engines import ENGINES, predict_dask, predict_ray, predict_spark
from dropbayes.app.distributed.parts import predict_parquet
from dropbayes.app.distributed.ranks import predict_across_ranks

__all__ = ["ENGINES", "predict_across_ranks", "predict_dask", "predict_parquet", "predict_ray", "predict_spark"]
