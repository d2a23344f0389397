"""How well layers are found from call stacks alone: recordings whose truth is known, without it, compared.

    python -m tests.gpu.standin -m benchmarks.layers record FOLDER [PROGRAM...]
    python -m benchmarks.layers compare FOLDER

The first needs torch's CUDA wheel, transformers, accelerate and peft.
"""
