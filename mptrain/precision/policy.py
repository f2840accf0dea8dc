"""Which operation runs in which format: CUDA autocast's lists, as data.

Autocast sorts operations by what rounding does to them. Dot products gain speed from 16 bits and lose little, so
they are cast down; exponentials, norms, long sums and losses need range or long mantissas, so they are cast up; the
rest takes what it is given. The lists of CPU autocast are shorter (softmax, norms, exp and sums stay in 16 bits
there), which is why a CPU run under torch's own lists is a different, harsher experiment than a GPU run.

Source: the AT_FORALL_* macros of `ATen/autocast_mode.h` and the registrations of `ATen/autocast_mode.cpp`, torch
2.14.1; tests/test_precision_policy.py compares them with what the installed torch registers for CUDA.
"""

LOWER_PRECISION = frozenset({
    "_convolution", "_convolution.deprecated", "convolution", "conv1d", "conv2d", "conv3d", "conv_tbc",
    "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input",
    "prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm",
    "bmm", "chain_matmul", "linalg_multi_dot", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell",
    "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "_scaled_dot_product_flash_attention",
    "scaled_dot_product_attention",
})  # fmt: skip
"""AT_FORALL_LOWER_PRECISION_FP: inputs are cast to the 16-bit format."""

LOWER_PRECISION_CUDNN = frozenset({"_cudnn_rnn", "cudnn_convolution", "cudnn_convolution_transpose"})
"""Registered beside that list for cuDNN's own entry points. torch's kernel casts `_cudnn_rnn` to FP16 even where the
region is BF16: there, and on other devices, `RECURRENT` takes its place."""

RECURRENT = frozenset({
    "lstm.input", "lstm.data", "gru.input", "gru.data", "rnn_tanh.input", "rnn_tanh.data", "rnn_relu.input",
    "rnn_relu.data",
})  # fmt: skip
"""What `nn.LSTM`, `nn.GRU` and `nn.RNN` call, above `_cudnn_rnn`."""

CONV_PADDING = frozenset({"conv1d.padding", "conv2d.padding", "conv3d.padding"})
"""Convolutions with `padding="same"`: on CUDA they reach a listed operation one step later."""

FP32 = frozenset({
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity",
    "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div",
    "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss",
    "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist",
    "pdist", "cdist", "renorm", "logsumexp", "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d",
    "_upsample_nearest_exact2d", "upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d",
    "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d",
    "_upsample_bicubic2d_aa", "linalg_matrix_sqrth",
})  # fmt: skip
"""AT_FORALL_FP32: inputs are cast to FP32."""

FP32_SET_OPT_DTYPE = frozenset({
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
})  # fmt: skip
"""AT_FORALL_FP32_SET_OPT_DTYPE: the output is FP32 unless the caller asked for a dtype."""

FP32_APPEND_DTYPE = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
"""AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE: replaced by the overload that takes an output dtype, FP32."""

PROMOTE = frozenset({
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
    "scatter_add",
})  # fmt: skip
"""AT_FORALL_PROMOTE: inputs are cast to the widest format among them."""

BANNED = {
    "binary_cross_entropy": "binary_cross_entropy is unsafe in 16 bits (the sigmoid before it saturates); "
    "use binary_cross_entropy_with_logits on the logits"
}
"""Refused, with the reason."""

TENSOR_CORE = frozenset({
    "_convolution", "_convolution.deprecated", "convolution", "conv1d", "conv2d", "conv3d", "conv_tbc",
    "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "addmm", "addbmm", "baddbmm", "addmv",
    "bmm", "linear", "matmul", "mm", "mv", "linalg_vecdot", "scaled_dot_product_attention", "dot", "vdot", "lstm_cell",
    "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
}) | RECURRENT | CONV_PADDING  # fmt: skip
"""Products that one kernel computes with FP32 accumulation: what is emulated, and what TF32 touches."""


CPU_AUTOCAST_TOO = frozenset({
    "conv1d", "conv2d", "conv3d", "conv1d.padding", "conv2d.padding", "conv3d.padding", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "addmm", "addbmm", "baddbmm", "bmm", "linear", "matmul", "mm",
})  # fmt: skip
"""Products whose inputs torch's own CPU autocast casts as CUDA's does."""


CPU_AUTOCAST_FP32_TOO = frozenset({
    "binary_cross_entropy_with_logits", "cosine_embedding_loss", "cross_entropy_loss", "hinge_embedding_loss",
    "huber_loss", "kl_div", "l1_loss", "margin_ranking_loss", "mse_loss", "multi_margin_loss", "multilabel_margin_loss",
    "nll_loss", "nll_loss2d", "poisson_nll_loss", "smooth_l1_loss", "soft_margin_loss", "triplet_margin_loss",
})  # fmt: skip
"""Losses that torch's own CPU autocast takes to FP32 as CUDA's does, cross_entropy_loss of FP32 logits."""


def base_name(operation: str) -> str:
    """`softmax.int` -> `softmax`: the name users write in `keep_fp32`."""
    return operation.partition(".")[0]


FUNCTIONS = frozenset(
    base_name(name) for name in LOWER_PRECISION | RECURRENT | FP32 | FP32_SET_OPT_DTYPE | PROMOTE | {"norm"}
)
"""Every name that `keep_fp32` understands as a function."""
