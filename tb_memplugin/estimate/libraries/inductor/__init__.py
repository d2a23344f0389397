"""What Inductor, the default compiler of `torch.compile`, allocates: its own code, run on fake tensors."""

from tb_memplugin.estimate.libraries.inductor.compiler import Compiler

__all__ = ["Compiler"]
