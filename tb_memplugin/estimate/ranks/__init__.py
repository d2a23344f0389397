"""The ranks of a distributed job: how they are laid out, what each runs, and the memory that each takes."""

from tb_memplugin.estimate.ranks.rank_estimates import RankEstimate, RankEstimates, estimate_ranks

__all__ = ["RankEstimate", "RankEstimates", "estimate_ranks"]
