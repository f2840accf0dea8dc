"""What the verbs that look at one run say of themselves; their modules import torch, and help is not to wait for it."""

LEFT_OUT = """left out: what the allocator keeps and fragments, workspaces inside kernels, the input pipeline,
evaluation, launch overhead, communication, the copy of all parameters that torch's optimizers may make for a moment
on a GPU. 1 GiB is kept for the CUDA context and libraries in the largest batch only.
Recurrent layers keep what oneDNN's keep, not cuDNN's. Where values decide shapes (objects matched, regions proposed,
suppression), the most there can be is assumed. One batch of synthetic data: texts and recordings of other lengths cost
otherwise. "activations" includes temporaries and, at the peak, gradients that no parameter holds yet. On a CPU, in
FP32, the peak was within 0.1 % of MemTracker's of a real step on the same batch for every small recipe but
Faster R-CNN's and YOLO's, which need 2 and 4 % less than the most there can be; in BF16 for ResNet's and the LSTM's.
Detection loops over pictures: beyond twice the recipe's batch its memory and time are taken to go straight on."""

PROBE = """mptrain probe +recipe=NAME [KEY=VALUE ...] [steps=3]

Trains a few steps in FP32 and counts every activation and weight gradient by exponent: the share of exact zeros, and
what FP16 would flush to zero or overflow at each loss scale from 1 to 2^24. Recommends a precision and a scale, and
takes a step under every precision to show in which format each operation runs and what is stored. Own networks:
task.model=package.module:function. Writes probe.md, probe.json and probe.csv to out=FOLDER, or a folder in
results/probes."""

ESTIMATE = f"""mptrain estimate +recipe=NAME [KEY=VALUE ...]

Memory, operations and a roofline time per training step of a recipe, without a GPU and without data; the largest batch
that fits on named GPUs. Keys are those of training; precision= shows one alone.

{LEFT_OUT}"""
