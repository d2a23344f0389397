"""How well layers are found from call stacks alone: recordings whose truth is known, without it, compared.

    python -m tests.gpu.standin -m benchmarks.layers record FOLDER [PROGRAM...]
    python -m benchmarks.layers compare FOLDER

And how well a Kineto trace says what memory is, beside what our handler knew of the same window:

    LAYERS_DEVICE=cpu python -m benchmarks.layers record-kineto FOLDER [PROGRAM...]
    python -m benchmarks.layers compare-kineto FOLDER

Recording needs torch's CUDA wheel, transformers, accelerate and peft.
"""
