import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import tiny as tiny_package
import torch
from tiny.runs import same_bits, weights

from mptrain import cli, compose, files
from mptrain.errors import UserError
from mptrain.results.record import Record

pytestmark = pytest.mark.usefixtures("tiny")
REPOSITORY = Path(cli.__file__).parent.parent
QUIET = ["tensorboard=false", "progress=false"]


@pytest.fixture
def said(capsys):
    """Runs a command line; returns its status, output and complaints."""

    def call(*arguments):
        status = cli.main(list(arguments))
        return status, *capsys.readouterr()

    return call


def refused(said, *arguments):
    status, out, err = said(*arguments)
    assert status == 1 and out == "" and err.startswith("mptrain: ") and "Traceback" not in err
    assert not list(Path("results").glob("*/*")) and not Path("run").exists()
    return err.removeprefix("mptrain: ").replace("\n         ", "\n").strip().splitlines()


def python(*arguments, **environment):
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_listing_and_help(said):
    status, out, err = said()
    assert status == 0 and err == ""
    assert "tiny                     Test: a perceptron" in out and "tiny_paper" in out
    for arguments in (["--help"], ["-h"], ["help"], ["+recipe=tiny", "--help"], ["train", "-h"]):
        status, out, err = said(*arguments)
        assert status == 0 and "mptrain +recipe=NAME [KEY=VALUE ...]" in out and "fp16_master" in out
    assert said("--version")[0] == 0


BAD = {
    "+recipe=tini": "recipe=tini is unknown; did you mean tiny? there are tiny, tiny_paper",
    "+recipe=": "recipe= is unknown; there are tiny, tiny_paper",
    "+recipe=[tiny,tiny_paper]": "recipe=['tiny', 'tiny_paper'] is unknown",
    "+recipe=tiny precision=fp61": "precision=fp61 is unknown; did you mean fp16",
    "+recipe=tiny precison=fp16": "precison is unknown; did you mean precision or precision.name? "
    "all keys: mptrain +recipe=tiny --cfg job",
    "+recipe=tiny +recipe=tiny_paper": "recipe is given 2 times (+recipe=tiny, +recipe=tiny_paper); give it once",
    "+recipe=tiny precision=fp16 precision=bf16": "precision is given 2 times",
    "+recipe=tiny,tiny_paper": "+recipe=tiny,tiny_paper is a sweep; give one value, or each a run of its own",
    "+recipe=tiny seed=range(3)": "seed=range(3) is a sweep; give one value",
    "-m +recipe=tiny seed=range(0)": "seed=range(0) names no value at all",
    "+tiny": "'+tiny' is a recipe; to train it type mptrain +recipe=tiny",
    "steps=3": "no recipe is named; write +recipe=NAME, there are tiny, tiny_paper",
    "trian +recipe=tiny": "'trian' is neither a verb nor key=value; did you mean train? there are train, ",
    "+recipe=tiny train": "'train' cannot be read as key=value",
    "+recipe=tiny a=[1,2": "'a=[1,2' cannot be read as key=value",
    "+recipe=tiny a='x": "'a='x' cannot be read as key=value",
    "+recipe=tiny out=é": "'out=é' cannot be read as key=value; put a value with signs of its own in two",
    "+recipe=tiny =3": "an empty key is unknown",
    "+recipe=tiny steps=": "steps=: give a whole number",
    "+recipe=tiny steps=1e3": "steps=1000.0: give a whole number",
    "+recipe=tiny steps=nan": "steps=nan: give a whole number",
    "+recipe=tiny out=": "out=: give a name, or leave it out",
    "+recipe=tiny scale=1e400": "scale=inf: give a positive number",
    "+recipe=tiny scale=-1": "scale=-1: give a positive number",
    "+recipe=tiny optimizer.lr=-nan": "optimizer.lr=nan: give a finite number",
    "+recipe=tiny ~clip": "clip cannot be taken out, only set: clip=...",
    "+recipe=tiny ~precision": "precision cannot be taken out",
    "+recipe=tiny ~clipp": "clipp is unknown; did you mean clip",
    "+recipe=tiny +steps=3": "steps is there already; set it without a plus sign: steps=3",
    "+recipe=tiny +task.hidden=3": "task.hidden is there already; set it without a plus sign: task.hidden=3",
    "+recipe=tiny +precision@numbers=fp16": "+precision@numbers=fp16: @ has no use here, precision has one place",
    "+recipe@a.b=tiny": "+recipe@a.b=tiny: @ has no use here, recipe has one place; leave out @a.b",
    "recipe=tiné": "'+recipe=tiné' cannot be read as key=value",
    "+recipe=tiny optimizer=adam": "optimizer=adam: give a mapping, e.g. optimizer.name=adam",
    '+recipe=tiny scale="8"': "scale='8', text: give a positive number (static), dynamic",
    "+recipe=tiny scale=1e39": "scale=1e+39: give a positive number (static, from 2^-126 to 2^126; a",
    "+recipe=tiny --experimental-rerun x": "--experimental-rerun has no use here",
    "--shell-completion bash": "--shell-completion: give install=bash, fish or zsh",
    "+recipe=tiny optimizer.momentm=0.5": "optimizer.momentm is unknown; did you mean optimizer.momentum",
    "+recipe=tiny +optimizer.momentm=0.5": "optimizer.momentm is not an option of sgd; did you mean momentum?",
    "+recipe=tiny optimizer.nesterov=true": "optimizer.nesterov is not set by recipe=tiny; add it with a plus sign",
    "+recipe=tiny schedule.name=step schedule.gamma=0.5": "schedule.gamma is not set by recipe=tiny; add it",
    "+recipe=tiny schedule.name=step +schedule.milestones=[0]": "schedule.milestones=[0]: give steps",
    "+recipe=tiny optimizer.name=adam ~optimizer.momentum +optimizer.betas=[0.9]": "optimizer.betas=[0.9]: give 2",
    "+recipe=tiny +optimizer.fused=true": "optimizer.fused is not an option of sgd",
    "+recipe=tiny precision.name=mine": "precision.name=mine is not the name of a file; there are bf16,",
    "+recipe=tiny precision.name=null": "precision.name=None is not the name of a file",
    "+recipe=tiny precision.scale=foo": "precision.scale=foo: give a positive number",
    "+recipe=tiny precision.keep_fp32={a:1}": "precision.keep_fp32={'a': 1}: give a list of names",
    "+recipe=tiny precision.keep_fp32=5": "precision.keep_fp32=5: give a list of names",
    "+recipe=tiny precision=fp16 scaling.init=1e300": "scaling.init=1e+300: give a scale that FP32 holds",
    "+recipe=tiny layerwise.every=5": "layerwise.every=5 has no effect with scale=none; set scale=layerwise",
    "+recipe=tiny +schedule.foo=1": "schedule.foo is not an option of cosine; there are final",
    "+recipe=tiny optimizer.name=adam": "optimizer.momentum is not an option of adam; take it out (~optim",
    "+recipe=tiny optimizer=3": "optimizer=3: give a mapping",
    "+recipe=tiny task.hidden=wide": "task.hidden=wide: give a whole number, as 16 is",
    "+recipe=tiny +task.hiden=4": "task tiny: got an unexpected keyword argument 'hiden'",
    "+recipe=tiny out=${nowhere}": "Interpolation key 'nowhere' not found",
    "+recipe=tiny precision.master=false": "precision.master=false contradicts precision.storage=float32",
    "+recipe=tiny precision=bf16 scaling.init=4": "scaling.init=4 has no effect with scale=none; set scale=dynamic",
    "+recipe=tiny data_dir=/nowhere/at/all": "data_dir=/nowhere/at/all is not a folder",
    "+recipe=tiny data=unknown": "data=unknown is unknown; there are numbers, synthetic",
    "+recipe=tiny hydra.foo=1": "Could not override 'hydra.foo'.",
    "+recipe=tiny hydra.job.chdri=true": "Could not override 'hydra.job.chdri'.",
    "+recipe=tiny --frobnicate": "unrecognized arguments: --frobnicate; see mptrain --help",
    "+recipe=tiny --info nothing": "argument --info/-i: invalid choice: 'nothing'",
    "-m +recipe=tiny seed=0,a": "seed=a: give a whole number",
    "-m +recipe=tiny steps=3,x seed=range(300)": "steps=x: give a whole number",
    "-m +recipe=glob(*) steps=x": "steps=x: give a whole number",
    "-m +recipe=glob(zz*) steps=3": "+recipe=glob(zz*) names no recipe at all; there are tiny, tiny_paper",
    "-m +recipe=tiny precision=glob(zz*)": "precision=glob(zz*) names no precision at all; there are bf16,",
    "-m +recipe=tiny scale=interval(1,2)": "scale=interval(1,2) is an interval, of which a sweep here takes no values",
    "probe +recipe=tini": "recipe=tini is unknown; did you mean tiny?",
    "probe +recipe=tiny --foo": "--foo is not an option here; give +recipe=NAME and KEY=VALUE",
    "estimate": "no recipe is named; write +recipe=NAME, there are tiny, tiny_paper",
}


@pytest.mark.parametrize("line", BAD)
def test_mistakes_have_one_message(said, line):
    found = refused(said, *line.split(" "))
    assert found[0].startswith(BAD[line]) or BAD[line] in "\n".join(found), found
    assert len(found) <= 4


def test_all_mistakes_in_one_message(said):
    found = refused(said, "+recipe=tini", "precison=fp16", "steps=-1", "scale=abc", "seed='x")
    about = [line.partition(" ")[0] for line in found]
    assert about == ["'seed='x'", "recipe=tini", "precison", "steps=-1:", "scale=abc:"]


def test_very_long_values(said):
    (found,) = refused(said, "+recipe=tiny", "out=" + "x" * 5000, *QUIET)
    assert "cannot be used for this run (File name too long)" in found
    (found,) = refused(said, "+recipe=tiny", "steps=" + "9" * 3000)
    assert "at most 1000000000000" in found


@pytest.mark.parametrize(
    "line",
    ["+recipe=langage precison=fp16", "foo", "+recipe=tiny scale=abc", "", "--help", "-h"]
    + ["probe --help", "probe +recipe=langage", "estimate -h", "estimate +recipe=tiny scale=abc"],
)
def test_an_answer_without_torch_in_under_a_second(tmp_path, line):
    """Of the processor, since other work may be going on; and torch is not even imported."""
    before = os.times()
    python(tiny_package.__path__[0], "--modules", str(tmp_path / "modules"), *line.split())
    after = os.times()
    assert "torch" not in (tmp_path / "modules").read_text().split()
    used = after.children_user - before.children_user + after.children_system - before.children_system
    assert 0 < used < 1.0


def test_help_of_a_verb(said):
    for words in (["help", "compare"], ["compare", "--help"], ["help", "probe"], ["estimate", "-h"]):
        status, out, err = said(*words)
        assert status == 0 and err == "" and f"mptrain {words[0] if words[0] != 'help' else words[1]} " in out


def test_looking_at_the_configuration(said):
    status, out, err = said("+recipe=tiny", "--cfg", "job", "precision=fp16")
    assert status == 0 and err == "" and "compute: float16" in out and "hidden: 16" in out
    assert said("--cfg", "job")[0] == 0
    done = python(tiny_package.__path__[0], "+recipe=tiny", "--info", "defaults")  # sets Hydra's loggers for good
    assert done.returncode == 0 and "recipe/tiny" in done.stdout and done.stderr == ""


def test_training_and_coming_again(said, tmp_path):
    arguments = ["train", "recipe=tiny", "out=run", "++steps=3", "+optimizer.nesterov=true", *QUIET]
    status, out, err = said(*arguments)
    assert (status, err) == (0, "") and out.startswith("finished: accuracy 0.")
    assert said(*arguments) == (0, f"already finished, nothing to do: {tmp_path / 'run'}\n", "")
    assert "watch=true was not asked for then" in said(*arguments, "watch=true")[1]
    status, out, err = said(*arguments, "seed=1")
    assert status == 1 and "another configuration (seed: 0 -> 1)" in err


def test_the_recipe_of_the_paper_inherits(said):
    status, out, _ = said("+recipe=tiny_paper", "--cfg", "job")
    assert status == 0 and "hidden: 32" in out and "depth: 1" in out and "recipe: tiny_paper" in out


def test_names_with_signs_of_their_own(said, tmp_path):
    assert said("+recipe=tiny", "out='été, ou \"x\"'", "steps=1", *QUIET)[0] == 0
    assert (tmp_path / 'été, ou "x"' / "summary.json").exists()


def test_interpolations(said, tmp_path):
    assert said("+recipe=tiny", "out='${recipe}_${seed}'", "steps=1", *QUIET)[0] == 0
    assert said("+recipe=tiny", "out='${hydra:job.name}'", "steps=1", *QUIET)[0] == 0
    assert len(list(tmp_path.glob("*/summary.json"))) == 2 and (tmp_path / "tiny_0").is_dir()


@pytest.mark.parametrize("options", [[], ["hydra.job.chdir=true", "hydra.run.dir=elsewhere"]])
def test_paths_are_relative_to_where_it_was_called(said, tmp_path, options):
    (tmp_path / "data").mkdir()
    arguments = ["+recipe=tiny", "out=here/run", "data_dir=data", "steps=1", *QUIET, *options]
    assert said(*arguments)[0] == 0
    config = files.read_yaml(tmp_path / "here" / "run" / "config.yaml")
    assert config["data_dir"] == str(tmp_path / "data") and Path.cwd() == tmp_path


def statuses(folder):
    return {path.parent.name: json.loads(path.read_text())["status"] for path in folder.glob("*/summary.json")}


def test_a_multirun_goes_on_after_failures(said, tmp_path):
    status, out, err = said(
        "-m", "+recipe=tiny", "steps=12", "task.crash_at=-1,1001", "seed=0,1", "task.bad=[],[-1]", "max_skips=3",
        "data=numbers,nothing", *QUIET,
    )  # fmt: skip
    assert status == 1
    found = statuses(tmp_path / "results" / "runs")
    assert sorted(found.values()) == ["diverged"] * 4 + ["failed"] * 2 + ["finished"] * 2
    summary = err[err.index("10 of the runs failed") :]
    assert summary.count("data=nothing is unknown") == 8 and summary.count("told to crash") == 2
    assert "task.crash_at=1001" in summary and "seed=1" in summary
    assert out.count("diverged: ") == 4


def test_a_multirun_leaks_nothing(said, tmp_path):
    alone = {}
    for precision in ("fp16", "fp32", "tf32"):
        said("+recipe=tiny", f"precision={precision}", f"out=alone/{precision}", "task.dropout=0.2", *QUIET)
        alone[precision] = weights(tmp_path / "alone" / precision)
    before = (torch.backends.mkldnn.matmul.fp32_precision, torch.get_num_threads())
    for name, order in (("a", "fp16,fp32,tf32"), ("b", "tf32,fp32,fp16")):
        arguments = ["-m", "+recipe=tiny", f"precision={order}", "task.dropout=0.2", f"results={name}", "threads=1"]
        assert said(*arguments, *QUIET)[0] == 0
        for folder in (tmp_path / name).iterdir():
            assert same_bits(weights(folder), alone[folder.name.split("-")[1]])
    assert before == (torch.backends.mkldnn.matmul.fp32_precision, torch.get_num_threads())


def test_sweeping_over_recipes(said, tmp_path):
    assert said("-m", "+recipe=glob(*)", "seed=range(2)", "steps=1", *QUIET)[0] == 0
    assert sorted({name.rsplit("-", 1)[0] for name in statuses(tmp_path / "results" / "runs")}) == [
        f"{recipe}-fp32-scale_none-seed{seed}" for recipe in ("tiny", "tiny_paper") for seed in (0, 1)
    ]


def test_options_may_come_last(said):
    assert said("+recipe=tiny", "-m", "steps=1", "seed=0,1", *QUIET)[0] == 0


def test_a_file_in_place_of_the_results(said, tmp_path):
    (tmp_path / "results").write_text("")
    status, _, err = said("+recipe=tiny", "steps=1", *QUIET)
    assert status == 1 and "cannot be used for this run (Not a directory); give another one: out=FOLDER" in err


@pytest.mark.parametrize("name", ["config.yaml", "summary.json"])
def test_corrupt_records(said, tmp_path, name):
    said("+recipe=tiny", "steps=1", "out=run", *QUIET)
    (tmp_path / "run" / name).write_text("{")
    status, out, err = said("+recipe=tiny", "steps=1", "out=run", *QUIET)
    assert status == 1 and out == "" and name in err and "cannot be read" in err and "Traceback" not in err


def test_a_corrupt_log_is_cut_at_the_checkpoint(said, tmp_path):
    arguments = ["+recipe=tiny", "steps=9", "checkpoint_every=4", "log_every=1", "task.crash_at=1001"]
    arguments += ["out=run", *QUIET]
    assert said(*arguments)[0] == 1
    metrics = tmp_path / "run" / "metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text(whole + "\x00garbage{")
    assert said(*arguments)[0] == 1
    assert metrics.read_text() == whole


def test_warnings_are_errors_and_none_comes(tmp_path):
    done = python("-W", "error", tiny_package.__path__[0], "+recipe=tiny", "precision=fp16", "out=run", "workers=2",
                  "task.bad=[0]", "ema=0.9", "steps=6", "eval.every=2")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert all(line.startswith(("mptrain: ", "  ")) for line in done.stderr.splitlines()), done.stderr
    assert done.stderr.startswith("mptrain: step 1 is not finite, first in the forward of 0 (Linear)")
    assert Record(tmp_path / "run").state() == "finished"


def test_a_terminal_that_lacks_a_letter(tmp_path):
    words = [tiny_package.__path__[0], "+recipe=tiny", f"out='{tmp_path}/é'", "steps=1", *QUIET]
    done = python(*words, PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and done.stderr == "" and done.stdout.endswith("/\\xe9\n"), done.stderr
    assert (tmp_path / "é" / "summary.json").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", ["", "--help"])
def test_what_is_printed_finds_no_room(words):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "mptrain", *words.split()],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1 and done.stderr == (
        "mptrain: what is printed cannot be written: No space left on device; give it another place (> FILE)\n"
    )


def test_a_folder_that_is_gone(said, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for words in (["+recipe=tiny", "steps=1"], ["compare"], ["doctor"]):
        status, out, err = said(*words)
        assert (status, out) == (1, "") and "the folder you are in is not there any more" in err


@pytest.mark.slow
def test_an_installed_wheel_trains_from_anywhere(tmp_path):
    """Built and unpacked into an environment of its own, which borrows the dependencies of this one."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "wheel")]
    subprocess.run(build, cwd=REPOSITORY, check=True, capture_output=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    borrowed = [p for p in sys.path if p.endswith("site-packages")]
    (site / "borrowed.pth").write_text("\n".join(borrowed))
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    call = [str(tmp_path / "venv" / "bin" / "python"), "-m", "mptrain"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}

    def run(*arguments):
        where = {"cwd": tmp_path / "elsewhere", "env": environment, "capture_output": True, "text": True}
        return subprocess.run([*call, *arguments], **where)

    (tmp_path / "elsewhere").mkdir()
    listed = run().stdout
    assert all(f"  {path.stem} " in listed for path in REPOSITORY.glob("recipes/*.yaml"))
    done = run("+recipe=resnet", "data=synthetic", "steps=2", "batch_size=8", "precision=fp16", "out=run")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert (tmp_path / "elsewhere" / "run" / "summary.json").exists()


def test_a_verb_gets_the_configuration_that_training_would_get():

    found = compose.config(["recipe=tiny", "precision=fp16", "scale=8", "steps=3", "task.hidden=8"])
    assert (found.recipe, found.numbers.name, found.scale_name, found.steps) == ("tiny", "fp16", "8", 3)
    assert found.task.options["hidden"] == 8
    with pytest.raises(UserError, match="scale=1,8 is a sweep; give one value"):
        compose.config(["+recipe=tiny", "precision=fp16", "scale=1,8"])
    with pytest.raises(UserError, match="-m is not an option here"):
        compose.config(["+recipe=tiny", "-m"])
    with pytest.raises(UserError, match="(?s)stepz.*unknown.*lr"):
        compose.config(["+recipe=tiny", "stepz=3", "optimizer.lr=-1"])
