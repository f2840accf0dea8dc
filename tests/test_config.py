import pytest
from tiny.runs import settings

from mptrain import compose
from mptrain.config import COSMETIC, Config, check
from mptrain.errors import UserError

pytestmark = pytest.mark.usefixtures("tiny")


def complaints(**changes):
    with pytest.raises(UserError) as caught:
        settings(**changes)
    return str(caught.value).splitlines()


def test_values_arrive_typed():
    config = settings("tiny", "fp16", clip=1, scale=8, optimizer__lr=1)
    assert (config.clip, config.scale, config.optimizer.lr, config.steps) == (1.0, 8, 1, 20)
    assert config.optimizer.options == {"momentum": 0.9} and config.schedule.options == {}
    assert config.numbers.name == "fp16" and config.numbers.scale == "dynamic"


BAD = [
    ({"steps": 0}, "steps=0: give a number of 1 or more"),
    ({"steps": -1}, "steps=-1: give a number of 1 or more"),
    ({"steps": "abc"}, "steps=abc: give a whole number"),
    ({"steps": 1000.0}, "steps=1000.0: give a whole number"),
    ({"steps": True}, "steps=True: give a whole number"),
    ({"steps": 10**400}, f"steps={10**400}: give a number of at most 1000000000000"),
    ({"steps": None}, "steps is not set; a recipe sets it (mptrain +recipe=NAME), or give steps=..."),
    ({"batch_size": 0}, "batch_size=0: give a number of 1 or more"),
    ({"accumulate": 0}, "accumulate=0: give a number of 1 or more"),
    ({"clip": 0}, "clip=0: give a number above 0.0"),
    ({"clip": float("nan")}, "clip=nan: give a finite number"),
    ({"clip": float("inf")}, "clip=inf: give a finite number"),
    ({"ema": 1.0}, "ema=1.0: give a number below 1.0"),
    ({"ema": -0.1}, "ema=-0.1: give a number of 0.0 or more"),
    ({"seed": -1}, "seed=-1: give a number of 0 or more"),
    ({"seed": 2**32}, f"seed={2**32}: give a number below 4294967296"),
    ({"device": "tpu"}, "device=tpu: give auto, cpu, cuda or cuda:N"),
    ({"threads": 0}, "threads=0: give a number of 1 or more"),
    ({"workers": -1}, "workers=-1: give a number of 0 or more"),
    ({"progress": "maybe"}, "progress=maybe: give true or false or one of auto"),
    ({"count": "yes"}, "count=yes: give true or false"),
    ({"out": ""}, "out=: give a name, or leave it out"),
    ({"data": 5}, "data=5: give text"),
    ({"optimizer__name": "adan"}, "optimizer.name=adan: give one of sgd, adam, adamw, adagrad or rmsprop"),
    ({"optimizer__lr": -1}, "optimizer.lr=-1: give a number of 0.0 or more"),
    ({"optimizer__lr": float("nan")}, "optimizer.lr=nan: give a finite number"),
    ({"optimizer__momentum": "much"}, "optimizer.momentum=much: give a number, as 0.0 is"),
    ({"optimizer__momentum": -0.5}, "optimizer.momentum=-0.5: give a number that is not negative"),
    ({"optimizer__momentum": float("inf")}, "optimizer.momentum=inf: give finite numbers"),
    ({"optimizer__nesterov": 1}, "optimizer.nesterov=1: give true or false, as False is"),
    (
        {"optimizer__momentm": 0.9},
        "optimizer.momentm is not an option of sgd; did you mean momentum? "
        "there are momentum, dampening, weight_decay, nesterov, maximize",
    ),
    (
        {"optimizer": {"name": "adam", "lr": 0.1, "betas": [0.9, "x"]}},
        "optimizer.betas=[0.9, 'x']: give a list, as [0.9, 0.999] is",
    ),
    ({"optimizer": 3}, "optimizer=3: give a mapping"),
    ({"schedule__foo": 1}, "schedule.foo is not an option of cosine; there are final"),
    ({"schedule__warmup": -1}, "schedule.warmup=-1: give a number of 0 or more"),
    ({"schedule": {"name": "exponential", "every": 0}}, "schedule.every=0: give a number of steps, 1 or more"),
    (
        {"schedule": {"name": "step", "milestones": [1.5]}},
        "schedule.milestones=[1.5]: give steps, as [1000,2000] is",
    ),
    ({"eval__precision": "fp16"}, "eval.precision=fp16: give one of fp32 or same"),
    ({"eval__every": 0}, "eval.every=0: give a number of 1 or more"),
    ({"scaling__growth": 1.0, "scale": "dynamic"}, "scaling.growth=1.0: give a number above 1.0"),
    ({"scaling__backoff": 1.5, "scale": "dynamic"}, "scaling.backoff=1.5: give a number below 1.0"),
    ({"scaling__init": 4.0}, "scaling.init=4.0 has no effect with scale=none; set scale=dynamic"),
    (
        {"scaling__floor": 8.0, "scaling__ceiling": 4.0, "scaling__init": 4.0, "scale": "dynamic"},
        "scaling.floor=8.0 is above scaling.ceiling=4.0",
    ),
    (
        {"scaling__ceiling": 4.0, "scale": "dynamic"},
        "scaling.init=65536.0 is above scaling.ceiling=4.0",
    ),
    (
        {"precision__master": False},
        "precision.master=false contradicts precision.storage=float32: FP32 parameters are their own master copy; "
        "set precision.storage=float16 (or use precision=fp16_nomaster)",
    ),
    ({"scale": [8]}, "scale=[8]: give a positive number (static), dynamic, layerwise or none"),
    ({"scale": {"a": 1}}, "scale={'a': 1}: give a positive number (static), dynamic, layerwise or none"),
    ({"watch__layers": "fc"}, "watch.layers=fc: give a list, e.g. [a,b]"),
    ({"precision__compute": "int8"}, "precision.compute=int8: choose float32 | tf32 | bfloat16 | float16 | float8"),
    ({"precision__keep_fp32": "softmax"}, "precision.keep_fp32=softmax: give a list of names, e.g. [softmax,fc]"),
    ({"task__name": 3}, "task.name=3: give text"),
]


@pytest.mark.parametrize("changes, sentence", BAD, ids=lambda value: str(value)[:40])
def test_one_sentence_for_one_mistake(changes, sentence):
    assert complaints(**changes) == [sentence]


NO_SCALES = [0, -1, 0.0, float("nan"), float("inf"), 1e400, "abc", "", True, 1e-300, 2.0**200, "8"]


@pytest.mark.parametrize("scale", NO_SCALES)
def test_scales_that_are_none(scale):
    (found,) = complaints(scale=scale)
    shown = "'8', text" if scale == "8" else scale
    assert found.startswith(f"scale={shown}: give a positive number (static") and found.endswith(
        "dynamic, layerwise or none"
    )


@pytest.mark.parametrize("scale, name", [(8, "8"), (2.0**-10, "0.0009765625"), (1234567.0, "1234567"), (0.1, "0.1"),
                                         ("dynamic", "dynamic"), ("none", "none"), (None, "none")])  # fmt: skip
def test_a_scale_keeps_all_its_digits(scale, name):
    assert settings(scale=scale).scale_name == name
    assert name in ("dynamic", "none") or float(name) == scale


def test_all_complaints_in_one_message():
    found = complaints(steps=-1, clip=-1, device="tpu", optimizer__momentm=1, scale="abc", precision__master=False)
    assert len(found) == 6


def test_unknown_keys():
    values = dict(compose.baseline("tiny", "fp32"), stepz=3)
    with pytest.raises(UserError, match="^stepz is unknown$"):
        check(values)


def test_a_task_option_keeps_its_type():
    baseline = compose.baseline("tiny", "fp32")
    values = {**baseline, "task": {**baseline["task"], "hidden": "wide"}}
    with pytest.raises(UserError, match="^task.hidden=wide: give a whole number, as 16 is$"):
        check(values, baseline)


def test_what_decides_and_what_does_not():
    config = settings()
    cosmetic = {"log_every": 7, "workers": 3, "checkpoint_every": 9, "progress": True, "warmup": 1,
                "parallel": {"shard": True}}  # fmt: skip
    assert settings(**cosmetic).identity() == config.identity()
    changes = [{"seed": 1}, {"steps": 21}, {"optimizer__lr": 0.2}, {"task__hidden": 17}, {"threads": 1}, {"scale": 2}]
    changes.append({"parallel": {"batchnorm": "local"}})
    for change in changes:
        assert settings(**change).identity() != config.identity(), change
    assert settings("tiny", "fp16").identity() != config.identity()
    assert Config.model_fields.keys() >= {key for key in COSMETIC if "." not in key}


def test_what_can_stand_in_one_table():
    config = settings()
    for same in ({"seed": 1}, {"scale": 8}, {"device": "cpu"}, {"threads": 1}, {"data_dir": "/x"}, {"max_skips": 3}):
        assert settings(**same).comparable() == config.comparable(), same
    assert settings("tiny", "bf16").comparable() == config.comparable()
    for other in ({"steps": 21}, {"batch_size": 4}, {"task__hidden": 17}, {"optimizer__lr": 0.2}, {"ema": 0.9}):
        assert settings(**other).comparable() != config.comparable(), other


def test_the_folder(tmp_path, monkeypatch):
    config = settings("tiny", "fp16", scaling__init=1024.0)
    assert config.folder().parent == tmp_path / "results" / "runs"
    assert config.folder().name == f"tiny-fp16-scale_dynamic-init1024-seed0-{config.identity()}"
    assert settings(out="here").folder() == tmp_path / "here"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert settings(out="~/x").folder() == tmp_path / "home" / "x"
