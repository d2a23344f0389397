"""How well layers are found from call stacks alone: recordings whose truth is known, without it, and compared.

    python -m tests.gpu.standin -m benchmarks.layers record FOLDER [PROGRAM...]    # torch's CUDA wheel, transformers
    python -m benchmarks.layers compare FOLDER                                     # any environment
"""
