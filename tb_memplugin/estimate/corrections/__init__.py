"""What fake tensors get wrong, or cannot do, put right: one correction a file."""

from tb_memplugin.estimate.corrections.correction import Correction, Corrections, Target

__all__ = ["Correction", "Corrections", "Target"]
