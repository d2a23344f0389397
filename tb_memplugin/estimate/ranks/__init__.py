"""Estimate the ranks of a distributed job: their mesh, what each rank runs, and the memory that it takes."""

from tb_memplugin.estimate.ranks.rank_estimates import RankEstimate, RankEstimates, estimate_ranks

__all__ = ["RankEstimate", "RankEstimates", "estimate_ranks"]
