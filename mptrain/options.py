"""What optimizers and learning-rate schedules can be told, with defaults: data alone, so that the command line can
refuse a misspelt option before torch is imported."""

from __future__ import annotations

from typing import Any

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False},
    "adam": {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "maximize": False,
             "decoupled_weight_decay": False},
    "adamw": {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False, "maximize": False},
    "adagrad": {"lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10,
                "maximize": False},
    "rmsprop": {"alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0, "centered": False,
                "maximize": False},
}  # fmt: skip
"""Names and defaults are those of torch.optim; `foreach` and `fused`, which change speed alone, are left to it."""

SCHEDULES: dict[str, dict[str, Any]] = {
    "constant": {},
    "cosine": {"final": 0.0},
    "linear": {"final": 0.0},
    "onecycle": {},
    "step": {"milestones": [], "gamma": 0.1},
    "exponential": {"gamma": 0.99, "every": 1},
}
"""`final`: the share of the peak left at the end. `milestones`, `every`: steps."""
