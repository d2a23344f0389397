"""Corrections for what fake tensors get wrong or cannot do, one in each file."""

from tb_memplugin.estimate.corrections.correction import Correction, Corrections, Target

__all__ = ["Correction", "Corrections", "Target"]
