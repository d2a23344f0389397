"""Ask cuDNN how large its workspaces are, for a GPU that is described and not there.

Since version 9.8, cuDNN's backend API answers for a description of a device: which kernels its heuristics
choose, and how much workspace they take. It needs no GPU and no driver.

Start with `questions.py`, which asks from the estimate, and describes the GPU. cuDNN runs in a process of its
own (`convolution.py`), so whatever it does cannot end the estimate. It describes what is asked about, and
`library.py` calls cuDNN and takes the plan that PyTorch would take. Attention needs no answers:
kernels/attention.py knows its sizes.
"""
